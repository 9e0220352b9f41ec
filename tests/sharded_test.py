"""The loop on eight devices is the loop on one, whatever lies where.

Two models of random weights, float32. Sums over a split axis are taken in
another order, so logits differ in the last bits; the texts are equal because
no choice along them is that close, which is checked (`MARGIN`).
"""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import decode, mesh, testing
from specjax import noise as noise_lib
from specjax import state as states
from specjax.models import config, transformer
from specjax.models.toy import ToyModel
from specjax.proposers import base
from specjax.proposers.base import Nothing
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.ngram import NGram
from specjax.sampling import SamplingOptions, stack_options
from specjax.verify import chain

B, L, K, V = 8, 32, 3, 52
MARGIN = 1e-4  # Nats between the best two ids, at least.
ALL = np.int32(2**31 - 1)

# 52 ids in a table of 64 rows: on model:8 neither divides as the other does.
# Four key-value heads: fewer than eight devices.
_CONFIG = {
  'model_type': 'qwen3',
  'vocab_size': 64,
  'hidden_size': 32,
  'intermediate_size': 48,
  'num_hidden_layers': 2,
  'num_attention_heads': 8,
  'num_key_value_heads': 4,
  'head_dim': 8,
  'max_position_embeddings': 64,
  'rms_norm_eps': 1e-5,
  'hidden_act': 'silu',
  'rope_theta': 10000.0,
  'tie_word_embeddings': True,
}
TARGET = config.config_from_hf(_CONFIG, V, 'float32')
DRAFT = config.config_from_hf(
  {**_CONFIG, 'num_hidden_layers': 1, 'num_key_value_heads': 2}, V, 'float32'
)
TOY = ToyModel(vocab_size=V, context_length=64)
LLAMAS, TOYS = (TARGET, DRAFT), (TOY, TOY)

# Mesh of the target, of the draft, and the rules.
MESHES = {
  'replicated': ('data:1,model:1', 'data:1,model:1', mesh.TENSOR_PARALLEL),
  'data': ('data:8', 'data:8', mesh.TENSOR_PARALLEL),
  'tensor': ('model:8', 'model:8', mesh.TENSOR_PARALLEL),
  'data_x_tensor': ('data:2,model:4', 'data:2,model:4', mesh.TENSOR_PARALLEL),
  'fully_sharded': ('data:4,model:2', 'data:4,model:2', mesh.FULLY_SHARDED),
  'draft_on_some': ('model:8', 'model:2', mesh.TENSOR_PARALLEL),
  'draft_copied': ('data:2,model:4', 'model:1', mesh.TENSOR_PARALLEL),
  'draft_by_row': ('model:8', 'data:8', mesh.TENSOR_PARALLEL),
}


@dataclasses.dataclass(frozen=True)
class EachRule:
  """Every rule takes its turn, by a number that only seed and step decide."""

  name = 'each'
  draft_purpose = noise_lib.TOKEN

  def __call__(self, noise, draft_K, q_KV, num_draft, p_NV):
    rules = (chain.Rejection(), chain.Coupled(), chain.Block())
    verdicts = [rule(noise, draft_K, q_KV, num_draft, p_NV) for rule in rules]
    bits = jax.random.bits(noise.residual_N[0])
    turn = (bits % len(rules)).astype(jnp.int32)
    pick = lambda *x: jnp.stack(x)[turn]
    return chain.Verdict(
      pick(*(v.num_accepted for v in verdicts)),
      pick(*(v.next_token for v in verdicts)),
    )


@dataclasses.dataclass(frozen=True)
class EachProposer:
  """The draft model, prompt lookup and nothing take turns, by length."""

  model: ToyModel | transformer.Transformer
  num_draft_tokens = K
  target_features = ()

  def init(self, *args):
    return make_proposer('draft', self.model).init(*args)

  def propose(self, params, keys_BK, state, target, tokens_BL, length_B, *rest):
    args = (target, tokens_BL, length_B, *rest)
    drawn, state = make_proposer('draft', self.model).propose(
      params, keys_BK, state, *args
    )
    found, _ = NGram(num_draft_tokens=K).propose(params, keys_BK, (), *args)
    turn_B = length_B % 3
    is_found_B1 = (turn_B == 1)[:, None]
    one_hot_BKV = jax.nn.one_hot(found.draft_BK, V)
    return base.Proposal(
      jnp.where(is_found_B1, found.draft_BK, drawn.draft_BK),
      jnp.where(
        is_found_B1[:, :, None], jnp.log(one_hot_BKV), drawn.log_weights_BKV
      ),
      jnp.select(
        [turn_B == 0, turn_B == 1], [drawn.num_draft_B, found.num_draft_B], 0
      ),
    ), state

  def observe(self, params, state, outcome):
    return state


def make_proposer(name: str, draft):
  if name == 'each':
    return EachProposer(draft)
  if name == 'draft':
    return DraftModel(model=draft, num_draft_tokens=K, prefill_chunk=8)
  return NGram(num_draft_tokens=K) if name == 'ngram' else Nothing()


def build(mesh_name, models, proposer, rule=EachRule()):
  """A decoder and its parameters on a mesh; None is one device."""
  if mesh_name is not None:
    target, draft, rules = MESHES[mesh_name]
    views = mesh.refine(
      mesh.parse_mesh(target), mesh.parse_mesh(draft), rules=rules
    )
    models = [
      dataclasses.replace(m, placement=mesh.place(m.param_specs(), view))
      for m, view in zip(models, views)
    ]
  decoder = decode.Decoder(
    target=models[0],
    proposer=make_proposer(proposer, models[1]),
    verify=rule,
    max_length=L,
    width=K + 1,
    prefill_chunk=8,
  )
  # One key for both: the draft has the target's embedding, and agrees at times.
  params = {'target': models[0].init(jax.random.key(0)), 'proposer': ()}
  if proposer in ('draft', 'each'):
    params['proposer'] = models[1].init(jax.random.key(0))
  return decoder, params


def requests(seed: int) -> states.Requests:
  rng = np.random.default_rng(seed)
  # A small alphabet, so that n-grams recur.
  return states.Requests(
    tokens_BL=rng.integers(0, 5, (B, L)).astype(np.int32),
    prompt_length_B=rng.integers(1, 15, B).astype(np.int32),
    max_new_tokens_B=rng.integers(5, 30, B).astype(np.int32),
    seed_B=rng.integers(0, 2**32, B).astype(np.uint32),
    stop_ids_BJ=np.full((B, 2), -1, np.int32),
  )


def settings(temperature: float):
  return jax.device_get(
    stack_options(
      [
        SamplingOptions(
          temperature=temperature * (row != 3),
          top_k=(0, 20)[row % 2],
          top_p=(1.0, 0.9)[row % 3 == 0],
          presence_penalty=0.5 * (row == 5),
          banned_ids=(1,) if row == 6 else (),
        )
        for row in range(B)
      ],
      V,
    )
  )


Run = collections.namedtuple('Run', 'texts accepted state')


def generate(decoder, params, temperature, seed=0) -> Run:
  state = decode.init(decoder, params, requests(seed))
  state = decode.run(decoder, params, state, settings(temperature), ALL)
  tokens_BL, length_B = np.asarray(state.tokens_BL), np.asarray(state.length_B)
  texts = [tokens_BL[b, : length_B[b]].tolist() for b in range(B)]
  source_BL = np.asarray(state.source_BL)
  is_text_BL = np.arange(L) < length_B[:, None]
  accepted_B = np.sum((source_BL == states.ACCEPTED) & is_text_BL, axis=1)
  return Run(texts, accepted_B.tolist(), state)


@functools.cache
def on_one_device(models, proposer, rule, temperature, seed) -> Run:
  decoder, params = build(None, models, proposer, rule)
  return generate(decoder, params, temperature, seed)


def shardings(state) -> list[str]:
  return [
    f'{jax.tree_util.keystr(path)} {leaf.sharding}'
    for path, leaf in jax.tree_util.tree_leaves_with_path(state)
  ]


class ShardedTest(parameterized.TestCase):
  def check(self, mesh_name, models, proposer, rule=EachRule()):
    decoder, params = build(mesh_name, models, proposer, rule)
    temperatures = (0.0,) if isinstance(rule, chain.Greedy) else (0.0, 0.8)
    for temperature in temperatures:
      got = generate(decoder, params, temperature)
      want = on_one_device(models, proposer, rule, temperature, 0)
      self.assertEqual(got.texts, want.texts)
      self.assertEqual(got.accepted, want.accepted)
    self.assert_same_on_all_devices(got.state)
    return decoder, params

  def assert_same_on_all_devices(self, state):
    """Whatever several devices hold a copy of is equal on all of them."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
      copies = collections.defaultdict(list)
      for shard in leaf.addressable_shards:
        copies[str(shard.index)].append(np.asarray(shard.data))
      for index, data in copies.items():
        for other in data[1:]:
          np.testing.assert_array_equal(
            data[0], other, f'{jax.tree_util.keystr(path)} at {index}'
          )

  @parameterized.parameters(*MESHES)
  def test_every_mesh(self, mesh_name):
    decoder, params = self.check(mesh_name, LLAMAS, 'each')
    self.check_that_a_step_moves_nothing(decoder, params)

  def check_that_a_step_moves_nothing(self, decoder, params):
    sampling = settings(0.8)
    state = decode.init(decoder, params, requests(0))
    before = shardings(state)
    with testing.count_traces() as traces:
      for num_steps in (1, 2, ALL):
        state = decode.run(
          decoder, params, state, sampling, np.int32(num_steps)
        )
        self.assertEqual(shardings(state), before)
      for seed in range(3):
        generate(decoder, params, seed / 2, seed)
    self.assertEqual(traces.num_compilations, 0)

  @parameterized.parameters('greedy', 'rejection', 'coupled', 'block')
  def test_every_rule(self, rule):
    self.check('data_x_tensor', TOYS, 'draft', chain.RULES[rule])

  @parameterized.parameters('none', 'draft', 'ngram')
  def test_every_proposer(self, proposer):
    self.check('data_x_tensor', TOYS, proposer)

  def test_ending_rows_from_outside_moves_nothing(self):
    decoder, params = build('data_x_tensor', TOYS, 'draft')
    state = decode.init(decoder, params, requests(0))
    before = shardings(state)
    state = decode.finish(decoder, state, np.arange(B) == 2)
    self.assertEqual(shardings(state), before)
    self.assertEqual(np.flatnonzero(state.done_B).tolist(), [2])

  def test_no_choice_is_close(self):
    params = build(None, LLAMAS, 'none')[1]
    run = on_one_device(LLAMAS, 'each', EachRule(), 0.0, 0)
    margins = []
    for row in (0, 1, 2, 3, 4, 7):  # No penalty, no ban: the raw logits.
      tokens_1T = jnp.asarray([run.texts[row]])
      cache = TARGET.init_cache(1, L, 0)
      hidden, _ = TARGET.apply(params['target'], tokens_1T, cache)
      logits_TV = TARGET.unembed(params['target'], hidden.last_BTD)[0]
      best_T2 = jax.lax.top_k(logits_TV, 2)[0]
      begin = int(requests(0).prompt_length_B[row])
      margins.append(jnp.min((best_T2[:, 0] - best_T2[:, 1])[begin - 1 : -1]))
    self.assertGreater(min(margins), MARGIN)

  def test_a_batch_that_does_not_divide_is_refused(self):
    decoder, _ = build('data', LLAMAS, 'draft')
    with self.assertRaisesRegex(ValueError, 'multiple of 8, .* got 6'):
      decoder.check_batch(6)
    decoder, _ = build('draft_by_row', LLAMAS, 'draft')
    with self.assertRaisesRegex(ValueError, 'multiple of 8, .* got 2'):
      decoder.check_batch(2)


if __name__ == '__main__':
  absltest.main()

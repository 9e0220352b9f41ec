"""Feature-fed heads: drafts are those of a slow loop that redoes everything."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import decode, mesh, testing
from specjax import sampling as sampling_lib
from specjax import state as states
from specjax.models import quantize
from specjax.models.heads import build
from specjax.models.heads.toy import ToyHead
from specjax.models.transformer import Transformer
from specjax.proposers.base import Nothing, TargetView
from specjax.proposers.feature_fed import FeatureFed
from specjax.sampling import SamplingOptions
from specjax.testing import loops, mutants
from specjax.verify import chain
from tests import toy_loops
from tests.models import tiny
from tests.models.heads import slow, tiny_heads
from tests.toy_loops import L, Row, V

K = 3
# The head that has everything: several features, its own output, few ids.
KIND = 'eagle3_reduced'
WARM = SamplingOptions(temperature=0.8)
PENALISED = SamplingOptions(
  temperature=0.8, repetition_penalty=1.5, presence_penalty=0.5, top_k=9
)
ROWS = [
  Row(prompt=(7,), max_new=24, options=WARM),
  Row(prompt=(3, 1), max_new=24),
  Row(prompt=(5, 5, 5, 5, 5), max_new=100, seed=1, options=WARM),
  Row(prompt=tuple(range(9)), max_new=100),
  Row(prompt=(1, 2, 3), max_new=24, seed=2, options=PENALISED),
  Row(prompt=(4, 4), max_new=24, seed=3, stop=(2, 9), options=WARM),
  Row(prompt=(8,), max_new=24, seed=4, options=WARM),
  Row(prompt=(6, 0, 6), max_new=0),
]


def target_of(family: str = 'llama') -> Transformer:
  return tiny_heads.target_of(family, V)


def make_decoder(target, proposer, rule=chain.Coupled()) -> decode.Decoder:
  return decode.Decoder(
    target=target,
    proposer=proposer,
    verify=rule,
    max_length=L,
    width=K + 1,
    prefill_chunk=4,
  )


def fed(kind: str, target=None) -> FeatureFed:
  head = tiny_heads.head_of(kind, target_of() if target is None else target)
  return FeatureFed(head=head, num_draft_tokens=K)


def alike(kind: str, target: Transformer):
  """Parameters under which drafts are right at times."""
  params = tiny.params_of(target)
  # Weak layers: what comes next is said by the token itself, to both.
  soft = lambda layer: {
    name: x * (0.3 if name in ('o', 'down') else 1.0)
    for name, x in layer.items()
  }
  params['layers'] = tuple(map(soft, params['layers']))
  head = tiny_heads.params_of(tiny_heads.head_of(kind, target))
  d = target.embed_dim
  eye = jnp.eye(d)
  if 'fc_bias' in head:
    head['fc'] = jnp.concatenate([eye, 0.1 * eye], axis=1)
  if 'proj' in head:
    head['proj'] = jnp.concatenate([eye, 0.1 * eye], axis=1)
    head['norm'] = params['final_norm']
    head['embed_norm'] = jnp.ones(d)
  if 'head' in head:
    size = head['head'].shape[0]
    ids = head.get('ids', jnp.arange(size))
    head['head'] = params['head'][ids]
    head['norm'] = params['final_norm']
  head['layers'] = tuple(map(soft, head['layers']))
  return {'target': params, 'proposer': head}


@functools.cache
def run_of(kind: str):
  target = target_of()
  decoder = make_decoder(target, fed(kind))
  return toy_loops.generate(
    decoder, alike(kind, target), ROWS, size=len(ROWS), full=True, junk=-7
  )


class DraftsTest(parameterized.TestCase):
  @parameterized.parameters('mtp', 'mtp_reduced', 'eagle', 'eagle3_reduced')
  def test_they_are_those_of_a_loop_that_redoes_everything(self, kind):
    """After steps with every number of accepted drafts."""
    target = target_of()
    decoder = make_decoder(target, fed(kind), chain.Rejection())
    params = alike(kind, target)
    rows = [
      Row(prompt=p, max_new=30, seed=s, options=SamplingOptions(temperature=t))
      for s, (p, t) in enumerate(
        (p, t) for p in toy_loops.PROMPTS for t in (0.5, 1.5)
      )
    ]
    run = toy_loops.begin(decoder, params, rows, size=8, junk=-7)
    seen = set()
    for _ in range(4):
      self.check_drafts(decoder, params, run)
      before = np.asarray(run.state.length_B)
      run = run.go_on(1)
      seen |= set((np.asarray(run.state.length_B) - before).tolist())
    self.check_drafts(decoder, params, run)
    self.assertContainsSubset({1, 2, K + 1}, seen)

  def check_drafts(self, decoder, params, run):
    proposal, laws_BKV = drafts_and_laws(
      decoder.proposer, params, run.state, run.sampling
    )
    got_BKV = jax.nn.softmax(proposal.log_weights_BKV, axis=-1)
    length_B = np.asarray(run.state.length_B)
    wanted_B = np.where(length_B > 1, K, 0)
    np.testing.assert_array_equal(proposal.num_draft_B, wanted_B)
    is_there_B = wanted_B > 0
    # Sums over slots are grouped differently: rounding of float32.
    np.testing.assert_allclose(
      got_BKV[is_there_B], laws_BKV[is_there_B], atol=2e-5
    )

  def test_a_row_that_nothing_is_left_for_drafts_nothing(self):
    """All that is allowed is outside of the head's vocabulary."""
    target = target_of()
    decoder = make_decoder(target, fed('eagle3_reduced'))
    options = [
      SamplingOptions(temperature=1.0, allowed_ids=ids)
      for ids in ((1, 3), (0, 1), (2,))
    ]
    rows = [Row(prompt=(1, 2), max_new=9, options=o) for o in options]
    params = alike('eagle3_reduced', target)
    run = toy_loops.generate(decoder, params, rows, size=3)
    drafted = [int(np.sum(run.emitted(b, 'num_draft_BL'))) for b in range(3)]
    self.assertEqual(drafted[0], 0)
    self.assertGreater(min(drafted[1:]), 0)
    self.assertEqual(run.tokens(2), [2] * 9)
    self.assertEqual(run.reason(0), 'length')


@functools.partial(jax.jit, static_argnums=0)
def drafts_and_laws(proposer, params, state, sampling):
  """A proposal for a state, and its laws by a slow loop from the beginning."""
  length_B = state.length_B
  b = length_B.shape[0]
  room_B = jnp.full(b, K, jnp.int32)
  proposal, _ = proposer.propose(
    params,
    jax.random.split(jax.random.key(5), (b, K)),
    state.proposer_state,
    TargetView(state.target_cache, state.prompt_length_B, room_B),
    state.tokens_BL,
    length_B,
    sampling,
  )
  logits_BKV = slow.chained_logits(
    proposer.head, params, state.tokens_BL, length_B, proposal.draft_BK
  )
  log_weights_BKV = sampling_lib.transform(sampling, logits_BKV)
  return proposal, jax.nn.softmax(log_weights_BKV, axis=-1)


class ExactTest(parameterized.TestCase):
  def test_greedy_and_coupled_text_is_that_of_plain_decoding(self):
    kind, target, got = KIND, target_of(), run_of(KIND)
    plain = toy_loops.generate(
      make_decoder(target, Nothing()),
      alike(kind, target),
      ROWS,
      size=len(ROWS),
      full=True,
      junk=-7,
    )
    for b in range(len(ROWS)):
      self.assertEqual(got.tokens(b), plain.tokens(b))
      self.assertEqual(got.reason(b), plain.reason(b))
    self.assertEqual(got.tokens(7), [])
    # Some drafts were accepted, and some were not.
    total = sum(len(got.tokens(b)) for b in range(len(ROWS)))
    num_steps = int(np.sum(got.state.num_steps_B))
    self.assertBetween(num_steps, total / (K + 1) + 1, 0.9 * total)

  def test_capturing_layers_changes_no_bit_of_the_target(self):
    """In int8, where sums are exact: text and log-probabilities are equal."""
    target = dataclasses.replace(target_of(), dtype='bfloat16', quantize='int8')
    params = quantize.quantize_params(tiny.params_of(target_of()))
    declared = jax.tree.map(lambda spec: spec.dtype, target.param_specs())
    params = jax.tree.map(lambda x, d: x.astype(d), params, declared)
    head = build.build('eagle3', target, 'bfloat16', num_ids=8)
    head_params = head.init(jax.random.key(0))
    rows = [row for row in ROWS if row.options is not PENALISED]
    got, plain = (
      toy_loops.generate(
        make_decoder(target, proposer),
        {'target': params, 'proposer': own},
        rows,
        size=len(rows),
      )
      for proposer, own in (
        (FeatureFed(head=head, num_draft_tokens=K), head_params),
        (Nothing(), ()),
      )
    )
    for b in range(len(rows)):
      self.assertEqual(got.tokens(b), plain.tokens(b))
      np.testing.assert_array_equal(
        got.emitted(b, 'logprob_BL'), plain.emitted(b, 'logprob_BL')
      )

  def test_the_law_is_that_of_the_target(self):
    target = tiny_heads.target_of(vocab_size=4)
    head = tiny_heads.head_of('eagle3_reduced', target)
    decoder = decode.Decoder(
      target=target,
      proposer=FeatureFed(head=head, num_draft_tokens=2),
      verify=chain.Block(),
      max_length=8,
      prefill_chunk=2,
    )
    group = loops.Group(
      transform='',
      options=SamplingOptions(temperature=1.0, presence_penalty=0.3),
      prompt=(2,),
      num_tokens=5,
    )
    params = {
      'target': tiny.params_of(target),
      'proposer': tiny_heads.params_of(head),
    }
    testing.check_lossless(decoder, params, group)


class AcceptanceTest(parameterized.TestCase):
  """Output alone never shows a fault of the draft; this does."""

  def count(self, temperature: float, head: ToyHead, wrap=lambda x: x):
    params = toy_loops.make_params(twins=True)
    rows = [
      Row(
        prompt=prompt,
        max_new=L - len(prompt),
        seed=seed,
        options=SamplingOptions(temperature=temperature),
      )
      for seed in range(2)
      for prompt in toy_loops.PROMPTS
    ]
    proposer = FeatureFed(head=head, num_draft_tokens=K)
    decoder = make_decoder(toy_loops.TOY, wrap(proposer), toy_loops.Unanimous())
    got = toy_loops.generate(decoder, params, rows, size=8, junk=-7)
    drafted = np.sum(np.asarray(got.state.num_draft_BL, np.int64))
    source_BL = np.asarray(got.state.source_BL)
    return int(drafted), int(np.sum(source_BL == states.ACCEPTED))

  @parameterized.parameters(0.0, 1.0)
  def test_a_head_that_is_the_target_has_all_accepted(self, temperature):
    drafted, accepted = self.count(temperature, ToyHead(target=toy_loops.TOY))
    self.assertGreater(drafted, 4 * L)
    self.assertEqual(accepted, drafted)

  @parameterized.parameters('stale', 'token')
  def test_a_head_that_is_fed_wrong_is_seen(self, mistake):
    drafted, accepted = self.count(
      1.0,
      ToyHead(target=toy_loops.TOY),
      lambda proposer: mutants.MisfedHead(proposer=proposer, mistake=mistake),
    )
    self.assertLess(accepted, 0.8 * drafted)

  def test_entries_that_are_not_forgotten_are_seen(self):
    head = ToyHead(target=mutants.RewindOffByOne(toy_loops.TOY))
    drafted, accepted = self.count(1.0, head)
    self.assertLess(accepted, 0.8 * drafted)


class CompilationTest(parameterized.TestCase):
  def test_nothing_recompiles(self):
    run_of(KIND)
    other = [dataclasses.replace(row, seed=row.seed + 50) for row in ROWS[::-1]]
    with testing.count_traces() as traces:
      toy_loops.generate(
        make_decoder(target_of(), fed(KIND)),
        alike(KIND, target_of()),
        other,
        size=len(ROWS),
        full=True,
      )
    self.assertEqual((traces.num_traces, traces.num_compilations), (0, 0))


class ShardedTest(parameterized.TestCase):
  def test_the_text_is_that_of_one_device(self):
    kind, target = KIND, target_of()
    view, _ = mesh.refine(mesh.parse_mesh('data:2,model:2'))
    placed = dataclasses.replace(
      target, placement=mesh.place(target.param_specs(), view)
    )
    head = tiny_heads.head_of(kind, target)
    block = dataclasses.replace(
      head.block, placement=mesh.place(head.param_specs(), view)
    )
    head = dataclasses.replace(head, target=placed, block=block)
    decoder = make_decoder(placed, FeatureFed(head=head, num_draft_tokens=K))
    got = toy_loops.generate(
      decoder, alike(kind, target), ROWS, size=len(ROWS), full=True, junk=-7
    )
    want = run_of(kind)
    for b in range(len(ROWS)):
      self.assertEqual(got.tokens(b), want.tokens(b))
      np.testing.assert_array_equal(
        got.emitted(b, 'source_BL'), want.emitted(b, 'source_BL')
      )


class SettingsTest(parameterized.TestCase):
  @parameterized.parameters(0, 65)
  def test_number_of_drafts(self, k):
    head = ToyHead(target=toy_loops.TOY)
    with self.assertRaisesRegex(ValueError, f'in 1..64 .*, got {k}'):
      FeatureFed(head=head, num_draft_tokens=k)

  def test_a_head_falls_silent_behind_its_context(self):
    target = target_of()
    head = tiny_heads.head_of('mtp', target)
    block = dataclasses.replace(head.block, context_length=12)
    head = dataclasses.replace(head, block=block)
    decoder = make_decoder(target, FeatureFed(head=head, num_draft_tokens=K))
    rows = [Row(prompt=(1, 2), max_new=30)]
    run = toy_loops.generate(decoder, alike('mtp', target), rows, size=1)
    num_draft_T = run.emitted(0, 'num_draft_BL')
    self.assertGreater(np.sum(num_draft_T[:8]), 0)
    self.assertEqual(np.sum(num_draft_T[11:]), 0)
    self.assertLen(run.tokens(0), 30)

  def test_a_reduced_vocabulary_is_a_part_of_the_target_s(self):
    with self.assertRaisesRegex(ValueError, 'num_ids must be in 1..16, .* 17'):
      ToyHead(target=toy_loops.TOY, num_ids=17)


if __name__ == '__main__':
  absltest.main()

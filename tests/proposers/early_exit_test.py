"""Early exit: its drafts are a shorter model's, its text is the target's."""

import collections
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import decode, mesh, testing
from specjax import state as states
from specjax.models import quantize
from specjax.models.toy import ToyModel
from specjax.models.transformer import Transformer
from specjax.proposers.base import Nothing, TargetView
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.early_exit import EarlyExit
from specjax.sampling import SamplingOptions, stack_options
from specjax.testing import loops
from specjax.verify import chain
from tests import toy_loops
from tests.models import tiny
from tests.toy_loops import L, Row, V

K = 3
WARM = SamplingOptions(temperature=0.8)
PENALISED = SamplingOptions(
  temperature=0.8, repetition_penalty=1.5, presence_penalty=0.5, top_k=9
)


@functools.cache
def model_of(
  family: str = 'llama', windows: tuple[int | None, ...] = (3, None)
) -> Transformer:
  """A tiny model over the ids of `toy_loops`."""
  model = tiny.model(family)
  return dataclasses.replace(
    model,
    vocab_size=V,
    padded_vocab_size=V + 4,
    windows=windows,
    ropes=tuple(model.ropes[i % 2] for i in range(len(windows))),
  )


@functools.cache
def make_params(model: Transformer):
  return tiny.params_of(dataclasses.replace(model, placement=None))


def early(model: Transformer, exit_layer: int = 1, k: int = K) -> EarlyExit:
  return EarlyExit(model=model, exit_layer=exit_layer, num_draft_tokens=k)


def make_decoder(model, proposer, rule=chain.Coupled()) -> decode.Decoder:
  return decode.Decoder(
    target=model,
    proposer=proposer,
    verify=rule,
    max_length=L,
    width=K + 1,
    prefill_chunk=4,
  )


# Prompts of one token and of many; rows that end by limit, at the end of the
# buffer, by a stop id, and before they begin.
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


def run(decoder, target_params, proposer_params=(), rows=ROWS):
  params = {'target': target_params, 'proposer': proposer_params}
  return toy_loops.generate(
    decoder, params, rows, size=len(rows), full=True, junk=-7
  )


@functools.cache
def early_run():
  """The run that several tests look at."""
  model = model_of()
  return run(make_decoder(model, early(model)), make_params(model))


@functools.partial(jax.jit, static_argnames=('target', 'proposer'))
def propose(target, proposer, params, tokens_BL, length_B, sampling):
  """A first proposal for rows of any length."""
  b = tokens_BL.shape[0]
  requests = states.Requests(
    tokens_BL=tokens_BL,
    prompt_length_B=length_B,
    max_new_tokens_B=jnp.full(b, 9, jnp.int32),
    seed_B=jnp.zeros(b, jnp.uint32),
    stop_ids_BJ=jnp.full((b, 1), -1, jnp.int32),
  )
  state = make_decoder(target, proposer).init(params, requests)
  proposal, _ = proposer.propose(
    params,
    jax.random.split(jax.random.key(5), (b, K)),
    state.proposer_state,
    TargetView(state.target_cache, length_B, jnp.full(b, K, jnp.int32)),
    tokens_BL,
    length_B,
    sampling,
  )
  return proposal


def some_texts(num_rows: int):
  """Texts of 1, 2, 3, ... tokens, and what stands behind them."""
  rng = np.random.default_rng(0)
  tokens_BL = jnp.asarray(rng.integers(0, V, (num_rows, L)), jnp.int32)
  return tokens_BL, jnp.arange(1, num_rows + 1, dtype=jnp.int32)


class DraftsTest(parameterized.TestCase):
  @parameterized.parameters(('qwen2', 1), ('gemma3', 2))
  def test_they_are_those_of_a_model_of_as_many_layers(
    self, family, exit_layer
  ):
    """The reference appends to a cache of its own."""
    model = model_of(family, (4, None, 3))
    proposer = early(model, exit_layer)
    params = make_params(model)
    short = dataclasses.replace(
      model,
      windows=model.windows[:exit_layer],
      ropes=model.ropes[:exit_layer],
    )
    draft = {**params, 'layers': params['layers'][:exit_layer]}
    tokens_BL, length_B = some_texts(12)
    options = [PENALISED, WARM, SamplingOptions()] * 4
    sampling = stack_options(options, V)
    args = (tokens_BL, length_B, sampling)
    got = propose(model, proposer, {'target': params}, *args)
    want = propose(
      model,
      DraftModel(model=short, num_draft_tokens=K, prefill_chunk=4),
      {'target': params, 'proposer': draft},
      *args,
    )
    np.testing.assert_array_equal(got.draft_BK, want.draft_BK)
    np.testing.assert_array_equal(got.num_draft_B, K)
    # Sums over slots are grouped differently: rounding of float32.
    np.testing.assert_allclose(
      jax.nn.softmax(got.log_weights_BKV),
      jax.nn.softmax(want.log_weights_BKV),
      atol=1e-5,
    )

  def test_in_the_loop_too(self):
    model = model_of()
    params, proposer = make_params(model), early(model)
    shorter = DraftModel(
      model=proposer.first_layers, num_draft_tokens=K, prefill_chunk=4
    )
    got = early_run()
    want = run(
      make_decoder(model, shorter), params, proposer.first_params(params)
    )
    for b in range(len(ROWS)):
      self.assertEqual(got.tokens(b), want.tokens(b))
      np.testing.assert_array_equal(
        got.emitted(b, 'source_BL'), want.emitted(b, 'source_BL')
      )
      np.testing.assert_allclose(
        got.emitted(b, 'overlap_BL'), want.emitted(b, 'overlap_BL'), atol=1e-5
      )

  def test_a_law_that_is_not_finite_falls_silent(self):
    """A token whose embedding is broken spoils what comes behind it."""
    model, bad = model_of(), 8
    params = make_params(model)
    tokens_BL, length_B = some_texts(32)
    tokens_BL = jnp.where(tokens_BL == bad, 0, tokens_BL)
    tokens_BL = tokens_BL.at[0, 0].set(bad)
    sampling = stack_options([SamplingOptions(temperature=3.0)] * 32, V)
    args = (early(model), tokens_BL, length_B, sampling)
    clean = propose(model, args[0], {'target': params}, *args[1:])
    embed = params['embed'].at[bad].set(np.nan)
    got = propose(
      model, args[0], {'target': {**params, 'embed': embed}}, *args[1:]
    )
    pending_B1 = np.take_along_axis(
      np.asarray(tokens_BL), np.asarray(length_B)[:, None] - 1, axis=1
    )
    fed_BK = np.concatenate([pending_B1, clean.draft_BK[:, :-1]], axis=1)
    num_clean_B = np.cumprod(fed_BK != bad, axis=1).sum(axis=1)
    np.testing.assert_array_equal(got.num_draft_B[1:], num_clean_B[1:])
    self.assertEqual(int(got.num_draft_B[0]), 0)
    self.assertLess(min(num_clean_B[1:]), K)
    np.testing.assert_array_equal(
      np.where(np.arange(K) < num_clean_B[:, None], got.draft_BK, -1),
      np.where(np.arange(K) < num_clean_B[:, None], clean.draft_BK, -1),
    )


class ExactTest(parameterized.TestCase):
  @parameterized.parameters('none', 'int8')
  def test_greedy_and_coupled_text_is_that_of_plain_decoding(self, scheme):
    model = model_of()
    params = make_params(model)
    if scheme == 'none':
      got = early_run()
    else:
      model = dataclasses.replace(model, dtype='bfloat16', quantize='int8')
      params = quantize.quantize_params(params)
      declared = jax.tree.map(lambda spec: spec.dtype, model.param_specs())
      params = jax.tree.map(lambda x, d: x.astype(d), params, declared)
      got = run(make_decoder(model, early(model)), params)
    plain = run(make_decoder(model, Nothing()), params)
    for b in range(len(ROWS)):
      self.assertEqual(got.tokens(b), plain.tokens(b))
      self.assertEqual(got.reason(b), plain.reason(b))
      np.testing.assert_array_equal(
        got.emitted(b, 'logprob_BL'), plain.emitted(b, 'logprob_BL')
      )
    self.assertEqual(got.tokens(7), [])
    self.assertEqual(got.reason(2), 'context')
    self.assertEqual(got.reason(5), 'stop')
    # Some drafts were accepted, and some were not.
    total = sum(len(got.tokens(b)) for b in range(len(ROWS)))
    num_steps = int(np.sum(got.state.num_steps_B))
    self.assertBetween(num_steps, total / (K + 1) + 1, 0.95 * total)

  def test_the_law_is_that_of_the_target(self):
    model = dataclasses.replace(
      model_of(), vocab_size=4, padded_vocab_size=4, context_length=16
    )
    decoder = decode.Decoder(
      target=model,
      proposer=early(model, k=2),
      verify=chain.Rejection(),
      max_length=8,
      prefill_chunk=2,
    )
    group = loops.Group(
      transform='',
      options=SamplingOptions(temperature=1.0, presence_penalty=0.3),
      prompt=(2,),
      num_tokens=5,
    )
    params = {'target': make_params(model), 'proposer': ()}
    testing.check_lossless(decoder, params, group)


@dataclasses.dataclass(frozen=True)
class ShortSighted:
  """Does not see the last `params['proposer']` tokens of the target's cache."""

  proposer: EarlyExit

  def __getattr__(self, name: str) -> Any:
    return getattr(self.proposer, name)

  def propose(self, params, keys_BK, state, target, *rest):
    length_B = target.cache.length_B - params['proposer']
    cache = target.cache.replace(length_B=jnp.maximum(length_B, 0))
    target = target._replace(cache=cache)
    return self.proposer.propose(params, keys_BK, state, target, *rest)


class AcceptanceTest(parameterized.TestCase):
  """Output alone never shows a fault of the draft; this does."""

  def count(self, num_hidden: int, temperature: float) -> tuple[int, int]:
    """Drafts that were verified, and accepted, if the rest adds nothing."""
    model = model_of()
    params = make_params(model)
    idle = {
      name: jnp.zeros_like(x) if name in ('o', 'down') else x
      for name, x in params['layers'][1].items()
    }
    params = {**params, 'layers': (params['layers'][0], idle)}
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
    proposer = ShortSighted(early(model))
    decoder = make_decoder(model, proposer, toy_loops.Unanimous())
    got = run(decoder, params, jnp.int32(num_hidden), rows=rows)
    source_BL = np.asarray(got.state.source_BL)
    num_drafted = int(np.sum(np.asarray(got.state.num_draft_BL, np.int64)))
    return num_drafted, int(np.sum(source_BL == states.ACCEPTED))

  @parameterized.parameters(0.0, 1.0)
  def test_an_exit_that_is_the_whole_model_has_all_accepted(self, temperature):
    num_drafted, num_accepted = self.count(0, temperature)
    self.assertGreater(num_drafted, 4 * L)
    self.assertEqual(num_accepted, num_drafted)

  def test_a_wrong_view_of_the_cache_is_seen(self):
    num_drafted, num_accepted = self.count(1, 0.0)
    self.assertLess(num_accepted, num_drafted)


class CompilationTest(parameterized.TestCase):
  def test_nothing_recompiles(self):
    early_run()
    model = dataclasses.replace(model_of())
    other = [dataclasses.replace(row, seed=row.seed + 50) for row in ROWS[::-1]]
    with testing.count_traces() as traces:
      run(make_decoder(model, early(model)), make_params(model), rows=other)
    self.assertEqual((traces.num_traces, traces.num_compilations), (0, 0))

  def test_no_cache_is_copied(self):
    """A draft that appends to a cache in its loop has it copied there."""
    model = model_of()
    decoder = make_decoder(model, early(model))
    params = {'target': make_params(model), 'proposer': ()}
    run = toy_loops.begin(decoder, params, ROWS[:1], size=1)
    shape = ','.join(map(str, run.state.target_cache.k[0].shape))
    lowered = decode.step.lower(decoder, params, run.state, run.sampling)
    found = collections.Counter(
      re.findall(rf'\[{shape}\]\S* ([\w-]+)\(', lowered.compile().as_text())
    )
    # Keys and values of two layers are written, by the verification alone.
    self.assertEqual(found['scatter'], 4)
    self.assertEqual(found['copy'] + found['concatenate'] + found['pad'], 0)


class ShardedTest(parameterized.TestCase):
  def test_the_text_is_that_of_one_device(self):
    model = model_of()
    view, _ = mesh.refine(mesh.parse_mesh('data:2,model:4'))
    placed = dataclasses.replace(
      model, placement=mesh.place(model.param_specs(), view)
    )
    got = run(make_decoder(placed, early(placed)), make_params(model))
    want = early_run()
    for b in range(len(ROWS)):
      self.assertEqual(got.tokens(b), want.tokens(b))
      np.testing.assert_array_equal(
        got.emitted(b, 'source_BL'), want.emitted(b, 'source_BL')
      )


class SettingsTest(parameterized.TestCase):
  @parameterized.parameters(0, -1, 2, 100)
  def test_exit_layer(self, layer):
    message = f'exit_layer must be at least 1 and below 2, .* got {layer}'
    with self.assertRaisesRegex(ValueError, message):
      early(model_of(), layer)

  @parameterized.parameters(0, 65)
  def test_number_of_drafts(self, k):
    with self.assertRaisesRegex(ValueError, f'in 1..64 .*, got {k}'):
      early(model_of(), k=k)

  def test_only_a_transformer_has_layers(self):
    with self.assertRaisesRegex(ValueError, 'a transformer .* a ToyModel'):
      early(ToyModel(vocab_size=V))


if __name__ == '__main__':
  absltest.main()

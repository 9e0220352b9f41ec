"""Medusa: its laws are those of the last true feature, whatever is accepted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import decode, testing
from specjax import sampling as sampling_lib
from specjax import state as states
from specjax.models.heads.toy import ToyHeads
from specjax.models.toy import ToyModel
from specjax.proposers.base import Nothing, TargetView
from specjax.proposers.medusa import Medusa
from specjax.sampling import SamplingOptions
from specjax.verify import chain
from tests import toy_loops
from tests.models import tiny
from tests.models.heads import slow, tiny_heads
from tests.toy_loops import L, Row, V

K = 2
HOT = SamplingOptions(temperature=1.5)
ROWS = [
  Row(prompt=prompt, max_new=24, seed=seed, options=options)
  for seed, (prompt, options) in enumerate(
    (prompt, options)
    for prompt in toy_loops.PROMPTS
    for options in (HOT, SamplingOptions())
  )
]


def make_decoder(target, proposer, rule=chain.Coupled()) -> decode.Decoder:
  return decode.Decoder(
    target=target,
    proposer=proposer,
    verify=rule,
    max_length=L,
    width=K + 1,
    prefill_chunk=4,
  )


@functools.cache
def made():
  """A decoder with heads that are new, but for their biases, and parameters."""
  target = tiny_heads.target_of(vocab_size=V)
  heads = tiny_heads.head_of('medusa', target)
  params = {
    'target': tiny.params_of(target),
    'proposer': tiny_heads.params_of(heads),
  }
  return make_decoder(target, Medusa(heads=heads, num_draft_tokens=K)), params


@functools.partial(jax.jit, static_argnums=0)
def drafts_and_laws(decoder, params, state, sampling):
  """A proposal for a state, and its laws from the text alone."""
  length_B, tokens_BL = state.length_B, state.tokens_BL
  b = length_B.shape[0]
  room_B = jnp.full(b, K, jnp.int32)
  proposal, _ = decoder.proposer.propose(
    params,
    jax.random.split(jax.random.key(5), (b, K)),
    state.proposer_state,
    TargetView(state.target_cache, state.prompt_length_B, room_B),
    tokens_BL,
    length_B,
    sampling,
  )
  logits_BKV = slow.independent_logits(
    decoder.proposer.heads, params, tokens_BL, length_B, proposal.draft_BK
  )
  return proposal, sampling_lib.transform(sampling, logits_BKV)


class DraftsTest(parameterized.TestCase):
  def test_they_are_those_of_the_last_feature(self):
    decoder, params = made()
    run = toy_loops.begin(decoder, params, ROWS, size=8, junk=-7)
    seen = set()
    for _ in range(5):
      proposal, wanted_BKV = drafts_and_laws(
        decoder, params, run.state, run.sampling
      )
      length_B = np.asarray(run.state.length_B)
      has_feature_B = length_B > 1
      np.testing.assert_array_equal(
        proposal.num_draft_B, np.where(has_feature_B, K, 0)
      )
      got, wanted = (
        np.asarray(jax.nn.softmax(x, axis=-1))[has_feature_B]
        for x in (proposal.log_weights_BKV, wanted_BKV)
      )
      np.testing.assert_allclose(got, wanted, atol=1e-5)
      run = run.go_on(1)
      seen |= set((np.asarray(run.state.length_B) - length_B).tolist())
    self.assertContainsSubset({1, 2}, seen)

  def test_coupled_and_greedy_text_is_that_of_plain_decoding(self):
    decoder, params = made()
    got = toy_loops.generate(decoder, params, ROWS, size=8)
    plain = toy_loops.generate(
      make_decoder(decoder.target, Nothing()), params, ROWS, size=8
    )
    for b in range(8):
      self.assertEqual(got.tokens(b), plain.tokens(b))
    num_steps = int(np.sum(got.state.num_steps_B))
    self.assertLess(num_steps, int(np.sum(plain.state.num_steps_B)))

  def test_heads_that_are_the_target_have_all_accepted(self):
    """Where no token depends on another, one law is that of all."""
    model = ToyModel(vocab_size=V, table_size=1, context_length=64)
    table = model.init(jax.random.key(0))
    heads = ToyHeads(target=model, num_heads=K)
    decoder = make_decoder(
      model, Medusa(heads=heads, num_draft_tokens=K), toy_loops.Unanimous()
    )
    params = {'target': table, 'proposer': table}
    got = toy_loops.generate(decoder, params, ROWS, size=8, junk=-7)
    num_drafted = int(np.sum(np.asarray(got.state.num_draft_BL, np.int64)))
    source_BL = np.asarray(got.state.source_BL)
    self.assertGreater(num_drafted, 8 * 12)
    self.assertEqual(int(np.sum(source_BL == states.ACCEPTED)), num_drafted)

  def test_nothing_recompiles(self):
    decoder, params = made()
    toy_loops.generate(decoder, params, ROWS, size=8)
    decoder = make_decoder(
      decoder.target,
      Medusa(
        heads=tiny_heads.head_of('medusa', decoder.target), num_draft_tokens=K
      ),
    )
    with testing.count_traces() as traces:
      toy_loops.generate(decoder, params, ROWS[::-1], size=8)
    self.assertEqual((traces.num_traces, traces.num_compilations), (0, 0))

  def test_there_are_heads_enough(self):
    heads = ToyHeads(target=toy_loops.TOY, num_heads=2)
    with self.assertRaisesRegex(ValueError, 'must be at most 2, .* got 3'):
      Medusa(heads=heads, num_draft_tokens=3)


if __name__ == '__main__':
  absltest.main()

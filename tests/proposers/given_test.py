"""Drafts from outside, and forced acceptance."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import decode
from specjax import state as states
from specjax.decode import Decoder
from specjax.models.heads.toy import ToyHead
from specjax.proposers.base import Nothing
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.feature_fed import FeatureFed
from specjax.proposers.given import Given, Offer, Scripted
from specjax.sampling import SamplingOptions, stack_options
from specjax.testing import loops
from specjax.verify import chain
from specjax.verify.forced import Forced

K, NUM_TOKENS, ROWS = 3, 24, 4


def toy():
  return loops.toy_pair(jax.random.key(0), vocab_size=4)


def run_rows(verify, temperature, proposer=None, inner=(), width=K + 1):
  """The final state of rows with one prompt and seeds of their own."""
  model, params = toy()
  decoder = Decoder(
    target=model,
    proposer=proposer or Nothing(),
    verify=verify,
    max_length=2 + NUM_TOKENS,
    width=width,
  )
  group = loops.Group(
    transform='none',
    options=SamplingOptions(temperature=temperature),
    prompt=(1, 2),
    num_tokens=NUM_TOKENS,
  )
  program = loops.Program(
    proposer='',
    decoder=decoder,
    params={'target': params['target'], 'proposer': inner},
    groups=(group,),
    rows=ROWS,
  )
  (state,) = loops.run_states(program)
  return state


def accepted_by_step(state):
  """Accepted drafts of every full step of every row."""
  found = []
  for row in range(ROWS):
    emitted = slice(2, int(state.length_B[row]))
    step = np.asarray(state.step_BL)[row, emitted]
    source = np.asarray(state.source_BL)[row, emitted]
    counts = np.bincount(step, weights=source == states.ACCEPTED)
    drafted = np.asarray(state.num_draft_BL)[row, emitted]
    drafted = drafted[np.diff(step, prepend=-1) > 0]
    found += counts[drafted == K].astype(int).tolist()
  return found


class GivenTest(parameterized.TestCase):
  def test_what_is_offered_is_proposed_once(self):
    model, params = toy()
    decoder = Decoder(
      target=model,
      proposer=Given(num_draft_tokens=2),
      verify=chain.Greedy(),
      max_length=12,
    )
    params = {'target': params['target'], 'proposer': ()}
    group = loops.Group(
      transform='none', options=SamplingOptions(), prompt=(1,), num_tokens=9
    )
    sampling = stack_options([SamplingOptions()], 4)
    plain = decode.init(decoder, params, loops.make_requests([group], 1, 12))
    plain = decode.run(decoder, params, plain, sampling, jnp.int32(99))
    text = np.asarray(plain.tokens_BL)[0]
    self.assertEqual(int(plain.num_steps_B[0]), 9)  # Nothing was offered.

    state = decode.init(decoder, params, loops.make_requests([group], 1, 12))
    right = lambda at: jnp.asarray(text[None, at : at + 2])
    offers = (
      (Offer(right(1), jnp.array([2])), 3),
      (None, 1),
      (Offer(right(5), jnp.array([1])), 2),
      (Offer((right(7) + 1) % 4, jnp.array([2])), 1),
    )
    length = 1
    for offer, num_emitted in offers:
      if offer is not None:
        state = state.replace(proposer_state=offer)
      state = decode.run(decoder, params, state, sampling, jnp.int32(1))
      length += num_emitted
      self.assertEqual(int(state.length_B[0]), length)
    np.testing.assert_array_equal(
      np.asarray(state.tokens_BL)[0, :length], text[:length]
    )


class ScriptedTest(parameterized.TestCase):
  @parameterized.parameters((chain.Greedy(), 0.0, 0), (chain.Coupled(), 1.0, 2))
  def test_as_many_as_asked_for_are_accepted(self, verify, heat, num_right):
    plain = run_rows(verify, heat)
    proposer = Scripted(proposer=Given(num_draft_tokens=K), num_right=num_right)
    inner = {'inner': (), 'text': plain.tokens_BL}
    state = run_rows(verify, heat, proposer, inner)
    np.testing.assert_array_equal(state.tokens_BL, plain.tokens_BL)
    self.assertEqual(set(accepted_by_step(state)), {num_right})

  def test_a_draft_model_works_and_is_overruled(self):
    plain = run_rows(chain.Coupled(), 1.0)
    model, params = toy()
    proposer = Scripted(
      proposer=DraftModel(model=model, num_draft_tokens=K), num_right=K
    )
    inner = {'inner': params['proposer'], 'text': plain.tokens_BL}
    state = run_rows(chain.Coupled(), 1.0, proposer, inner)
    np.testing.assert_array_equal(state.tokens_BL, plain.tokens_BL)
    self.assertEqual(set(accepted_by_step(state)), {K})

  def test_a_head_works_and_is_overruled(self):
    plain = run_rows(chain.Coupled(), 1.0)
    model, params = toy()
    head = FeatureFed(head=ToyHead(target=model), num_draft_tokens=K)
    inner = {'inner': params['proposer'], 'text': plain.tokens_BL}
    proposer = Scripted(proposer=head, num_right=1)
    state = run_rows(chain.Coupled(), 1.0, proposer, inner)
    np.testing.assert_array_equal(state.tokens_BL, plain.tokens_BL)
    self.assertEqual(set(accepted_by_step(state)), {1})

  def test_the_number_is_checked(self):
    with self.assertRaisesRegex(ValueError, 'must be in 0..3, got 4'):
      Scripted(proposer=Given(num_draft_tokens=K), num_right=4)


class ForcedTest(parameterized.TestCase):
  @parameterized.parameters(0, 2)
  def test_as_many_as_asked_for_are_accepted(self, num_accepted):
    model, params = toy()
    forced = Forced(num_accepted)
    state = run_rows(
      forced,
      1.0,
      DraftModel(model=model, num_draft_tokens=K),
      params['proposer'],
    )
    self.assertEqual(set(accepted_by_step(state)), {num_accepted})
    self.assertIn('lossy', forced.name)

  def test_it_is_lossy(self):
    """With every draft accepted the first token has the law of the draft."""
    p, q = (0.9, 0.1), (0.2, 0.8)
    model, target = loops.table_model(p)
    _, draft = loops.table_model(q)
    group = loops.Group(
      transform='none',
      options=SamplingOptions(temperature=1.0),
      prompt=(0,),
      num_tokens=2,
    )
    program = loops.Program(
      proposer='draft',
      decoder=Decoder(
        target=model,
        proposer=DraftModel(model=model, num_draft_tokens=1),
        verify=Forced(1),
        max_length=3,
      ),
      params={'target': target, 'proposer': draft},
      groups=(group,),
      rows=4096,
    )
    share = np.mean(loops.observe(program)[0][:, 0] == 1)
    # Six standard errors of 4096 draws.
    self.assertAlmostEqual(share, 0.8, delta=0.04)

  def test_the_number_is_checked(self):
    with self.assertRaisesRegex(ValueError, 'must be >= 0, got -1'):
      Forced(-1)


if __name__ == '__main__':
  absltest.main()

"""Rules that end drafts: their arithmetic, and what they do to the loop."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import decode, metrics
from specjax.models.toy import ToyModel
from specjax.proposers import base, stopping
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.ngram import NGram
from specjax.verify import chain, widths
from tests import toy_loops
from tests.toy_loops import TOY, L, Row

K = 4
COSTS = (1.0, 1.4, 1.9, 2.5, 3.2)
CONFIDENCE = stopping.Confidence(least=0.3)
COST = stopping.Cost(step_costs=COSTS)


def outcome(num_draft, num_accepted, num_emitted) -> base.Outcome:
  fields = dict.fromkeys(base.Outcome._fields)
  fields.update(
    num_draft_B=jnp.asarray(num_draft, jnp.int32),
    num_accepted_B=jnp.asarray(num_accepted, jnp.int32),
    num_emitted_B=jnp.asarray(num_emitted, jnp.int32),
  )
  return base.Outcome(**fields)


class RulesTest(parameterized.TestCase):
  def test_fixed(self):
    np.testing.assert_array_equal(stopping.Fixed().most((), 5), [5])

  @parameterized.parameters((0.49, True, True), (0.51, False, True))
  def test_confidence_is_the_probability_of_the_likeliest_id(
    self, least, first, second
  ):
    logits_BV = jnp.log(jnp.asarray([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]))
    rule = stopping.Confidence(least=least)
    found_B = rule.goes_on((), logits_BV + 3.0, jnp.int32(0))
    np.testing.assert_array_equal(found_B, [first, second])
    np.testing.assert_array_equal(rule.most((), 5), [5])

  def test_running_acceptance_by_hand(self):
    running = stopping.RunningAcceptance(prior=0.8, weight=2.0, decay=0.5)
    past = running.init(3)
    np.testing.assert_allclose(running.rate(past), 0.8)
    # Two of four accepted: three tested. None drafted. A finished row.
    past = running.observe(past, outcome([4, 0, 0], [2, 0, 0], [3, 1, 0]))
    np.testing.assert_allclose(running.rate(past), [3.6 / 5, 0.8, 0.8])
    # All of two accepted: two tested, beside half of what was.
    past = running.observe(past, outcome([2, 0, 0], [2, 0, 0], [3, 1, 0]))
    np.testing.assert_allclose(
      running.rate(past), [4.6 / 5.5, 0.8, 0.8], rtol=1e-6
    )

  def test_nothing_drafted_leads_back_to_the_prior(self):
    running = stopping.RunningAcceptance(prior=0.75)
    past = running.init(1)
    for _ in range(5):
      past = running.observe(past, outcome([1], [0], [1]))
    self.assertLess(float(running.rate(past)[0]), 0.3)
    for _ in range(60):
      past = running.observe(past, outcome([0], [0], [1]))
    self.assertAlmostEqual(float(running.rate(past)[0]), 0.75, delta=0.01)

  @parameterized.parameters(
    (0.81, 9, 4), (0.81, 3, 3), (0.2, 9, 1), (0.5, 9, 1)
  )
  def test_acceptance_drafts_while_all_are_probably_right(self, a, k, expected):
    rule = stopping.Acceptance(
      least=0.4, running=stopping.RunningAcceptance(prior=a)
    )
    found_B = rule.most(rule.init(2), k)
    np.testing.assert_array_equal(found_B, [expected] * 2)

  @parameterized.product(
    alpha=(0.05, 0.3, 0.5, 0.7, 0.85, 0.95), cost=(0.02, 0.1, 0.3, 0.6)
  )
  def test_cost_finds_the_best_number(self, alpha, cost):
    rule = stopping.Cost(
      step_costs=tuple(1 + cost * k for k in range(17)),
      running=stopping.RunningAcceptance(prior=alpha),
    )
    expected = metrics.optimal_num_draft_tokens(alpha, cost, 16)
    np.testing.assert_array_equal(rule.most(rule.init(1), 16), [expected])
    # Fewer drafts than costs, and fewer costs than drafts.
    expected = metrics.optimal_num_draft_tokens(alpha, cost, 3)
    np.testing.assert_array_equal(rule.most(rule.init(1), 3), [expected])
    rule = dataclasses.replace(rule, step_costs=rule.step_costs[:4])
    np.testing.assert_array_equal(rule.most(rule.init(1), 16), [expected])

  @parameterized.parameters(
    (lambda: stopping.Confidence(least=0.0), 'confidence must be .*, got 0.0'),
    (lambda: stopping.Confidence(least=1.5), 'confidence must be .*, got 1.5'),
    (lambda: stopping.Acceptance(least=0), 'least must be above 0 .*, got 0'),
    (lambda: stopping.Cost(step_costs=()), 'step_costs must be .*, got ()'),
    (lambda: stopping.Cost(step_costs=(1.0, -1.0)), 'numbers > 0, got .*-1'),
    (lambda: stopping.RunningAcceptance(prior=1.0), 'prior must .* got 1.0'),
    (lambda: stopping.RunningAcceptance(decay=0.0), 'decay must .* got 0.0'),
    (lambda: stopping.RunningAcceptance(weight=0.0), 'weight must be > 0'),
    (
      lambda: NGram(num_draft_tokens=2, stop=CONFIDENCE),
      'ngram has no logits, so stop must be a rule that reads none',
    ),
    (
      lambda: dataclasses.replace(decoder(), widths=(2, 1, 5)),
      'widths must ascend from 1 at least to 5, .* got .2, 1, 5.',
    ),
    (
      lambda: dataclasses.replace(decoder(), widths=(1, 4)),
      'widths must ascend from 1 at least to 5, .* got .1, 4.',
    ),
  )
  def test_bad_settings(self, make, message):
    with self.assertRaisesRegex(ValueError, message):
      make()


@dataclasses.dataclass(frozen=True)
class EverySecondStep(stopping.Fixed):
  """All drafts or none, by turns; the state is the step's number."""

  def init(self, batch_size):
    return jnp.zeros(batch_size, jnp.int32)

  def most(self, state, num_draft_tokens):
    return num_draft_tokens * (state % 2)

  def observe(self, state, outcome):
    return state + 1


SEEN = []  # Rows of the passes of `Watched`, in order.


@dataclasses.dataclass(frozen=True)
class Watched:
  """A toy that tells the rows of its passes to the host."""

  model: ToyModel

  def __getattr__(self, name: str) -> Any:
    return getattr(self.model, name)

  def apply(self, params, tokens_BT, cache, **options):
    jax.debug.callback(functools.partial(SEEN.append, tokens_BT.shape[1]))
    return self.model.apply(params, tokens_BT, cache, **options)


def decoder(
  stop: stopping.StoppingRule = stopping.Fixed(), **options
) -> decode.Decoder:
  return decode.Decoder(
    target=Watched(TOY),
    proposer=DraftModel(
      model=TOY, num_draft_tokens=K, stop=stop, prefill_chunk=4
    ),
    verify=chain.Coupled(),
    max_length=L,
    prefill_chunk=4,
    **options,
  )


def first_drafts(run: toy_loops.Run, b: int) -> np.ndarray:
  """How many drafts each step of a row verified."""
  steps = run.emitted(b, 'step_BL')
  return run.emitted(b, 'num_draft_BL')[np.diff(steps, prepend=-1) > 0]


def rows_of(max_new: int = 24, num: int = 8) -> list[Row]:
  return [
    Row(
      prompt=toy_loops.PROMPTS[seed % 4],
      max_new=max_new,
      seed=seed,
      options=toy_loops.WARM,
    )
    for seed in range(num)
  ]


class LoopTest(parameterized.TestCase):
  """Draft and target differ a little, so that drafts are rejected at times."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    params = toy_loops.make_params(twins=False)
    target, other = params['target']['table'], params['proposer']['table']
    params['proposer'] = {'table': 0.9 * target + 0.3 * other}
    cls.params = params
    plain = toy_loops.generate(
      toy_loops.plain_decoder(chain.Coupled(), None), params, rows_of()
    )
    cls.plain = [plain.tokens(b) for b in range(8)]

  @parameterized.named_parameters(
    ('confidence', CONFIDENCE, None),
    ('acceptance', stopping.Acceptance(), (1, 2, 3, 5)),
    ('cost', COST, (2, 5)),
  )
  def test_text_lengths_rows_and_compilations(self, stop, widths):
    loop = decoder(stop, widths=widths)
    run = toy_loops.generate(loop, self.params, rows_of())
    num_programs = decode.run._cache_size()
    drafted = [first_drafts(run, b) for b in range(8)]
    # The text is that of plain decoding, and lengths vary.
    self.assertEqual([run.tokens(b) for b in range(8)], self.plain)
    self.assertGreater(len({*np.concatenate(drafted).tolist()}), 2)
    # A row drafts the same whoever is beside it: other rows, other places.
    order = [5, 2, 7]
    other = [dataclasses.replace(rows_of()[i], max_new=24) for i in order]
    other += [Row(prompt=(1,), max_new=30, options=toy_loops.WARM)]
    again = toy_loops.generate(loop, self.params, other)
    for b, i in enumerate(order):
      np.testing.assert_array_equal(first_drafts(again, b), drafted[i])
    # Nothing is drafted that a limit would cut.
    for b in range(8):
      left = 24 - np.flatnonzero(
        np.diff(run.emitted(b, 'step_BL'), prepend=-1) > 0
      )
      self.assertTrue(np.all(drafted[b] < left))
    self.assertEqual(decode.run._cache_size(), num_programs)

  @parameterized.parameters((1, 0), (2, 0), (3, 1), (4, 2), (5, 3), (9, 3))
  def test_no_pass_is_made_for_a_draft_that_cannot_be(self, max_new, passes):
    """Of one row each, behind the two that absorb the text."""
    run = toy_loops.begin(decoder(), self.params, rows_of(max_new))
    before_B = np.asarray(run.state.length_B)
    run = run.go_on(1)
    fed_B = np.asarray(run.state.proposer_state.cache.length_B)
    np.testing.assert_array_equal(fed_B - before_B, passes)

  def test_an_unsure_draft_is_the_last_and_makes_no_pass(self):
    loop = decoder(stopping.Confidence(least=1.0))
    run = toy_loops.begin(loop, self.params, rows_of())
    before_B = np.asarray(run.state.length_B)
    run = run.go_on(1)
    fed_B = np.asarray(run.state.proposer_state.cache.length_B)
    np.testing.assert_array_equal(fed_B, before_B)
    num_draft_B = [first_drafts(run, b)[0] for b in range(8)]
    np.testing.assert_array_equal(num_draft_B, np.ones(8))

  @parameterized.named_parameters(
    ('unsure', CONFIDENCE, 1),
    ('silent', EverySecondStep(), 0),
  )
  def test_a_draft_that_was_short_has_kept_up(self, stop, least):
    """Twins: whenever it drafts, all drafts are accepted."""
    params = toy_loops.make_params(twins=True)
    run = toy_loops.generate(decoder(stop), params, rows_of())
    drafted = np.concatenate([first_drafts(run, b) for b in range(8)])
    self.assertGreater(np.sum(drafted == least), 3)
    accepted = sum(
      int(np.sum(run.emitted(b, 'source_BL') == 1)) for b in range(8)
    )
    self.assertEqual(accepted, np.sum(drafted))

  def test_the_narrowest_width_that_holds_the_longest_draft(self):
    loop = decoder(CONFIDENCE, widths=(1, 2, 4, 5))
    run = toy_loops.begin(loop, self.params, rows_of(num=2))
    used = set()
    for _ in range(12):
      jax.effects_barrier()
      SEEN.clear()
      before_B = np.asarray(run.state.length_B)
      run = run.go_on(1)
      jax.effects_barrier()
      is_done_B = np.asarray(run.state.length_B) == before_B
      if np.all(is_done_B):
        break
      num_draft_B = np.asarray(run.state.num_draft_BL)[
        np.arange(len(before_B)), np.minimum(before_B, L - 1)
      ]
      most = int(np.max(np.where(is_done_B, 0, num_draft_B)))
      self.assertEqual(SEEN, [min(w for w in (1, 2, 4, 5) if w > most)])
      used.update(SEEN)
    self.assertGreater(len(used), 1)

  def test_powers_of_two(self):
    self.assertEqual(widths.powers_of_two(1), (1,))
    self.assertEqual(widths.powers_of_two(4), (1, 2, 4))
    self.assertEqual(widths.powers_of_two(9), (1, 2, 4, 8, 9))


if __name__ == '__main__':
  absltest.main()

"""The reference and the statistics that everything is judged by."""

import jax
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import testing
from specjax.models.toy import ToyModel
from specjax.sampling import SamplingOptions
from specjax.testing import certificate, loops, rules

WARM = SamplingOptions(temperature=1.0)


def constant(probs):
  return lambda tokens_MT: np.log(np.tile(probs, (len(tokens_MT), 1)))


class ChiSquareTest(parameterized.TestCase):
  @parameterized.parameters(
    # Statistic, degrees of freedom and p-value from tables.
    ([50, 50], [0.5, 0.5], 0.0, 1, 1.0),
    ([60, 40], [0.5, 0.5], 4.0, 1, 0.0455003),
    ([44, 56], [0.5, 0.5], 1.44, 1, 0.2301393),
    ([20, 30, 50], [0.3, 0.3, 0.4], 35 / 6, 2, 0.0541138),
    ([700, 300], [0.6, 0.4], 41.6666667, 1, 1.0823874e-10),
  )
  def test_by_hand(self, counts, probs, statistic, dof, p_value):
    found = testing.chi_square(counts, probs)
    self.assertAlmostEqual(found.statistic, statistic, places=5)
    self.assertEqual(found.dof, dof)
    self.assertAlmostEqual(found.p_value / p_value, 1, places=3)

  def test_many_degrees_of_freedom(self):
    # float32 is good enough for hundreds of cells, too.
    counts = np.full(600, 100)
    counts[:300] += 12
    counts[300:] -= 12
    found = testing.chi_square(counts, np.full(600, 1 / 600))
    self.assertEqual(found.dof, 599)
    self.assertAlmostEqual(found.statistic, 864.0, places=3)
    self.assertAlmostEqual(found.p_value / 6.443493e-12, 1, places=2)

  def test_the_impossible_has_p_value_zero(self):
    found = testing.chi_square([1000, 1], [1.0, 0.0])
    self.assertEqual((found.p_value, found.statistic), (0.0, float('inf')))
    self.assertEqual(testing.chi_square([1000, 0], [1.0, 0.0]).p_value, 1.0)

  def test_small_cells_are_merged_with_their_neighbours(self):
    # Expected 50, 2, 2, 2, 40, 4: the second cell is 2 + 2 + 2, the last 44.
    probs = np.asarray([50, 2, 2, 2, 40, 4]) / 100
    found = testing.chi_square([50, 6, 0, 0, 36, 8], probs)
    self.assertEqual((found.statistic, found.dof), (0.0, 2))

  def test_uniform_p_values_under_the_law(self):
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(50))
    p_values = [
      testing.chi_square(rng.multinomial(2000, probs), probs).p_value
      for _ in range(400)
    ]
    self.assertBetween(np.mean(p_values), 0.45, 0.55)
    self.assertBetween(np.mean(np.asarray(p_values) < 0.1), 0.05, 0.15)

  @parameterized.parameters(([1, 2], [1.0]), ([1, 2], [0.5, 0.4]))
  def test_bad_arguments(self, counts, probs):
    message = 'probs must have one entry per count and sum to 1'
    with self.assertRaisesRegex(ValueError, message):
      testing.chi_square(counts, probs)


class EnumerateTest(parameterized.TestCase):
  def test_by_hand(self):
    law = testing.enumerate_exact(
      constant([0.5, 0.3, 0.2]), [0], 2, WARM, stop_ids=[2]
    )
    self.assertEqual(
      law.outcomes_MT.tolist(),
      [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, -1]],
    )
    np.testing.assert_allclose(
      law.probs_M, [0.25, 0.15, 0.1, 0.15, 0.09, 0.06, 0.2]
    )

  def test_penalties_count_the_prompt_and_the_output(self):
    options = SamplingOptions(temperature=0.0, repetition_penalty=1e4)
    law = testing.enumerate_exact(
      constant([0.4, 0.3, 0.2, 0.1]), [1], 3, options
    )
    self.assertEqual(law.outcomes_MT.tolist(), [[0, 2, 3]])

  @parameterized.parameters(None, 1, 3)
  def test_the_toy_from_scratch_equals_the_model(self, window):
    model = ToyModel(vocab_size=5, window=window)
    params = model.init(jax.random.key(1))
    rng = np.random.default_rng(0)
    for length in (1, 2, 7):
      tokens = rng.integers(0, 5, (6, length))
      np.testing.assert_array_equal(
        testing.toy_logits(model, params)(tokens),
        testing.model_logits(model, params)(tokens),
      )

  def test_count(self):
    law = testing.enumerate_exact(
      constant([0.5, 0.5, 1e-300]), [0], 2, WARM, stop_ids=[1]
    )
    seen = np.asarray([[0, 0], [0, 1], [0, 1], [1, -1], [1, 0], [7, 7]])
    counts = dict(zip(map(tuple, law.outcomes_MT.tolist()), law.count(seen)))
    self.assertEqual(counts[0, 0], 1)
    self.assertEqual(counts[0, 1], 2)
    self.assertEqual(counts[1, -1], 1)
    self.assertEqual(law.count(seen)[-1], 2)  # Behind the stop, and no id.
    self.assertEqual(law.count(seen).sum(), len(seen))

  def test_probabilities_sum_to_one(self):
    model, params = loops.toy_pair(jax.random.key(0), 4)
    options = SamplingOptions(temperature=1.3, top_k=3, top_p=0.9)
    law = testing.enumerate_exact(
      testing.toy_logits(model, params['target']), [1, 2], 5, options, [3]
    )
    self.assertAlmostEqual(law.probs_M.sum(), 1)
    self.assertTrue(np.all(law.probs_M > 0))


class RulesTest(absltest.TestCase):
  def test_a_wrong_rule_is_seen(self):
    """Block's probabilities with a token-wise correction are biased."""

    def broken(p_NV, q_KV, draft_K, num_draft):
      accepted_N, _ = rules.block_probs(p_NV, q_KV, draft_K, num_draft)
      return accepted_N, rules.rejection_probs(p_NV, q_KV, draft_K, num_draft)[
        1
      ]

    p = certificate.random_path_law(1, 3)
    q = certificate.random_path_law(2, 3)
    rules.RULE_PROBS['broken'] = broken
    try:
      found = testing.enumerate_rule('broken', p, q, 3, 2)
    finally:
      del rules.RULE_PROBS['broken']
    error = np.max(np.abs(found.law - testing.path_law(p, 3, 3)))
    self.assertGreater(error, 1e3 * certificate.MAX_ERROR)


class CountTracesTest(absltest.TestCase):
  def test_counts(self):
    f = jax.jit(lambda x: x * 3)
    with testing.count_traces() as outer:
      f(1.0)
      with testing.count_traces() as inner:
        f(2.0)
      f(np.ones(7, np.float32))
    self.assertEqual(inner.num_compilations, 0)
    self.assertEqual(inner.num_traces, 0)
    self.assertGreaterEqual(outer.num_compilations, 2)
    self.assertGreaterEqual(outer.num_traces, 2)
    before = outer.num_compilations
    f(np.ones(9, np.float32))
    self.assertEqual(outer.num_compilations, before)  # It no longer listens.


if __name__ == '__main__':
  absltest.main()

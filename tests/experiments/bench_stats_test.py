"""The arithmetic of a benchmark, by hand."""

import numpy as np
from absl.testing import absltest

import tests.setup_jax  # noqa: F401
from experiments import bench_stats
from experiments.bench_stats import Costs


class RatesTest(absltest.TestCase):
  def test_ratio_of_medians(self):
    emitted_P = np.array([10, 10])
    seconds_RP = np.array([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]])
    base_RP = np.array([[2.0, 2.0], [10.0, 10.0], [4.0, 4.0]])
    found = bench_stats.ratio(emitted_P, seconds_RP, emitted_P, base_RP)
    # Rates 10, 5, 2.5 and 5, 1, 2.5: medians 5 and 2.5.
    self.assertAlmostEqual(found.value, 2.0)
    self.assertLessEqual(found.low, 2.0)
    self.assertGreaterEqual(found.high, 2.0)

  def test_what_is_slow_for_both_is_no_noise(self):
    emitted_P = np.array([7, 9, 11])
    seconds_RP = np.random.default_rng(0).uniform(1, 9, (5, 3))
    found = bench_stats.ratio(emitted_P, seconds_RP, emitted_P, 3 * seconds_RP)
    for value in (found.value, found.low, found.high):
      self.assertAlmostEqual(value, 3.0)

  def test_the_interval_widens_with_the_prompts_differences(self):
    emitted_P = np.full(4, 10)
    base_RP = np.ones((3, 4))
    alike_RP = np.full((3, 4), 0.5)
    apart_RP = np.tile([0.1, 0.2, 0.8, 0.9], (3, 1))
    alike = bench_stats.ratio(emitted_P, alike_RP, emitted_P, base_RP)
    apart = bench_stats.ratio(emitted_P, apart_RP, emitted_P, base_RP)
    self.assertAlmostEqual(alike.value, apart.value)
    self.assertAlmostEqual(alike.low, alike.high)
    self.assertLess(apart.low, 1.7)
    self.assertGreater(apart.high, 2.4)

  def test_the_same_draws_again(self):
    seconds_RP = np.random.default_rng(1).uniform(1, 2, (3, 2))
    draw = lambda: bench_stats.ratio(
      np.array([1, 2]), seconds_RP, np.array([1, 2]), seconds_RP[::-1]
    )
    self.assertEqual(draw(), draw())


class PredictionTest(absltest.TestCase):
  def test_a_draft_model(self):
    costs = Costs(plain=10, verify=14, draft=2, absorb=4, propose=99)
    # 14 + 4 + 3 x 2, the proposer as a whole is not counted beside.
    self.assertEqual(bench_stats.step_seconds(costs, 4.0), 24)
    self.assertEqual(bench_stats.predicted_speedup(costs, 4.0, 3.6), 1.5)

  def test_passes_that_end_early(self):
    costs = Costs(plain=10, verify=14, draft=2, absorb=4, propose=99)
    self.assertEqual(bench_stats.step_seconds(costs, 2.5), 21)

  def test_a_lookup_is_not_free(self):
    costs = Costs(plain=10, verify=14, draft=None, absorb=None, propose=1)
    self.assertEqual(bench_stats.step_seconds(costs, 8.0), 15)

  def test_plain_decoding_predicts_itself(self):
    costs = Costs(plain=10, verify=10, draft=None, absorb=None, propose=0)
    self.assertEqual(bench_stats.predicted_speedup(costs, 0.0, 1.0), 1)


if __name__ == '__main__':
  absltest.main()

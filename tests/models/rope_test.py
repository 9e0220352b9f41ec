"""Frequencies by hand and the rotation's defining property."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.models import rope


class RopeTest(parameterized.TestCase):
  def test_default(self):
    got = rope.Rope(theta=10000.0).frequencies(8)
    np.testing.assert_allclose(got, [1, 0.1, 0.01, 0.001], rtol=1e-6)
    self.assertEqual(got.dtype, np.float32)

  def test_linear_divides_all(self):
    got = rope.Rope(theta=10000.0, kind='linear', factor=4.0).frequencies(8)
    np.testing.assert_allclose(got, [0.25, 0.025, 0.0025, 0.00025], rtol=1e-6)

  def test_llama3_keeps_blends_and_divides(self):
    plain = rope.Rope(theta=5e5).frequencies(128)
    ratio = (
      rope.Rope(
        theta=5e5,
        kind='llama3',
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_context=8192,
      ).frequencies(128)
      / plain
    )
    np.testing.assert_allclose(ratio[:29], 1.0, rtol=1e-6)
    self.assertTrue(np.all((ratio[29:35] > 0.126) & (ratio[29:35] < 0.999)))
    self.assertTrue(np.all(np.diff(ratio[29:35]) < 0))
    np.testing.assert_allclose(ratio[35:], 0.125, rtol=1e-6)

  def test_scores_depend_on_distance_only(self):
    settings = rope.Rope(theta=100.0)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

    def score(q_position: int, k_position: int) -> float:
      turned = [
        rope.rotate(x, *settings.angles(jnp.array([[position]]), 8))
        for x, position in ((q, q_position), (k, k_position))
      ]
      return float(jnp.sum(turned[0] * turned[1]))

    self.assertAlmostEqual(score(7, 4), score(23, 20), places=5)
    self.assertNotAlmostEqual(score(7, 4), score(7, 5), places=3)

  def test_rotation_by_hand(self):
    x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    # Entries 0 and 2 turn by a quarter, 1 and 3 by a half.
    cos = jnp.array([0.0, -1.0]).reshape(1, 1, 2)
    sin = jnp.array([1.0, 0.0]).reshape(1, 1, 2)
    got = rope.rotate(x, cos, sin)
    np.testing.assert_allclose(got.ravel(), [-3, -2, 1, -4], atol=1e-6)

  def test_keeps_dtype(self):
    x = jnp.ones((2, 3, 1, 4), jnp.bfloat16)
    cos = jnp.ones((2, 3, 2))
    self.assertEqual(rope.rotate(x, cos, cos).dtype, jnp.bfloat16)

  @parameterized.parameters(
    ({'theta': 0.0}, 'theta must be > 0, got 0.0'),
    (
      {'theta': 1.0, 'kind': 'yarn'},
      "one of default, linear, llama3, got 'yarn'",
    ),
    ({'theta': 1.0, 'kind': 'linear', 'factor': 0.5}, 'factor must be >= 1'),
    (
      {'theta': 1.0, 'kind': 'llama3', 'original_context': 8},
      'low_freq_factor < high_freq_factor',
    ),
  )
  def test_refuses(self, settings, message):
    with self.assertRaisesRegex(ValueError, message):
      rope.Rope(**settings)


if __name__ == '__main__':
  absltest.main()

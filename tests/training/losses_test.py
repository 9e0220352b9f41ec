from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.training import losses


def laws(seed: int, scale: float = 2.0):
  """Two sets of logits, and their laws in float64."""
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(2, 3, 5, 11)).astype(np.float32) * scale
  x = logits.astype(np.float64)
  p, q = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
  return *map(jnp.asarray, logits), p, q


class DivergenceTest(parameterized.TestCase):
  def test_against_float64(self):
    p_logits, q_logits, p, q = laws(0)
    m = (p + q) / 2
    kl = lambda a, b: np.sum(a * np.log(a / b), axis=-1)
    for name, expected in (
      ('forward_kl', kl(p, q)),
      ('reverse_kl', kl(q, p)),
      ('js', (kl(p, m) + kl(q, m)) / 2),
      ('tv', np.abs(p - q).sum(-1) / 2),
    ):
      got = losses.divergence(name, p_logits, q_logits)
      np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)

  def test_total_variation_is_one_minus_acceptance(self):
    p_logits, q_logits, p, q = laws(1, scale=4.0)
    tv = losses.divergence('tv', p_logits, q_logits)
    np.testing.assert_allclose(tv, 1 - np.minimum(p, q).sum(-1), atol=1e-6)
    np.testing.assert_allclose(
      tv + losses.overlap(p_logits, q_logits), 1.0, atol=1e-6
    )

  @parameterized.parameters(*losses.DIVERGENCES)
  def test_corners(self, name):
    same = jnp.asarray([1.0, -2.0, 0.5])
    self.assertAlmostEqual(float(losses.divergence(name, same, same)), 0, 6)
    # Logits so far apart that probabilities are 0 in float32.
    far = jnp.asarray([500.0, -500.0, 0.0])
    grad = jax.grad(lambda q: losses.divergence(name, far, q))(same)
    self.assertTrue(np.all(np.isfinite(grad)))
    if name in ('js', 'tv'):
      apart = losses.divergence(name, far, -far)
      limit = np.log(2) if name == 'js' else 1.0
      self.assertAlmostEqual(float(apart), limit, places=5)

  @parameterized.parameters(*losses.DIVERGENCES)
  def test_the_gradient_is_that_of_finite_differences(self, name):
    p_logits, q_logits, _, _ = laws(2)
    loss = lambda q: jnp.sum(losses.divergence(name, p_logits, q))
    grad = np.asarray(jax.grad(loss)(q_logits))
    step = jnp.zeros_like(q_logits).at[1, 2, 3].set(1e-2)
    slope = (loss(q_logits + step) - loss(q_logits - step)) / 2e-2
    self.assertAlmostEqual(float(slope), grad[1, 2, 3], delta=2e-3)

  def test_what_is_refused(self):
    with self.assertRaisesRegex(ValueError, "forward_kl, .* got 'kl'"):
      losses.divergence('kl', jnp.zeros(3), jnp.zeros(3))
    with self.assertRaisesRegex(ValueError, r'\(3\), got \(4,\)'):
      losses.divergence('tv', jnp.zeros(3), jnp.zeros(4))


class MeansTest(absltest.TestCase):
  def test_cross_entropy(self):
    logits, _, p, _ = laws(3)
    tokens = np.random.default_rng(0).integers(11, size=(3, 5))
    expected = -np.log(np.take_along_axis(p, tokens[..., None], -1)[..., 0])
    got = losses.cross_entropy(logits, jnp.asarray(tokens))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)

  def test_stretches_change_neither_value_nor_gradient(self):
    rng = np.random.default_rng(0)
    hidden_BTD = jnp.asarray(rng.normal(size=(2, 7, 4)), jnp.float32)
    head_DV = jnp.asarray(rng.normal(size=(4, 11)), jnp.float32)
    tokens_BT = jnp.asarray(rng.integers(11, size=(2, 7)))
    mask_BT = jnp.asarray(rng.random((2, 7)) < 0.6)

    def loss(head_DV, max_values):
      def per_token(x_BTD, next_BT):
        logits = jnp.einsum('BTD,DV->BTV', x_BTD, head_DV)
        return {'x': losses.cross_entropy(logits, next_BT)}

      old, losses._MAX_VALUES = losses._MAX_VALUES, max_values
      try:
        return losses.chunked(per_token, (hidden_BTD, tokens_BT), mask_BT, 11)[
          'x'
        ]
      finally:
        losses._MAX_VALUES = old

    whole = jax.value_and_grad(loss)(head_DV, 1 << 20)
    # Three tokens of two rows at a time; the last stretch is filled up.
    parts = jax.value_and_grad(loss)(head_DV, 3 * 2 * 11)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
      whole,
      parts,
    )

  def test_what_is_made_in_stretches_is_whole(self):
    rng = np.random.default_rng(0)
    hidden_BTD = jnp.asarray(rng.normal(size=(2, 7, 4)), jnp.float32)
    head_DV = jnp.asarray(rng.normal(size=(4, 11)), jnp.float32)

    def per_token(x_BTD):
      logits = jnp.einsum('BTD,DV->BTV', x_BTD, head_DV)
      return {'few': logits[:, :, :3], 'best': jnp.argmax(logits, axis=-1)}

    with mock.patch.object(losses, '_MAX_VALUES', 3 * 2 * 11):
      got = jax.jit(lambda x_BTD: losses.stretched(per_token, x_BTD, 11))(
        hidden_BTD
      )
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
      got,
      per_token(hidden_BTD),
    )

  def test_an_empty_mask_is_zero(self):
    mask_BT = jnp.zeros((2, 3), bool)
    per_token = lambda x_BT: {'x': x_BT}
    found = losses.chunked(per_token, (jnp.ones((2, 3)),), mask_BT, 11)
    self.assertEqual(float(found['x']), 0)


if __name__ == '__main__':
  absltest.main()

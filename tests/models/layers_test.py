"""Products and norms against plain NumPy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.models import layers


def normal(seed, *shape, dtype=jnp.float32):
  values = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(values, dtype)


class LayersTest(parameterized.TestCase):
  def test_dense_by_hand(self):
    x = jnp.array([[[1.0, 2.0]]])
    weight = jnp.array([[3.0, 4.0], [5.0, 6.0], [0.0, 1.0]])
    y = layers.dense(x, weight, jnp.array([0.0, 0.0, 10.0]))
    np.testing.assert_array_equal(y, [[[11.0, 17.0, 12.0]]])

  @parameterized.parameters('float32', 'bfloat16')
  def test_dense_sums_in_float32(self, dtype):
    x = normal(0, 2, 3, 64).astype(dtype)
    weight = normal(1, 5, 64).astype(dtype)
    got = layers.dense(x, weight, dtype=jnp.float32)
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    self.assertEqual(got.dtype, jnp.float32)
    np.testing.assert_allclose(got, want, atol=1e-4)
    self.assertEqual(layers.dense(x, weight).dtype, jnp.dtype(dtype))

  def test_one_row_equals_the_same_row_of_two(self):
    x = normal(0, 1, 2, 32, dtype=jnp.bfloat16)
    weight = normal(1, 8, 32, dtype=jnp.bfloat16)
    both, one = (jax.jit(layers.dense)(y, weight) for y in (x, x[:, :1]))
    np.testing.assert_array_equal(both[:, :1], one)

  @parameterized.parameters(1, 3)
  def test_gradients_of_narrow_products_are_narrow(self, num_rows):
    x = normal(0, 1, num_rows, 16, dtype=jnp.bfloat16)
    weight = normal(1, 8, 16, dtype=jnp.bfloat16)
    grad = normal(2, 1, num_rows, 8)

    def gradients(x, weight, grad):
      dense = lambda x, weight: layers.dense(x, weight, dtype=jnp.float32)
      return jax.vjp(dense, x, weight)[1](grad)

    got_x, got_weight = jax.jit(gradients)(x, weight, grad)
    wide = lambda a: np.asarray(a, np.float64)
    rounded = wide(grad.astype(jnp.bfloat16))
    want_x = rounded @ wide(weight)
    want_weight = np.einsum('bto,bti->oi', rounded, wide(x))
    for got, want in ((got_x, want_x), (got_weight, want_weight)):
      self.assertEqual(got.dtype, jnp.bfloat16)
      np.testing.assert_allclose(wide(got), want, rtol=2**-8, atol=1e-5)
    text = jax.jit(gradients).lower(x, weight, grad).as_text()
    factors = re.findall(r'dot_general.*: \((.*)\) ->', text)
    self.assertLen(factors, 2)
    for line in factors:
      self.assertNotIn('f32', line)

  @parameterized.parameters('float32', 'bfloat16')
  def test_rms_norm(self, dtype):
    x = (3 * normal(0, 2, 3, 16)).astype(dtype)
    scale = np.asarray(normal(1, 16))
    wide = np.asarray(x, np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * scale
    got = layers.rms_norm(x, scale, 1e-5)
    self.assertEqual(got.dtype, jnp.dtype(dtype))
    tolerance = {'float32': 1e-5, 'bfloat16': 2e-2}[dtype]
    np.testing.assert_allclose(got.astype(np.float32), want, atol=tolerance)


class PlatformTest(parameterized.TestCase):
  @parameterized.product(
    platform=('cpu', 'cuda', 'tpu'), dtype=('bfloat16', 'float32')
  )
  def test_a_row_is_repeated_for_cpu_only(self, platform, dtype):
    x_BTI = jax.ShapeDtypeStruct((1, 1, 8), dtype)
    weight_OI = jax.ShapeDtypeStruct((4, 8), dtype)
    lowered = jax.export.export(jax.jit(layers.dense), platforms=[platform])
    text = lowered(x_BTI, weight_OI).mlir_module()
    is_repeated = platform == 'cpu' and dtype == 'bfloat16'
    self.assertEqual('concatenate' in text, is_repeated)


if __name__ == '__main__':
  absltest.main()

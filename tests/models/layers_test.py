"""Products, norms and attention against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.models import layers


def normal(seed, *shape, dtype=jnp.float32):
  values = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(values, dtype)


def attend_slowly(q_BTHC, k_BGSC, v_BGSC, visible_BTS, scale):
  q, k, v = (np.asarray(x, np.float64) for x in (q_BTHC, k_BGSC, v_BGSC))
  b, t, h, c = q.shape
  group = h // k.shape[1]
  y = np.zeros((b, t, h, c))
  for i, j, n in np.ndindex(b, t, h):
    seen = np.flatnonzero(visible_BTS[i, j])
    score = k[i, n // group, seen] @ q[i, j, n] * scale
    weight = np.exp(score - score.max())
    y[i, j, n] = weight / weight.sum() @ v[i, n // group, seen]
  return y.reshape(b, t, h * c)


@jax.jit
def attend(q, k, v, visible, scale):
  return layers.attend(q, (layers.Memory(k, v, visible),), scale)


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

  @parameterized.product(
    dtype=('float32', 'bfloat16'), heads=((4, 2), (3, 3)), t=(1, 3)
  )
  def test_attend(self, dtype, heads, t):
    h, g = heads
    q = normal(0, 2, t, h, 8).astype(dtype)
    k, v = (normal(i, 2, g, 6, 8).astype(dtype) for i in (1, 2))
    visible = np.random.default_rng(0).random((2, t, 6)) < 0.5
    visible[:, :, 0] = True
    got = attend(q, k, v, visible, 0.3)
    want = attend_slowly(q, k, v, visible, 0.3)
    tolerance = {'float32': 1e-5, 'bfloat16': 3e-2}[dtype]
    np.testing.assert_allclose(got.astype(np.float32), want, atol=tolerance)
    self.assertEqual(got.dtype, jnp.dtype(dtype))

  @parameterized.product(dtype=('float32', 'bfloat16'), cut=(1, 4), t=(1, 3))
  def test_two_memories_are_one(self, dtype, cut, t):
    q = normal(0, 2, t, 4, 8).astype(dtype)
    k, v = (normal(i, 2, 2, 6, 8).astype(dtype) for i in (1, 2))
    visible = np.random.default_rng(0).random((2, t, 6)) < 0.5
    visible[:, :, 5] = True
    # A query that sees nothing of the first of them.
    visible[0, 0, :cut] = False
    memories = [
      layers.Memory(k[:, :, part], v[:, :, part], visible[:, :, part])
      for part in (slice(cut), slice(cut, None))
    ]
    got = jax.jit(layers.attend)(q, memories, 0.3)
    want = attend_slowly(q, k, v, visible, 0.3)
    tolerance = {'float32': 1e-5, 'bfloat16': 3e-2}[dtype]
    np.testing.assert_allclose(got.astype(np.float32), want, atol=tolerance)
    self.assertEqual(got.dtype, jnp.dtype(dtype))

  @parameterized.parameters('float32', 'bfloat16')
  def test_hidden_slots_hold_anything_finite(self, dtype):
    q = normal(0, 1, 2, 4, 8).astype(dtype)
    k, v = (normal(i, 1, 2, 6, 8).astype(dtype) for i in (1, 2))
    visible = jnp.arange(6)[None, None, :] < jnp.array([[[3], [4]]])
    poison = (1e30 * normal(3, 1, 2, 2, 8)).astype(dtype)
    want = attend(q, k, v, visible, 0.3)
    got = attend(
      q, k.at[:, :, 4:].set(poison), v.at[:, :, 4:].set(poison), visible, 0.3
    )
    np.testing.assert_array_equal(got, want)

  def test_a_row_that_sees_nothing_is_finite(self):
    q, k = normal(0, 1, 1, 2, 4), normal(1, 1, 1, 3, 4)
    y = attend(q, k, k, jnp.zeros((1, 1, 3), bool), 1.0)
    self.assertTrue(np.all(np.isfinite(y)))

  @parameterized.product(t=(1, 2, 5, 8, 128), b=(1, 2, 8))
  def test_narrow_products_compile(self, t, b):
    # XLA:CPU lacks some batched products of bfloat16 with float32 results.
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    products = lambda q, k, p: (layers.scores(q, k), layers.mixture(p, k))
    # One head to a key-value head, and seven.
    for rows in (t, 7 * t):
      jax.jit(products).lower(
        bf16(b, 2, rows, 64), bf16(b, 2, 160, 64), bf16(b, 2, rows, 160)
      ).compile()


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

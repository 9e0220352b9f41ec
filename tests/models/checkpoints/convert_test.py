"""Tensors become parameters on the host exactly as they would on a device."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.models import quantize
from specjax.models.checkpoints import convert

# Pieces of 2**18 values: whole ones and a rest, one row a piece, one column.
SHAPES = ((700, 1000), (3, 300_000), (5, 1), (1, 7))


def values(shape: tuple[int, ...]) -> np.ndarray:
  """Of many magnitudes; ties between two roundings among them."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=shape) * 2.0 ** rng.integers(-20, 20, (shape[0], 1))
  x[0] = np.linspace(-127, 127, shape[1])
  x[-1] = 0
  return x.astype(np.float32)


class ConvertTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.pool = self.enterContext(convert.thread_pool())

  @parameterized.product(
    shape=SHAPES, dtype=(np.float16, np.float32, np.float64, jnp.bfloat16)
  )
  def test_int8_has_the_bits_of_the_device(self, shape, dtype):
    # Within what float16 holds.
    x = np.clip(values(shape), -6e4, 6e4).astype(dtype)
    got = convert.to_int8(x, self.pool)
    want = quantize.quantize_weight(jnp.asarray(x.astype(np.float32)))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    self.assertEqual([y.dtype for y in got], [np.int8, np.float32])

  @parameterized.product(shape=SHAPES, dtype=('float32', 'bfloat16'))
  def test_floats_have_the_bits_of_the_device(self, shape, dtype):
    x = values(shape)
    want = jnp.asarray(x).astype(dtype)
    for got in (
      convert.to_matrix(x, dtype, self.pool),
      convert.to_float(x, dtype, add_one=False),
    ):
      self.assertEqual(got.dtype, want.dtype)
      np.testing.assert_array_equal(got, want)
    one_more = convert.to_float(x, dtype, add_one=True)
    np.testing.assert_array_equal(
      one_more, (jnp.asarray(x) + 1.0).astype(dtype)
    )

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_what_is_not_finite_is_seen_in_any_piece(self, value):
    x = np.ones((700, 1000), np.float32)
    x[699, 3] = value
    self.assertIsNone(convert.to_int8(x, self.pool))
    for dtype in ('float32', 'bfloat16'):
      self.assertIsNone(convert.to_matrix(x, dtype, self.pool))
      self.assertIsNone(convert.to_float(x, dtype, add_one=False))

  def test_what_becomes_infinite_is_seen(self):
    x = np.full((2, 2), np.finfo(np.float32).max)
    self.assertIsNone(convert.to_matrix(x, 'bfloat16', self.pool))
    self.assertIsNotNone(convert.to_matrix(x, 'float32', self.pool))

  def test_jax_takes_the_memory_as_it_is(self):
    for dtype in ('int8', 'bfloat16', np.float32):
      array = convert.empty((33, 7), dtype)
      array[...] = 1
      placed = jax.device_put(array)
      self.assertEqual(placed.unsafe_buffer_pointer(), array.ctypes.data)


if __name__ == '__main__':
  absltest.main()

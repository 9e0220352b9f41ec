"""Attention against NumPy: whole and by block, over caches of any dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.models import attention, slots
from specjax.models.attention import BLOCK_SIZE, Memory

TOLERANCE = {'float32': 1e-5, 'bfloat16': 3e-2, 'int8': 3e-2}
SHORT, LONG = 6, 2 * BLOCK_SIZE + 40


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


def make_slots(x_BGSC, dtype: str) -> slots.Slots:
  b, _, s, _ = x_BGSC.shape
  slot_BS = jnp.broadcast_to(jnp.arange(s)[None], (b, s))
  return slots.write(slots.empty(x_BGSC.shape, dtype), x_BGSC, slot_BS)


@functools.partial(jax.jit, static_argnames='by_block')
def attend(q, k, v, visible, by_block=False, num_used=None):
  num_used = slots.num_slots(k) if num_used is None else num_used
  memory = Memory(k, v, visible, jnp.int32(num_used))
  return attention.attend(q, (memory,), 0.3, by_block=by_block)


class AttentionTest(parameterized.TestCase):
  @parameterized.product(
    by_block=(False, True),
    dtype=('float32', 'bfloat16', 'int8'),
    shape=((4, 2, 3), (3, 3, 1)),
    size=(SHORT, LONG),
  )
  def test_attend(self, by_block, dtype, shape, size):
    h, g, t = shape
    q = normal(0, 2, t, h, 8)
    k, v = (normal(i, 2, g, size, 8) for i in (1, 2))
    visible = np.random.default_rng(0).random((2, t, size)) < 0.5
    visible[:, :, 0] = True
    got = attend(
      q, make_slots(k, dtype), make_slots(v, dtype), visible, by_block
    )
    want = attend_slowly(q, k, v, visible, 0.3)
    np.testing.assert_allclose(got, want, atol=TOLERANCE[dtype])
    self.assertEqual(got.dtype, jnp.float32)

  @parameterized.product(
    by_block=(False, True),
    dtype=('float32', 'bfloat16'),
    cut_and_t=((1, 3), (4, 1), (LONG - 3, 3)),
  )
  def test_two_memories_are_one(self, by_block, dtype, cut_and_t):
    cut, t = cut_and_t
    size = SHORT if cut < SHORT else LONG
    q = normal(0, 2, t, 4, 8).astype(dtype)
    k, v = (normal(i, 2, 2, size, 8).astype(dtype) for i in (1, 2))
    visible = np.random.default_rng(0).random((2, t, size)) < 0.5
    visible[:, :, size - 1] = True
    # A query that sees nothing of the first of them.
    visible[0, 0, :cut] = False
    memories = [
      Memory(k[:, :, part], v[:, :, part], visible[:, :, part], jnp.int32(size))
      for part in (slice(cut), slice(cut, None))
    ]
    got = jax.jit(functools.partial(attention.attend, by_block=by_block))(
      q, memories, 0.3
    )
    want = attend_slowly(q, k, v, visible, 0.3)
    np.testing.assert_allclose(
      got.astype(np.float32), want, atol=TOLERANCE[dtype]
    )
    self.assertEqual(got.dtype, jnp.dtype(dtype))

  @parameterized.product(
    by_block=(False, True), dtype=('float32', 'bfloat16'), size=(SHORT, LONG)
  )
  def test_hidden_slots_hold_anything_finite(self, by_block, dtype, size):
    q = normal(0, 1, 2, 4, 8).astype(dtype)
    k, v = (normal(i, 1, 2, size, 8).astype(dtype) for i in (1, 2))
    visible = jnp.arange(size)[None, None, :] < jnp.array([[[3], [4]]])
    poison = (1e30 * normal(3, 1, 2, 2, 8)).astype(dtype)
    k2, v2 = (x.at[:, :, 4:6].set(poison) for x in (k, v))
    want = attend(q, k, v, visible, by_block)
    np.testing.assert_array_equal(attend(q, k2, v2, visible, by_block), want)

  def test_blocks_behind_the_longest_row_change_no_bit(self):
    q = normal(0, 2, 2, 4, 8)
    k, v = (normal(i, 2, 2, LONG, 8) for i in (1, 2))
    visible = jnp.arange(LONG)[None, None, :] < jnp.array([[[3], [4]]])
    visible = jnp.broadcast_to(visible, (2, 2, LONG))
    want = attend(q, k, v, visible, True, 4)
    for num_used in (BLOCK_SIZE + 1, LONG):
      got = attend(q, k, v, visible, True, num_used)
      np.testing.assert_array_equal(got, want)

  @parameterized.product(by_block=(False, True), size=(3, LONG))
  def test_a_row_that_sees_nothing_is_finite(self, by_block, size):
    q, k = normal(0, 1, 1, 2, 4), normal(1, 1, 1, size, 4)
    y = attend(q, k, k, jnp.zeros((1, 1, size), bool), by_block)
    self.assertTrue(np.all(np.isfinite(y)))

  @parameterized.product(t=(1, 2, 5, 8, 128), b=(1, 2, 8))
  def test_narrow_products_compile(self, t, b):
    # XLA:CPU lacks some batched products of bfloat16 with float32 results.
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    products = lambda q, k, p: (
      attention.scores(q, k),
      attention.mixture(p, k),
    )
    # One head to a key-value head, and seven.
    for rows in (t, 7 * t):
      jax.jit(products).lower(
        bf16(b, 2, rows, 64), bf16(b, 2, 160, 64), bf16(b, 2, rows, 160)
      ).compile()


class SlotsTest(parameterized.TestCase):
  @parameterized.parameters('float32', 'bfloat16', 'int8')
  def test_what_is_written_is_read(self, dtype):
    new = normal(0, 2, 3, 2, 8)
    old = slots.empty((2, 3, 5, 8), dtype)
    # The second row's second entry does not fit.
    got = slots.read(
      slots.write(old, new, jnp.array([[1, 0], [4, 5]])), jnp.float32
    )
    want = np.zeros((2, 3, 5, 8))
    want[0, :, 1], want[0, :, 0], want[1, :, 4] = (
      new[0, :, 0],
      new[0, :, 1],
      new[1, :, 0],
    )
    np.testing.assert_allclose(got, want, atol=TOLERANCE[dtype])

  @parameterized.parameters('float32', 'int8')
  def test_a_move_changes_no_bit(self, dtype):
    old = make_slots(normal(0, 1, 2, 5, 8), dtype)
    new = slots.move(old, jnp.array([[3, 4]]), jnp.array([[1, 5]]))
    for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new)):
      np.testing.assert_array_equal(b[:, :, 1], a[:, :, 3])
      np.testing.assert_array_equal(b[:, :, 2:], a[:, :, 2:])


if __name__ == '__main__':
  absltest.main()

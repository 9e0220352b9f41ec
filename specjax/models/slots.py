"""One layer's keys or values: how they are stored, written and read.

Slots are an array [B, G, S, C], contiguous per head, in any float, or int8 with
a scale per slot and head. Writing rounds, reading widens; in between nobody
looks inside.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.models import quantize
from specjax.shapes import Array


class Int8Slots(NamedTuple):
  """Keys or values of int8, a quarter of what float32 takes.

  Attributes:
    int8_BGSC: int8 [B, G, S, C].
    scale_BGS: float32 [B, G, S]; 0 where nothing was written.
  """

  int8_BGSC: Array
  scale_BGS: Array


Slots = Array | Int8Slots


def empty(shape: tuple[int, int, int, int], dtype: Any) -> Slots:
  """Slots [B, G, S, C] that start at zero, because 0 x NaN is NaN."""
  if jnp.dtype(dtype) == jnp.int8:
    return Int8Slots(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:3]))
  return jnp.zeros(shape, dtype)


def num_slots(slots: Slots) -> int:
  """S."""
  return jax.tree.leaves(slots)[0].shape[2]


def write(slots: Slots, new_BGTC: Array, slot_BT: Array) -> Slots:
  """Writes new entries at each row's own slots; slots beyond S are dropped."""
  if isinstance(slots, Int8Slots):
    new = Int8Slots(*quantize.quantize(new_BGTC))
  else:
    new = new_BGTC.astype(slots.dtype)
  return jax.tree.map(lambda old, x: _write(old, x, slot_BT), slots, new)


def move(slots: Slots, source_BM: Array, target_BM: Array) -> Slots:
  """Copies entries from some slots of each row to others, bit for bit."""

  def move_one(x: Array) -> Array:
    index = source_BM.reshape(
      source_BM.shape[0], 1, source_BM.shape[1], *(1,) * (x.ndim - 3)
    )
    return _write(x, jnp.take_along_axis(x, index, axis=2), target_BM)

  return jax.tree.map(move_one, slots)


def _write(cache_BGS: Array, new_BGT: Array, slot_BT: Array) -> Array:
  if slot_BT.shape[1] == 1:
    # A scatter of one entry becomes a guarded slice update, which reads what it
    # overwrites and so copies the cache. A second one, dropped, prevents that.
    widths = [(0, int(axis == 2)) for axis in range(new_BGT.ndim)]
    new_BGT = jnp.pad(new_BGT, widths)
    slot_BT = jnp.pad(slot_BT, ((0, 0), (0, 1)), constant_values=2**31 - 1)

  def write_one(cache_S: Array, new_T: Array, slot_T: Array) -> Array:
    return cache_S.at[slot_T].set(new_T, mode='drop')

  # Row and head as batch axes of the scatter, not as indices: a cache that is
  # split over them is written where it lies.
  write_heads = jax.vmap(write_one, in_axes=(0, 0, None))
  return jax.vmap(write_heads)(cache_BGS, new_BGT, slot_BT)


def read(slots: Slots, dtype: Any) -> Array:
  """All entries as floats, [B, G, S, C]."""
  if isinstance(slots, Int8Slots):
    wide_BGSC = slots.int8_BGSC.astype(jnp.float32)
    return (wide_BGSC * slots.scale_BGS[..., None]).astype(dtype)
  return slots.astype(dtype)


def block(slots: Slots, start: Array, size: int) -> Slots:
  """`size` slots from `start` on, which must fit.

  Args:
    slots: [B, G, S, C].
    start: int32 []; beyond S - size it is moved back.
    size: static.
  """
  return jax.tree.map(
    lambda x: lax.dynamic_slice_in_dim(x, start, size, axis=2), slots
  )

"""Grouped-query attention of new tokens over caches.

  whole      scores of all slots at once: what accelerators do best
  by block   256 slots at a time, as many as the longest row fills: on a CPU the
             cost follows the text and not the buffer

Which of the two is a question of speed alone. Within one of them the sum for a
query runs over slots in one order, whatever the other rows are.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.models import slots as slots_lib
from specjax.models.layers import product
from specjax.models.slots import Slots
from specjax.shapes import Array

# What a masked score becomes: finite, so that a row that sees nothing (a
# dropped token beyond the last slot) stays finite too.
MASKED_SCORE = -1e30
BLOCK_SIZE = 256


class Memory(NamedTuple):
  """Keys and values of one cache, and who may see them.

  Attributes:
    k: [B, G, S, C].
    v: the same.
    visible_BTS: bool [B, T, S].
    num_used: int32 [], slots at or beyond it are visible to nobody.
  """

  k: Slots
  v: Slots
  visible_BTS: Array
  num_used: Array


def scores(q_BGMC: Array, k_BGSC: Array) -> Array:
  """Queries times keys, float32 [B, G, M, S]."""
  return product('bgmc,bgsc->bgms', q_BGMC, k_BGSC, num_rows=q_BGMC.shape[2])


def mixture(weight_BGMS: Array, v_BGSC: Array) -> Array:
  """Weights times values, float32 [B, G, M, C]."""
  return product(
    'bgms,bgsc->bgmc', weight_BGMS, v_BGSC, num_rows=weight_BGMS.shape[2]
  )


def attend(
  q_BTHC: Array,
  memories: Sequence[Memory],
  scale: float,
  *,
  by_block: bool = False,
) -> Array:
  """Attention of new tokens over caches, as if they were one.

  Query head h reads key-value head h // (H / G). Scores and softmax are
  float32; a slot that is not visible has weight exactly 0, so whatever finite
  value lies in it adds nothing. Scores are put side by side, never caches.

  Args:
    q_BTHC: [B, T, H, C].
    memories: one or more, each with slots S of its own.
    scale: multiplies the scores.
    by_block: on a CPU, go block by block; for arrays on one device.

  Returns:
    [B, T, H * C], the dtype of the queries.
  """
  b, t, h, c = q_BTHC.shape
  g = jax.tree.leaves(memories[0].k)[0].shape[1]
  # The queries that share a key-value head become the rows M of one product.
  q_BGRTC = q_BTHC.reshape(b, t, g, h // g, c).transpose(0, 2, 3, 1, 4)
  q_BGMC = q_BGRTC.reshape(b, g, h // g * t, c)
  whole = functools.partial(_attend_whole, scale=scale)
  if by_block:
    blocks = functools.partial(_attend_blocks, scale=scale)
    y_BGMC = lax.platform_dependent(
      q_BGMC, tuple(memories), cpu=blocks, default=whole
    )
  else:
    y_BGMC = whole(q_BGMC, memories)
  y_BGRTC = y_BGMC.reshape(b, g, h // g, t, c)
  y_BTHC = y_BGRTC.transpose(0, 3, 1, 2, 4).reshape(b, t, h * c)
  return y_BTHC.astype(q_BTHC.dtype)


def _masked_scores(
  q_BGMC: Array, k_BGSC: Array, visible_BTS: Array, scale: float
) -> Array:
  """float32 [B, G, M, S]; the T rows of each query head lie side by side."""
  score_BGMS = scores(q_BGMC, k_BGSC)
  b, g, m, s = score_BGMS.shape
  t = visible_BTS.shape[1]
  score_BGRTS = jnp.where(
    visible_BTS[:, None, None, :, :],
    score_BGMS.reshape(b, g, m // t, t, s) * scale,
    MASKED_SCORE,
  )
  return score_BGRTS.reshape(b, g, m, s)


def _attend_whole(
  q_BGMC: Array, memories: Sequence[Memory], *, scale: float
) -> Array:
  dtype = q_BGMC.dtype
  score_BGMS = jnp.concatenate(
    [
      _masked_scores(
        q_BGMC, slots_lib.read(memory.k, dtype), memory.visible_BTS, scale
      )
      for memory in memories
    ],
    axis=-1,
  )
  weight_BGMS = jax.nn.softmax(score_BGMS, axis=-1).astype(dtype)
  y_BGMC, start = 0.0, 0
  for memory in memories:
    end = start + slots_lib.num_slots(memory.k)
    y_BGMC += mixture(
      weight_BGMS[..., start:end], slots_lib.read(memory.v, dtype)
    )
    start = end
  return y_BGMC


class _Sums(NamedTuple):
  """A softmax on its way: the weights are exp(score - best)."""

  best_BGM1: Array
  weight_BGM1: Array
  y_BGMC: Array


def _attend_blocks(
  q_BGMC: Array, memories: Sequence[Memory], *, scale: float
) -> Array:
  """Everything in float32, which a CPU multiplies fastest.

  Source: Milakov & Gimelshein, Online normalizer calculation for softmax,
    arXiv:1805.02867, algorithm 3.
  """
  b, g, m = q_BGMC.shape[:3]
  num_new = memories[0].visible_BTS.shape[1]
  # XLA:CPU adds up the weights of one row in another order than those of more,
  # and so it does with fewer than 4 rows of many products, or 16 of one.
  num_rows = 16 if b * g == 1 else 4
  least = max(-(-num_rows * num_new // m), 2)
  if num_new < least:
    times = -(-least // num_new)
    repeat = lambda x_BTS: jnp.repeat(x_BTS, times, axis=1)
    memories = [x._replace(visible_BTS=repeat(x.visible_BTS)) for x in memories]
    q_BGMC = jnp.repeat(q_BGMC, times, axis=2)
    return _attend_blocks(q_BGMC, memories, scale=scale)[:, :, ::times]
  q_BGMC = q_BGMC.astype(jnp.float32)
  column = (*q_BGMC.shape[:3], 1)
  sums = _Sums(
    jnp.full(column, MASKED_SCORE), jnp.zeros(column), jnp.zeros_like(q_BGMC)
  )

  for memory in memories:
    sums = _add_memory(sums, q_BGMC, memory, scale)
  return sums.y_BGMC / sums.weight_BGM1


def _add_memory(
  sums: _Sums, q_BGMC: Array, memory: Memory, scale: float
) -> _Sums:
  size = slots_lib.num_slots(memory.k)
  if size < BLOCK_SIZE:
    # Over fewer slots XLA:CPU adds up few rows in another order than more.
    memory = _filled_up(memory)
  if size <= BLOCK_SIZE:
    return _add_block(
      sums, q_BGMC, memory.k, memory.v, memory.visible_BTS, scale
    )

  def add(i: Array, sums: _Sums) -> _Sums:
    # The last block may reach back into the one before it.
    first = i * BLOCK_SIZE
    start = jnp.minimum(first, size - BLOCK_SIZE)
    is_new_S = start + jnp.arange(BLOCK_SIZE) >= first
    visible_BTS = lax.dynamic_slice_in_dim(
      memory.visible_BTS, start, BLOCK_SIZE, axis=2
    )
    return _add_block(
      sums,
      q_BGMC,
      slots_lib.block(memory.k, start, BLOCK_SIZE),
      slots_lib.block(memory.v, start, BLOCK_SIZE),
      visible_BTS & is_new_S[None, None, :],
      scale,
    )

  num_blocks = (memory.num_used + BLOCK_SIZE - 1) // BLOCK_SIZE
  return lax.fori_loop(0, num_blocks, add, sums)


def _filled_up(memory: Memory) -> Memory:
  """The memory with a whole block of slots, the new ones visible to nobody."""
  missing = BLOCK_SIZE - slots_lib.num_slots(memory.k)

  def fill(x: Array) -> Array:
    widths = [(0, missing if axis == 2 else 0) for axis in range(x.ndim)]
    return jnp.pad(x, widths)

  k, v, visible_BTS = jax.tree.map(
    fill, (memory.k, memory.v, memory.visible_BTS)
  )
  return memory._replace(k=k, v=v, visible_BTS=visible_BTS)


def _add_block(
  sums: _Sums,
  q_BGMC: Array,
  k: Slots,
  v: Slots,
  visible_BTS: Array,
  scale: float,
) -> _Sums:
  k_BGSC, v_BGSC = (slots_lib.read(x, jnp.float32) for x in (k, v))
  score_BGMS = _masked_scores(q_BGMC, k_BGSC, visible_BTS, scale)
  best_BGM1 = jnp.maximum(
    sums.best_BGM1, jnp.max(score_BGMS, axis=-1, keepdims=True)
  )
  weight_BGMS = jnp.exp(score_BGMS - best_BGM1)
  fade_BGM1 = jnp.exp(sums.best_BGM1 - best_BGM1)
  total_BGM1 = jnp.sum(weight_BGMS, axis=-1, keepdims=True)
  return _Sums(
    best_BGM1,
    sums.weight_BGM1 * fade_BGM1 + total_BGM1,
    sums.y_BGMC * fade_BGM1 + mixture(weight_BGMS, v_BGSC),
  )

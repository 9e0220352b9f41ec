"""The operations of a transformer block: lookup, product, norm, attention."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.models import quantize
from specjax.shapes import Array

# What a masked score becomes: finite, so that a row that sees nothing (a
# dropped token beyond the last slot) stays finite too.
MASKED_SCORE = -1e30


def _gelu_tanh(x: Array) -> Array:
  return jax.nn.gelu(x, approximate=True)


ACTIVATIONS = {'silu': jax.nn.silu, 'gelu_pytorch_tanh': _gelu_tanh}


def _product(
  x: Array,
  weight: Array,
  dimension_numbers: lax.DotDimensionNumbers,
  *,
  num_rows: int,
  dtype: jnp.dtype = jnp.float32,
) -> Array:
  """`lax.dot_general`, summed in `dtype`; rows are the second-last axis.

  XLA:CPU has no fast kernel for products with one narrow row: two rows of
  bfloat16 take a tenth of the time of one, so there the row is repeated.
  """

  def product(x: Array, weight: Array) -> Array:
    return lax.dot_general(
      x, weight, dimension_numbers, preferred_element_type=dtype
    )

  def twice(x: Array, weight: Array) -> Array:
    y = product(jnp.concatenate([x, x], axis=-2), weight)
    return lax.slice_in_dim(y, 0, x.shape[-2], axis=-2)

  if num_rows > 1 or jnp.dtype(x.dtype).itemsize >= 4:
    return product(x, weight)
  return lax.platform_dependent(x, weight, cpu=twice, default=product)


def lookup(
  table_VD: Array | quantize.Int8Weight,
  tokens_BT: Array,
  dtype: jnp.dtype | str,
) -> Array:
  """Rows of an embedding, [B, T, D]; ids outside of it get the nearest row."""

  def rows(x: Array) -> Array:
    return jnp.take(x, tokens_BT, axis=0, mode='clip')

  if isinstance(table_VD, quantize.Int8Weight):
    row_BTD = rows(table_VD.int8_OI).astype(jnp.float32)
    return (row_BTD * rows(table_VD.scale_O)[:, :, None]).astype(dtype)
  return rows(table_VD).astype(dtype)


def dense(
  x_BTI: Array,
  weight_OI: Array | quantize.Int8Weight,
  bias_O: Array | None = None,
  *,
  dtype: jnp.dtype | str | None = None,
) -> Array:
  """`x @ weight.T + bias`, summed in float32.

  With an int8 weight every row of `x` is rounded to int8 by a scale of its
  own, the products are summed exactly, and both scales are applied in float32.

  Args:
    x_BTI: [B, T, I], the dtype of the weight; any float if that is int8.
    weight_OI: [O, I]; both last axes are contracted.
    bias_O: [O] or None.
    dtype: of the result; None is the dtype of `x_BTI`.

  Returns:
    [B, T, O].
  """
  b, t, _ = x_BTI.shape
  dimensions = (((2,), (1,)), ((), ()))
  if isinstance(weight_OI, quantize.Int8Weight):
    int8_BTI, scale_BT = quantize.quantize(x_BTI)
    sum_BTO = _product(
      int8_BTI, weight_OI.int8_OI, dimensions, num_rows=b * t, dtype=jnp.int32
    )
    # In this order nothing overflows that a float product would not.
    y_BTO = sum_BTO.astype(jnp.float32) * weight_OI.scale_O[None, None, :]
    y_BTO = y_BTO * scale_BT[:, :, None]
  else:
    y_BTO = _product(x_BTI, weight_OI, dimensions, num_rows=b * t)
  if bias_O is not None:
    y_BTO = y_BTO + bias_O.astype(jnp.float32)[None, None, :]
  return y_BTO.astype(dtype or x_BTI.dtype)


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
  """`scale * x / sqrt(mean(x**2) + eps)` over the last axis, in float32.

  Args:
    x: [..., D].
    scale: float32 [D], the whole multiplier.
    eps: added to the mean square.

  Returns:
    The shape and dtype of `x`.

  Source: Zhang & Sennrich, Root Mean Square Layer Normalization,
    arXiv:1910.07467.
  """
  wide = x.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
  return (wide * lax.rsqrt(mean_square + eps) * scale).astype(x.dtype)


def scores(q_BGMC: Array, k_BGSC: Array) -> Array:
  """Queries times keys, float32 [B, G, M, S]."""
  dimensions = (((3,), (3,)), ((0, 1), (0, 1)))
  return _product(q_BGMC, k_BGSC, dimensions, num_rows=q_BGMC.shape[2])


def mixture(weight_BGMS: Array, v_BGSC: Array) -> Array:
  """Weights times values, float32 [B, G, M, C]."""
  dimensions = (((3,), (2,)), ((0, 1), (0, 1)))
  return _product(
    weight_BGMS, v_BGSC, dimensions, num_rows=weight_BGMS.shape[2]
  )


class Memory(NamedTuple):
  """Keys and values of one cache, and who may see them.

  Attributes:
    k_BGSC: [B, G, S, C].
    v_BGSC: the same.
    visible_BTS: bool [B, T, S].
  """

  k_BGSC: Array
  v_BGSC: Array
  visible_BTS: Array


def attend(q_BTHC: Array, memories: Sequence[Memory], scale: float) -> Array:
  """Grouped-query attention of new tokens over caches, as if they were one.

  Query head h reads key-value head h // (H / G). Scores and softmax are
  float32; a slot that is not visible has weight exactly 0, so whatever finite
  value lies in it adds nothing. Scores are put side by side, never caches.

  Args:
    q_BTHC: [B, T, H, C], the dtype of the caches.
    memories: one or more, each with slots S of its own.
    scale: multiplies the scores.

  Returns:
    [B, T, H * C], the dtype of the queries.
  """
  b, t, h, c = q_BTHC.shape
  g = memories[0].k_BGSC.shape[1]
  r = h // g
  # The queries that share a key-value head become the rows M of one product.
  q_BGRTC = q_BTHC.reshape(b, t, g, r, c).transpose(0, 2, 3, 1, 4)
  q_BGMC = q_BGRTC.reshape(b, g, r * t, c)

  def masked_scores(memory: Memory) -> Array:
    score_BGMS = scores(q_BGMC, memory.k_BGSC)
    s = score_BGMS.shape[3]
    return jnp.where(
      memory.visible_BTS[:, None, None, :, :],
      score_BGMS.reshape(b, g, r, t, s) * scale,
      MASKED_SCORE,
    )

  score_BGRTS = jnp.concatenate([masked_scores(m) for m in memories], axis=-1)
  weight_BGRTS = jax.nn.softmax(score_BGRTS, axis=-1).astype(q_BTHC.dtype)
  y_BGMC, start = None, 0
  for memory in memories:
    s = memory.k_BGSC.shape[2]
    own_BGRTS = weight_BGRTS[..., start : start + s]
    part_BGMC = mixture(own_BGRTS.reshape(b, g, r * t, s), memory.v_BGSC)
    y_BGMC = part_BGMC if y_BGMC is None else y_BGMC + part_BGMC
    start += s
  y_BGRTC = y_BGMC.reshape(b, g, r, t, c)
  y_BTHC = y_BGRTC.transpose(0, 3, 1, 2, 4).reshape(b, t, h * c)
  return y_BTHC.astype(q_BTHC.dtype)

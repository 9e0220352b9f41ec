"""The operations of a transformer block: lookup, product, norm."""

import functools
import re

import jax
import jax.numpy as jnp
from jax import lax

from specjax.kernels import products as kernels
from specjax.models import quantize
from specjax.shapes import Array


def _gelu_tanh(x: Array) -> Array:
  return jax.nn.gelu(x, approximate=True)


ACTIVATIONS = {'silu': jax.nn.silu, 'gelu_pytorch_tanh': _gelu_tanh}


_KERNELS = {
  'int8': kernels.int8_product,
  'bfloat16': kernels.bfloat16_product,
}


def product(
  subscripts: str,
  x: Array,
  weight: Array,
  *,
  num_rows: int,
  dtype: jnp.dtype = jnp.float32,
) -> Array:
  """`jnp.einsum`, summed in `dtype`; rows are the second-last axis.

  XLA:CPU has no fast kernel for products with one narrow row: two rows of
  bfloat16 take a tenth of the time of one, so there the row is repeated.

  Gradients of narrow floats are narrow: what comes back is rounded to the dtype
  of `x` and `weight` before it is multiplied by them, and summed in `dtype`.
  Left as wide as the sums, it would widen these factors, and the two products
  of a backward pass would take the time of float32. Narrow products have
  derivatives in reverse mode only.

  Args:
    subscripts: every index is in two of the three arrays, at least.
    x: [..., M, I], as `subscripts` want it.
    weight: [..., O, I], likewise; the dtype of `x`.
    num_rows: M, over all that is multiplied by one weight.
    dtype: of the sums and of the result.

  Returns:
    [..., M, O].
  """
  if jnp.dtype(x.dtype).itemsize >= 4:
    return _sum(subscripts, dtype, x, weight)
  return _narrow_product(subscripts, num_rows, dtype, x, weight)


def _sum(subscripts: str, dtype: jnp.dtype, x: Array, weight: Array) -> Array:
  return jnp.einsum(subscripts, x, weight, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _narrow_product(
  subscripts: str, num_rows: int, dtype: jnp.dtype, x: Array, weight: Array
) -> Array:
  once = functools.partial(_sum, subscripts, dtype)

  def twice(x: Array, weight: Array) -> Array:
    y = once(jnp.concatenate([x, x], axis=-2), weight)
    return lax.slice_in_dim(y, 0, x.shape[-2], axis=-2)

  if num_rows > 1:
    return once(x, weight)
  return lax.platform_dependent(x, weight, cpu=twice, default=once)


def _narrow_product_fwd(subscripts, num_rows, dtype, x, weight):
  y = _narrow_product(subscripts, num_rows, dtype, x, weight)
  return y, (x, weight)


def _narrow_product_bwd(subscripts, num_rows, dtype, factors, grad):
  del num_rows
  x, weight = factors
  of_x, of_weight, of_y = re.split(',|->', subscripts)
  grad = grad.astype(x.dtype)
  return (
    _sum(f'{of_y},{of_weight}->{of_x}', dtype, grad, weight).astype(x.dtype),
    _sum(f'{of_y},{of_x}->{of_weight}', dtype, grad, x).astype(weight.dtype),
  )


_narrow_product.defvjp(_narrow_product_fwd, _narrow_product_bwd)


def lookup(
  table_VD: Array | quantize.Int8Weight,
  tokens_BT: Array,
  dtype: jnp.dtype | str,
  *,
  is_local: bool = False,
) -> Array:
  """Rows of an embedding, [B, T, D]; ids outside of it get the nearest row.

  `is_local` says that the table lies on one device.
  """
  if isinstance(table_VD, quantize.Int8Weight):
    row_BTD = _rows(table_VD.int8_OI, tokens_BT).astype(jnp.float32)
    scale_BT1 = _rows(table_VD.scale_O, tokens_BT)[:, :, None]
    return (row_BTD * scale_BT1).astype(dtype)
  if is_local and table_VD.dtype == jnp.bfloat16:
    return _bfloat16_rows(table_VD, tokens_BT).astype(dtype)
  return _rows(table_VD, tokens_BT).astype(dtype)


def _rows(table: Array, tokens_BT: Array) -> Array:
  return jnp.take(table, tokens_BT, axis=0, mode='clip')


@jax.custom_jvp
def _bfloat16_rows(table_VD: Array, tokens_BT: Array) -> Array:
  """`_rows` of the table's bits: for numbers XLA:CPU would widen all of it.

  The barrier ties the bits to the tokens. Without it they are taken out of the
  loop that decodes, and so are a second table.
  """
  table_VD, tokens_BT = lax.optimization_barrier((table_VD, tokens_BT))
  bits_BTD = _rows(lax.bitcast_convert_type(table_VD, jnp.uint16), tokens_BT)
  return lax.bitcast_convert_type(bits_BTD, jnp.bfloat16)


@_bfloat16_rows.defjvp
def _bfloat16_rows_jvp(primals, tangents):
  table_VD, tokens_BT = primals
  return _bfloat16_rows(table_VD, tokens_BT), _rows(tangents[0], tokens_BT)


def dense(
  x_BTI: Array,
  weight_OI: Array | quantize.Int8Weight,
  bias_O: Array | None = None,
  *,
  dtype: jnp.dtype | str | None = None,
  is_local: bool = False,
) -> Array:
  """`x @ weight.T + bias`, summed in float32.

  With an int8 weight every row of `x` is rounded to int8 by a scale of its
  own, the products are summed exactly, and both scales are applied in float32.

  Args:
    x_BTI: [B, T, I], the dtype of the weight; any float if that is int8.
    weight_OI: [O, I]; both last axes are contracted.
    bias_O: [O] or None.
    dtype: of the result; None is the dtype of `x_BTI`.
    is_local: nothing is split over devices, and so narrow products may run in
      `specjax.kernels`, which compilers cannot split.

  Returns:
    [B, T, O].
  """
  if isinstance(weight_OI, quantize.Int8Weight):
    int8_BTI, scale_BT = quantize.quantize(x_BTI)
    sum_BTO = _matrix_product(int8_BTI, weight_OI.int8_OI, is_local)
    # In this order nothing overflows that a float product would not.
    y_BTO = sum_BTO.astype(jnp.float32) * weight_OI.scale_O[None, None, :]
    y_BTO = y_BTO * scale_BT[:, :, None]
  else:
    y_BTO = _matrix_product(x_BTI, weight_OI, is_local)
  if bias_O is not None:
    y_BTO = y_BTO + bias_O.astype(jnp.float32)[None, None, :]
  return y_BTO.astype(dtype or x_BTI.dtype)


def _matrix_product(x_BTI: Array, weight_OI: Array, is_local: bool) -> Array:
  """Both last axes contracted: int32 of int8, else float32."""
  b, t, i = x_BTI.shape
  kernel = _KERNELS.get(jnp.promote_types(x_BTI.dtype, weight_OI.dtype).name)
  if kernel is not None and is_local and kernels.is_available():
    y_MO = kernel(x_BTI.reshape(b * t, i), weight_OI)
    return y_MO.reshape(b, t, -1)
  is_int8 = weight_OI.dtype == jnp.int8
  return product(
    'bti,oi->bto',
    x_BTI,
    weight_OI,
    num_rows=b * t,
    dtype=jnp.int32 if is_int8 else jnp.float32,
  )


def rms_norm(
  x: Array, scale: Array, eps: float, *, is_local: bool = False
) -> Array:
  """`scale * x / sqrt(mean(x**2) + eps)` over the last axis, in float32.

  Args:
    x: [B, T, ..., D].
    scale: float32 [D], the whole multiplier.
    eps: added to the mean square.
    is_local: nothing is split over devices: on a CPU the sum of a row then has
      the same bits whatever T is.

  Returns:
    The shape and dtype of `x`.

  Source: Zhang & Sennrich, Root Mean Square Layer Normalization,
    arXiv:1910.07467.
  """
  wide = x.astype(jnp.float32)
  mean = _mean_by_eights if is_local else _mean
  mean_square = mean(jnp.square(wide))
  scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
  return (wide * lax.rsqrt(mean_square + eps) * scale).astype(x.dtype)


def _mean(x: Array) -> Array:
  return jnp.mean(x, axis=-1, keepdims=True)


def _mean_by_eights(x_BT: Array) -> Array:
  """XLA:CPU sums few rows in another order than eight: so there are eight."""
  num_rows = x_BT.shape[1]

  def padded(x_BT: Array) -> Array:
    widths = [(0, 0)] * x_BT.ndim
    widths[1] = (0, -num_rows % 8)
    return _mean(jnp.pad(x_BT, widths))[:, :num_rows]

  return lax.platform_dependent(x_BT, cpu=padded, default=_mean)

"""Block formats of GGUF files: packed bytes to floats, on device.

A quantised row is a string of equal blocks, each some packed integers with
their own scales. Every format is one function `uint8 [blocks, block_bytes] ->
(float32 [blocks, block_size], scales)`; `dequantize` runs it over a tensor in
bounded chunks, so that beside the result only one chunk is alive. The layouts
are those of ggml's `ggml-common.h`.
"""

import functools
import math
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.shapes import Array

# Values per chunk. The largest is 16 MiB of float32, a few milliseconds.
_CHUNK_SIZES = (1 << 22, 1 << 19, 1 << 16)


def _half(bytes_X2: Array) -> Array:
  """Little-endian float16 pairs of bytes, as float32 [X, 1]."""
  half_X = jax.lax.bitcast_convert_type(bytes_X2, jnp.float16)
  return half_X.astype(jnp.float32)[:, None]


def _nibbles(packed: Array) -> Array:
  """uint8 [..., n] -> [..., 2n]: all low nibbles, then all high ones."""
  # A shift by [0, 4] fuses into one loop, a concatenation does not.
  shift = jnp.array([0, 4], jnp.uint8).reshape(
    (1,) * (packed.ndim - 1) + (2, 1)
  )
  return ((packed[..., None, :] >> shift) & 15).reshape(*packed.shape[:-1], -1)


def _fifth_bits(packed_X4: Array) -> Array:
  """Bit i of a little-endian 32-bit word, in the place of bit 4, [X, 32]."""
  shift_8 = jnp.arange(8, dtype=jnp.uint8)[None, None]
  bits_X48 = (packed_X4[:, :, None] >> shift_8) & 1
  return bits_X48.reshape(-1, 32) << 4


def _signed(quants: Array) -> Array:
  return quants.astype(jnp.int8).astype(jnp.float32)


def _q4_0(blocks: Array) -> tuple[Array, Array]:
  scale = _half(blocks[:, :2])
  return scale * (_signed(_nibbles(blocks[:, 2:])) - 8), scale


def _q4_1(blocks: Array) -> tuple[Array, Array]:
  scale, least = _half(blocks[:, :2]), _half(blocks[:, 2:4])
  return scale * _signed(_nibbles(blocks[:, 4:])) + least, scale + least


def _q5_0(blocks: Array) -> tuple[Array, Array]:
  scale = _half(blocks[:, :2])
  quants = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
  return scale * (_signed(quants) - 16), scale


def _q5_1(blocks: Array) -> tuple[Array, Array]:
  scale, least = _half(blocks[:, :2]), _half(blocks[:, 2:4])
  quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
  return scale * _signed(quants) + least, scale + least


def _q8_0(blocks: Array) -> tuple[Array, Array]:
  scale = _half(blocks[:, :2])
  return scale * _signed(blocks[:, 2:]), scale


def _sub_scales(packed_X12: Array) -> tuple[Array, Array]:
  """Eight 6-bit scales and eight 6-bit minima from 12 bytes, each [X, 8].

  bytes 0..3    scales 0..3, and in their top two bits those of scales 4..7
  bytes 4..7    minima 0..3, and in their top two bits those of minima 4..7
  bytes 8..11   low nibbles of scales 4..7, then low nibbles of minima 4..7
  """
  a, b, c = packed_X12[:, :4], packed_X12[:, 4:8], packed_X12[:, 8:]
  scale_X8 = jnp.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=1)
  least_X8 = jnp.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=1)
  return scale_X8, least_X8


def _k_block(blocks: Array, quants_X_8_32: Array) -> tuple[Array, Array]:
  """Q4_K and Q5_K: eight sub-blocks of 32 with their own scale and minimum."""
  scale, least = _half(blocks[:, :2]), _half(blocks[:, 2:4])
  scale_X8, least_X8 = _sub_scales(blocks[:, 4:16])
  scale_X8 = scale * _signed(scale_X8)
  least_X8 = least * _signed(least_X8)
  values = scale_X8[:, :, None] * _signed(quants_X_8_32) - least_X8[:, :, None]
  return values.reshape(-1, 256), scale + least


def _q4_k(blocks: Array) -> tuple[Array, Array]:
  # 32 bytes hold two sub-blocks: the low nibbles, then the high ones.
  quants = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
  return _k_block(blocks, quants)


def _q5_k(blocks: Array) -> tuple[Array, Array]:
  # Bit s of byte i is the fifth bit of value i of sub-block s.
  shift_181 = jnp.arange(8, dtype=jnp.uint8)[None, :, None]
  fifth = ((blocks[:, 16:48][:, None] >> shift_181) & 1) << 4
  quants = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
  return _k_block(blocks, quants | fifth)


def _q6_k(blocks: Array) -> tuple[Array, Array]:
  # Per half of 128 values: 64 bytes of low nibbles, 32 bytes of top bit pairs.
  low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
  shift_4 = (2 * jnp.arange(4, dtype=jnp.uint8))[None, None, :, None]
  high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shift_4) & 3
  quants = _signed((low | (high << 4)).reshape(-1, 16, 16)) - 32
  scale = _half(blocks[:, 208:])
  sub_X16 = jax.lax.bitcast_convert_type(blocks[:, 192:208], jnp.int8)
  sub_X16 = scale * sub_X16.astype(jnp.float32)
  return (sub_X16[:, :, None] * quants).reshape(-1, 256), scale


class BlockFormat(NamedTuple):
  """One way of storing a tensor.

  Attributes:
    ggml_type: its number in the file.
    block_size: values per block.
    block_bytes: bytes per block.
    unpack: uint8 [X, block_bytes] to (float32 [X, block_size], the scales or
      a sum that is finite if they are); None for plain floats.
    dtype: the dtype of plain floats, None for packed blocks.
  """

  ggml_type: int
  block_size: int
  block_bytes: int
  unpack: Callable[[Array], tuple[Array, Array]] | None = None
  dtype: Any = None


FORMATS = {
  'F32': BlockFormat(0, 1, 4, dtype=np.float32),
  'F16': BlockFormat(1, 1, 2, dtype=np.float16),
  'Q4_0': BlockFormat(2, 32, 18, _q4_0),
  'Q4_1': BlockFormat(3, 32, 20, _q4_1),
  'Q5_0': BlockFormat(6, 32, 22, _q5_0),
  'Q5_1': BlockFormat(7, 32, 24, _q5_1),
  'Q8_0': BlockFormat(8, 32, 34, _q8_0),
  'Q4_K': BlockFormat(12, 256, 144, _q4_k),
  'Q5_K': BlockFormat(13, 256, 176, _q5_k),
  'Q6_K': BlockFormat(14, 256, 210, _q6_k),
  'BF16': BlockFormat(30, 1, 2, dtype=jnp.bfloat16),
}


@functools.partial(jax.jit, static_argnames=('format_name', 'dtype'))
def _unpack(blocks, *, format_name, dtype):
  """Values of one chunk of blocks, and whether its scales are finite."""
  unpack = FORMATS[format_name].unpack
  values, scales = unpack(blocks) if unpack else (blocks, blocks)
  return values.astype(dtype).reshape(-1), jnp.all(jnp.isfinite(scales))


def dequantize(
  packed: np.ndarray,
  format_name: str,
  shape: tuple[int, ...],
  dtype: Any = np.float32,
) -> tuple[np.ndarray, bool]:
  """A whole tensor from its bytes.

  The work is done in chunks of three sizes, so a format compiles three times
  at most, whatever the tensors' shapes; the last chunk is padded. The result
  is on the host: where it goes, whole or in shards, is the caller's choice.

  Args:
    packed: uint8 [num_bytes], the tensor's bytes, row after row.
    format_name: a key of `FORMATS`.
    shape: the tensor's shape; the last axis is the one that is blocked.
    dtype: of the result.

  Returns:
    The tensor, and whether all scales (all values of a plain format) are
    finite.

  Raises:
    ValueError: if the number of bytes does not fit the shape.

  >>> packed = np.array([0, 60, 1, 255] + [0] * 30, np.uint8)  # scale 1.0
  >>> values, is_finite = dequantize(packed, 'Q8_0', (32,))
  >>> values[:3].tolist(), is_finite
  ([1.0, -1.0, 0.0], True)
  """
  form = FORMATS[format_name]
  num_values = math.prod(shape)
  num_bytes = num_values // form.block_size * form.block_bytes
  if packed.size != num_bytes or shape[-1] % form.block_size:
    raise ValueError(
      f'{format_name} of shape {shape} must have {num_bytes} bytes in blocks '
      f'of {form.block_size} values, got {packed.size}.'
    )
  if form.unpack is None:
    blocks = packed.view(form.dtype)
  else:
    blocks = packed.reshape(-1, form.block_bytes)
  out = np.empty(num_values, dtype)
  start, is_finite = 0, True
  while start < len(blocks):
    left = len(blocks) - start
    size = next(
      (n for n in _CHUNK_SIZES if n <= left * form.block_size),
      _CHUNK_SIZES[-1],
    )
    size //= form.block_size
    chunk = blocks[start : start + size]
    if left < size:
      padding = np.zeros((size - left, *blocks.shape[1:]), blocks.dtype)
      chunk = np.concatenate([chunk, padding])
    values, chunk_is_finite = _unpack(
      chunk, format_name=format_name, dtype=np.dtype(dtype)
    )
    first, last = (
      i * form.block_size for i in (start, start + min(size, left))
    )
    out[first:last] = np.asarray(values)[: last - first]
    is_finite = is_finite and bool(chunk_is_finite)
    start += size
  return out.reshape(shape), is_finite

"""Block formats of GGUF files: packed bytes to floats, on the host.

A quantised row is a string of equal blocks, each some packed integers with
their own scales. Every format is one function `uint8 [blocks, block_bytes] ->
(float32 [blocks, block_size], scales)`. The layouts are those of ggml's
`ggml-common.h`.

NumPy, and a few rows at a time: what one step leaves is still in the processor
cache when the next step reads it, nothing is compiled, and threads can unpack
rows side by side. No product of a scale and an integer here needs more than
the 24 bits of a float32, so no result depends on how it is computed.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


def _half(bytes_X2: np.ndarray) -> np.ndarray:
  """Little-endian float16 pairs of bytes, as float32 [X, 1]."""
  return bytes_X2.copy().view('<f2').astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
  """uint8 [..., n] -> [..., 2n]: all low nibbles, then all high ones."""
  *outer, n = packed.shape
  nibbles = np.empty((*outer, 2, n), np.uint8)
  np.bitwise_and(packed, 15, out=nibbles[..., 0, :])
  np.right_shift(packed, 4, out=nibbles[..., 1, :])
  return nibbles.reshape(*outer, 2 * n)


def _fifth_bits(packed_X4: np.ndarray) -> np.ndarray:
  """Bit i of a little-endian 32-bit word, in the place of bit 4, [X, 32]."""
  return np.unpackbits(packed_X4, axis=1, bitorder='little') << 4


def _q4_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  scale = _half(blocks[:, :2])
  values = _nibbles(blocks[:, 2:]).astype(np.float32)
  values -= 8
  values *= scale
  return values, scale


def _q4_1(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  scale, least = _half(blocks[:, :2]), _half(blocks[:, 2:4])
  values = _nibbles(blocks[:, 4:]).astype(np.float32)
  values *= scale
  values += least
  return values, scale + least


def _q5_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  scale = _half(blocks[:, :2])
  quants = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
  values = quants.astype(np.float32)
  values -= 16
  values *= scale
  return values, scale


def _q5_1(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  scale, least = _half(blocks[:, :2]), _half(blocks[:, 2:4])
  quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
  values = quants.astype(np.float32)
  values *= scale
  values += least
  return values, scale + least


def _q8_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  scale = _half(blocks[:, :2])
  values = blocks[:, 2:].view(np.int8).astype(np.float32)
  values *= scale
  return values, scale


def _sub_scales(packed_X12: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Eight 6-bit scales and eight 6-bit minima from 12 bytes, each [X, 8].

  bytes 0..3    scales 0..3, and in their top two bits those of scales 4..7
  bytes 4..7    minima 0..3, and in their top two bits those of minima 4..7
  bytes 8..11   low nibbles of scales 4..7, then low nibbles of minima 4..7
  """
  a, b, c = packed_X12[:, :4], packed_X12[:, 4:8], packed_X12[:, 8:]
  scale_X8 = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=1)
  least_X8 = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=1)
  return scale_X8, least_X8


def _k_block(
  blocks: np.ndarray, quants_X_8_32: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Q4_K and Q5_K: eight sub-blocks of 32 with their own scale and minimum."""
  scale, least = _half(blocks[:, :2]), _half(blocks[:, 2:4])
  scale_X8, least_X8 = _sub_scales(blocks[:, 4:16])
  values = quants_X_8_32.astype(np.float32)
  values *= (scale * scale_X8)[:, :, None]
  values -= (least * least_X8)[:, :, None]
  return values.reshape(-1, 256), scale + least


def _q4_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  # 32 bytes hold two sub-blocks: the low nibbles, then the high ones.
  quants = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
  return _k_block(blocks, quants)


def _q5_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  # Bit s of byte i is the fifth bit of value i of sub-block s.
  shift_181 = np.arange(8, dtype=np.uint8)[None, :, None]
  fifth = ((blocks[:, 16:48][:, None] >> shift_181) & 1) << 4
  quants = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
  return _k_block(blocks, quants | fifth)


def _q6_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  # Per half of 128 values: 64 bytes of low nibbles, 32 bytes of top bit pairs.
  quants = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
  shift_4 = (2 * np.arange(4, dtype=np.uint8))[None, None, :, None]
  high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shift_4
  high &= 3
  high <<= 4
  quants |= high
  values = quants.reshape(-1, 16, 16).astype(np.float32)
  values -= 32
  scale = _half(blocks[:, 208:])
  sub_X16 = blocks[:, 192:208].view(np.int8)
  values *= (scale * sub_X16)[:, :, None]
  return values.reshape(-1, 256), scale


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
  unpack: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None
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


def dequantize(
  packed: np.ndarray, format_name: str, shape: tuple[int, ...]
) -> tuple[np.ndarray, bool]:
  """A tensor, or some rows of one, from its bytes.

  Args:
    packed: uint8 [num_bytes], row after row.
    format_name: a key of `FORMATS`.
    shape: of the result; the last axis is the one that is blocked.

  Returns:
    float32 values in memory of their own, and whether all scales (all values
    of a plain format) are finite: if not, the values mean nothing.

  Raises:
    ValueError: if the number of bytes does not fit the shape.

  >>> packed = np.array([0, 60, 1, 255] + [0] * 30, np.uint8)  # scale 1.0
  >>> values, is_finite = dequantize(packed, 'Q8_0', (32,))
  >>> values[:3].tolist(), is_finite
  ([1.0, -1.0, 0.0], True)
  """
  form = FORMATS[format_name]
  num_bytes = math.prod(shape) // form.block_size * form.block_bytes
  if packed.size != num_bytes or shape[-1] % form.block_size:
    raise ValueError(
      f'{format_name} of shape {shape} must have {num_bytes} bytes in blocks '
      f'of {form.block_size} values, got {packed.size}.'
    )
  if form.unpack is None:
    values = scales = packed.view(form.dtype).astype(np.float32)
  else:
    # Scales that are not finite are reported, not warned of.
    with np.errstate(invalid='ignore', over='ignore'):
      values, scales = form.unpack(packed.reshape(-1, form.block_bytes))
  return values.reshape(shape), bool(np.all(np.isfinite(scales)))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PackedTensor:
  """A tensor whose rows are unpacked when they are asked for.

  `tensor[start:stop]` are rows and `np.asarray(tensor)` is all of it, float32.

  Attributes:
    name: for the error.
    packed: uint8 [num_bytes], usually of a mapped file.
    format_name: a key of `FORMATS`.
    shape: of the tensor; the last axis is the one that is blocked.
    order: which row of the file each row is; None where the file's order is
      the right one.
  """

  name: str
  packed: np.ndarray
  format_name: str
  shape: tuple[int, ...]
  order: np.ndarray | None = None
  dtype = np.dtype(np.float32)

  def __getitem__(self, rows: slice) -> np.ndarray:
    """Rows `start:stop`; raises ValueError if one of them is not finite."""
    # Rows are packed one by one, so whole rows move still packed.
    packed = self.packed.reshape(self.shape[0], -1)
    packed = packed[rows] if self.order is None else packed[self.order[rows]]
    return self._unpack(packed.reshape(-1), (len(packed), *self.shape[1:]))

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    if self.order is not None:
      return self[:]
    return self._unpack(self.packed, self.shape)

  def _unpack(self, packed: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    values, is_finite = dequantize(packed, self.format_name, shape)
    if not is_finite:
      raise ValueError(f'{self.name} has a scale that is NaN or infinite.')
    return values

"""From a file's tensor to a parameter, on the host and on every core.

A tensor goes through in pieces of a few rows: read, checked, converted, and
written to its place in the result while still in the processor's cache. No
float copy of a whole tensor is ever made, and nothing is compiled.
"""

import concurrent.futures
import os
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from specjax.models import quantize

# Of one piece, in float32 a megabyte.
_PIECE_VALUES = 1 << 18
_MAX_THREADS = 8
# The alignment at which JAX takes an array on the CPU as it lies.
_ALIGNMENT = 64


class Tensor(Protocol):
  """What a file holds: `np.asarray` gives all of it, a slice some rows."""

  shape: tuple[int, ...]

  def __getitem__(self, rows: slice) -> Any: ...

  def __array__(self, dtype=None, copy=None) -> np.ndarray: ...


def thread_pool() -> concurrent.futures.ThreadPoolExecutor:
  """As many threads as there are cores; NumPy works outside Python's lock."""
  num_cores = len(os.sched_getaffinity(0))
  return concurrent.futures.ThreadPoolExecutor(min(num_cores, _MAX_THREADS))


def to_float(tensor: Tensor, dtype: str, add_one: bool) -> np.ndarray | None:
  """All values in `dtype`, one added if asked; None if one is not finite."""
  values = np.asarray(tensor).astype(np.float32)
  if add_one:
    values += 1
  out = empty(values.shape, dtype)
  return out if _fill(out, values) else None


def to_matrix(
  tensor: Tensor,
  dtype: str,
  pool: concurrent.futures.Executor,
) -> np.ndarray | None:
  """The matrix in `dtype`; None if a value is not finite."""
  out = empty(tensor.shape, dtype)

  def fill(rows: slice) -> bool:
    return _fill(out[rows], np.asarray(tensor[rows], np.float32))

  return out if all(pool.map(fill, _pieces(tensor))) else None


def to_int8(
  tensor: Tensor, pool: concurrent.futures.Executor
) -> quantize.Int8Weight | None:
  """The matrix as `quantize.quantize_weight` rounds it, bit for bit.

  Args:
    tensor: [O, I].
    pool: converts pieces side by side.

  Returns:
    NumPy arrays; None if a value is not finite.
  """
  int8_OI = empty(tensor.shape, np.int8)
  scale_O = empty(tensor.shape[:1], np.float32)

  def fill(rows: slice) -> bool:
    values = np.asarray(tensor[rows], np.float32)
    return quantize.quantize_rows(values, int8_OI[rows], scale_O[rows])

  is_finite = all(pool.map(fill, _pieces(tensor)))
  return quantize.Int8Weight(int8_OI, scale_O) if is_finite else None


def _pieces(tensor: Tensor) -> list[slice]:
  num_rows, width = tensor.shape
  step = max(_PIECE_VALUES // max(width, 1), 1)
  return [slice(row, row + step) for row in range(0, num_rows, step)]


def _fill(out: np.ndarray, values: np.ndarray) -> bool:
  """Writes float32 values in the dtype of `out`; whether all are finite."""
  if not values.size:
    return True
  # Rounding is monotonic: if the extremes stay finite, everything does.
  extremes = np.array([values.min(), values.max()])
  with np.errstate(over='ignore', invalid='ignore'):
    if not np.all(np.isfinite(extremes.astype(out.dtype))):
      return False
  out[...] = values
  return True


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
  """Memory that JAX on the CPU uses as it is, without a copy."""
  dtype = jnp.dtype(dtype)  # Knows bfloat16.
  num_bytes = int(np.prod(shape)) * dtype.itemsize
  memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT
  return memory[start : start + num_bytes].view(dtype).reshape(shape)

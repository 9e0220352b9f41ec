"""Reads GGUF files: metadata, configuration and tensors, one at a time.

Everything a header claims is checked against the size of the file before
memory is taken for it. Tensors get their Hugging Face names and layout; they
stay packed in the mapped file until they are read.

Source: the GGUF specification, github.com/ggml-org/ggml/blob/master/docs/
gguf.md. An own parser because the `gguf` package takes ten seconds for the
150,000 tokens of a vocabulary and trusts the sizes it reads.
"""

import math
import mmap
import os
import re
import struct
from typing import Any, NamedTuple

import numpy as np

from specjax import gguf_tokenizer
from specjax.models.checkpoints import base, dequantize, gguf_config

_VERSIONS = (2, 3)
_MAX_AXES = 4
# Metadata value types: the number in the file to the little-endian dtype.
_SCALARS = {
  0: '<u1',
  1: '<i1',
  2: '<u2',
  3: '<i2',
  4: '<u4',
  5: '<i4',
  6: '<f4',
  7: '?',
  10: '<u8',
  11: '<i8',
  12: '<f8',
}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct('<Q')
# The least bytes that an entry can take; they bound what a count may claim.
_LEAST_ENTRY = 8 + 4 + 1
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8
# Types that ggml has and this reader does not, to refuse them by name.
_OTHER_TYPES = {
  9: 'Q8_1',
  10: 'Q2_K',
  11: 'Q3_K',
  15: 'Q8_K',
  16: 'IQ2_XXS',
  17: 'IQ2_XS',
  18: 'IQ3_XXS',
  19: 'IQ1_S',
  20: 'IQ4_NL',
  21: 'IQ3_S',
  22: 'IQ2_S',
  23: 'IQ4_XS',
  24: 'I8',
  25: 'I16',
  26: 'I32',
  27: 'I64',
  28: 'F64',
  29: 'IQ1_M',
  34: 'TQ1_0',
  35: 'TQ2_0',
  39: 'MXFP4',
  40: 'NVFP4',
  41: 'Q1_0',
}
_FORMAT_NAMES = {
  form.ggml_type: name for name, form in dequantize.FORMATS.items()
}


class TensorInfo(NamedTuple):
  """Where a tensor lies. `shape` is [out, in]: the file's axes reversed."""

  format_name: str
  shape: tuple[int, ...]
  start: int
  num_bytes: int


class _Cursor:
  """Reads a mapped header front to back and never past its end."""

  def __init__(self, data: mmap.mmap, path: str):
    self.data = data
    self.path = path
    self.at = 0

  def take(self, num_bytes: int, what: str) -> int:
    """Moves past `num_bytes` and returns where they start."""
    start = self.at
    if num_bytes > len(self.data) - start:
      raise ValueError(
        f'{self.path}: {what} at byte {start} needs {num_bytes} bytes, but '
        f'the file ends after {len(self.data)}.'
      )
    self.at += num_bytes
    return start

  def number(self, code: str, what: str) -> Any:
    start = self.take(struct.calcsize(code), what)
    return struct.unpack_from(code, self.data, start)[0]

  def count(self, least_bytes: int, what: str) -> int:
    """A uint64 count of things that take `least_bytes` each in what follows."""
    count = self.number('<Q', what)
    left = len(self.data) - self.at
    if count * least_bytes > left:
      raise ValueError(
        f'{self.path}: {what} is {count}, which needs {count * least_bytes} '
        f'bytes, but only {left} are left in the file.'
      )
    return count

  def string(self, what: str) -> str:
    length = self.count(1, f'length of {what}')
    start = self.take(length, what)
    try:
      return self.data[start : start + length].decode('utf-8')
    except UnicodeDecodeError:
      raise ValueError(
        f'{self.path}: {what} at byte {start} is not UTF-8.'
      ) from None

  def strings(self, count: int, what: str) -> list[str]:
    """`string`, `count` times, without a call for each of 300,000."""
    data, size, length_at = self.data, len(self.data), _LENGTH.unpack_from
    strings, at = [], self.at
    while len(strings) < count:
      start = at + 8
      # Only where both lie in the file; `string` says what is wrong.
      stop = start + length_at(data, at)[0] if start <= size else size + 1
      if stop > size:
        break
      try:
        strings.append(data[start:stop].decode('utf-8'))
      except UnicodeDecodeError:
        break
      at = stop
    self.at = at
    if len(strings) < count:
      self.string(what)
    return strings

  def value(self, what: str) -> Any:
    kind = self.number('<I', f'type of {what}')
    if kind == _STRING:
      return self.string(what)
    if kind == _ARRAY:
      return self.array(what)
    dtype = self.dtype(kind, what)
    start = self.take(dtype.itemsize, what)
    scalar = np.frombuffer(self.data, dtype, 1, start)[0]
    # The shortest decimal that is the same float32: 1e-06, not 9.99999997e-07.
    return float(str(scalar)) if dtype == np.float32 else scalar.item()

  def dtype(self, kind: int, what: str) -> np.dtype:
    if kind not in _SCALARS:
      raise ValueError(
        f'{self.path}: {what} has value type {kind}; allowed are 0 to 12.'
      )
    return np.dtype(_SCALARS[kind])

  def array(self, what: str) -> list[str] | np.ndarray:
    kind = self.number('<I', f'element type of {what}')
    if kind == _STRING:
      return self.strings(self.count(8, f'length of {what}'), what)
    if kind == _ARRAY:
      raise ValueError(f'{self.path}: {what} is an array of arrays.')
    dtype = self.dtype(kind, what)
    count = self.count(dtype.itemsize, f'length of {what}')
    start = self.take(count * dtype.itemsize, what)
    # A copy, so that metadata does not keep the file mapped.
    return np.frombuffer(self.data, dtype, count, start).copy()


def _map(path: str | os.PathLike) -> mmap.mmap:
  try:
    with open(path, 'rb') as file:
      if not os.fstat(file.fileno()).st_size:
        raise ValueError(f'{path} is empty, not a GGUF file.')
      return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
  except OSError as error:
    raise ValueError(f'{path} cannot be read: {error.strerror}.') from None


def _read_metadata(cursor: _Cursor) -> tuple[dict[str, Any], int]:
  """The key-value part, and the number of tensors that follow it."""
  path = cursor.path
  magic = cursor.data[: min(4, len(cursor.data))]
  if magic != b'GGUF':
    raise ValueError(
      f"{path} is not a GGUF file: it starts with {magic!r}, not b'GGUF'."
    )
  cursor.take(4, 'magic')
  version = cursor.number('<I', 'version')
  if version not in _VERSIONS:
    raise ValueError(
      f'{path}: GGUF version {version} is not supported; allowed are '
      f'{_VERSIONS} in little-endian byte order.'
    )
  num_tensors = cursor.count(_LEAST_TENSOR, 'number of tensors')
  num_entries = cursor.count(_LEAST_ENTRY, 'number of metadata entries')
  metadata = {}
  for i in range(num_entries):
    key = cursor.string(f'key of metadata entry {i}')
    if key in metadata:
      raise ValueError(f'{path}: metadata key {key!r} appears twice.')
    metadata[key] = cursor.value(f'metadata value {key!r}')
  return metadata, num_tensors


def _read_tensor_infos(
  cursor: _Cursor, num_tensors: int, alignment: Any
) -> dict[str, TensorInfo]:
  """The tensor table, every extent checked against the file."""
  path, infos = cursor.path, {}
  if not isinstance(alignment, int) or alignment < 1:
    raise ValueError(
      f'{path}: general.alignment must be an integer >= 1, got {alignment!r}.'
    )
  for i in range(num_tensors):
    name = cursor.string(f'name of tensor {i}')
    if name in infos:
      raise ValueError(f'{path}: tensor {name!r} appears twice.')
    num_axes = cursor.number('<I', f'number of axes of {name!r}')
    if not 1 <= num_axes <= _MAX_AXES:
      raise ValueError(
        f'{path}: tensor {name!r} has {num_axes} axes; allowed are 1 to '
        f'{_MAX_AXES}.'
      )
    axes = [cursor.number('<Q', f'axis of {name!r}') for _ in range(num_axes)]
    ggml_type = cursor.number('<I', f'type of {name!r}')
    offset = cursor.number('<Q', f'offset of {name!r}')
    if ggml_type not in _FORMAT_NAMES:
      kind = _OTHER_TYPES.get(ggml_type, f'number {ggml_type}')
      raise ValueError(
        f'{path}: tensor {name!r} has type {kind}; allowed are '
        f'{", ".join(dequantize.FORMATS)}.'
      )
    form = dequantize.FORMATS[_FORMAT_NAMES[ggml_type]]
    if axes[0] % form.block_size or not all(axes):
      raise ValueError(
        f'{path}: tensor {name!r} has axes {axes}; all must be positive and '
        f'the first a multiple of {form.block_size}.'
      )
    num_bytes = math.prod(axes) // form.block_size * form.block_bytes
    if offset % alignment:
      raise ValueError(
        f'{path}: tensor {name!r} starts at {offset}, not a multiple of '
        f'{alignment}.'
      )
    infos[name] = TensorInfo(
      _FORMAT_NAMES[ggml_type], tuple(axes[::-1]), offset, num_bytes
    )
  # Tensor data begins at the next multiple of the alignment.
  data_start = -(-cursor.at // alignment) * alignment
  size = len(cursor.data)
  for name, info in infos.items():
    start = data_start + info.start
    if start + info.num_bytes > size:
      raise ValueError(
        f'{path}: tensor {name!r} of shape {list(info.shape)} ends at byte '
        f'{start + info.num_bytes}, but the file ends after {size}.'
      )
    infos[name] = info._replace(start=start)
  return infos


def read_metadata(path: str | os.PathLike) -> dict[str, Any]:
  """The key-value part of a GGUF file.

  Args:
    path: a GGUF file of version 2 or 3.

  Returns:
    Key to number, string, list of strings, or numpy array.

  Raises:
    ValueError: if the file cannot be read, is no GGUF file, or claims more
      than it holds.
  """
  return _read_metadata(_Cursor(_map(path), os.fspath(path)))[0]


def _row_order(num_rows: int, num_heads: int) -> np.ndarray:
  """Undoes the row order that llama files have for q and k.

  Within a head the file interleaves the two halves that rotary embedding
  pairs, as it rotates neighbours where we rotate halves:

    file row   0 1 2 3 4 5      pairs (0, 1) (2, 3) (4, 5)
    our row    0 2 4 1 3 5      pairs (0, 3) (1, 4) (2, 5) of ours
  """
  pairs = np.arange(num_rows).reshape(num_heads, -1, 2)
  return pairs.swapaxes(1, 2).reshape(num_rows)


def _tensor(
  data: mmap.mmap, info: TensorInfo, name: str, num_heads: int | None = None
) -> dequantize.PackedTensor:
  return dequantize.PackedTensor(
    name=name,
    packed=np.frombuffer(data, np.uint8, info.num_bytes, info.start),
    format_name=info.format_name,
    shape=info.shape,
    order=num_heads and _row_order(info.shape[0], num_heads),
  )


def read_gguf(path: str | os.PathLike) -> base.Checkpoint:
  """Opens a GGUF file as a checkpoint.

  Architectures llama (also Mistral), qwen2, qwen3 and gemma3. Only the header
  is read here; `read(name)` de-quantises the rows that it is asked for.

  Args:
    path: a GGUF file of version 2 or 3.

  Returns:
    The checkpoint, with Hugging Face names, rows of q and k in their
    published order, and shapes [out, in].

  Raises:
    ValueError: if the file cannot be read, claims more than it holds, has an
      unknown architecture, tensor or tensor type, or lacks a setting; from
      `read`, if the name is unknown; from its rows, if a scale is not finite.
  """
  path = os.fspath(path)
  data = _map(path)
  cursor = _Cursor(data, path)
  metadata, num_tensors = _read_metadata(cursor)
  infos = _read_tensor_infos(
    cursor, num_tensors, metadata.get('general.alignment', 32)
  )
  factors = infos.pop('rope_freqs.weight', None)
  if factors is not None:
    factors = np.asarray(_tensor(data, factors, 'rope_freqs.weight'))
  shapes = {name: info.shape for name, info in infos.items()}
  config = gguf_config.read_config(path, metadata, shapes, factors)
  names = gguf_config.hugging_face_names(path, metadata, shapes)

  def num_permuted_heads(name: str) -> int | None:
    if metadata['general.architecture'] != 'llama':
      return None
    if re.search(r'\.q_proj\.', name):
      return config['num_attention_heads']
    if re.search(r'\.k_proj\.', name):
      return config['num_key_value_heads']
    return None

  def read(name: str) -> dequantize.PackedTensor:
    if name not in names:
      raise ValueError(f'{path} has no tensor {name!r}.')
    return _tensor(
      data,
      infos[names[name]],
      f'{path}: tensor {names[name]!r}',
      num_permuted_heads(name),
    )

  return base.Checkpoint(
    config=config,
    shapes={name: shapes[names[name]] for name in names},
    read=read,
    norms_have_one_added=config['model_type'] == 'gemma3_text',
    stop_ids=gguf_tokenizer.stop_ids(metadata),
  )

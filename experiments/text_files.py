"""Text files that are read and written whole."""

import dataclasses
import json
import math
import os
import pathlib
from typing import Any

import jax
import numpy as np

from specjax import atomic


def read_text(path: str) -> str:
  """A whole UTF-8 file.

  Raises:
    OSError: it cannot be opened.
    ValueError: it is not valid UTF-8; the sentence names file and byte.
  """
  data = pathlib.Path(path).read_bytes()
  try:
    return data.decode('utf-8')
  except UnicodeDecodeError as error:
    byte = data[error.start]
    raise ValueError(
      f'{path!r} is not valid UTF-8: byte {byte:#04x} at {error.start}.'
    ) from None


def check_writable(path: str):
  """Raises unless `path` can be written later; creates and changes nothing.

  Raises:
    ValueError: the folder is missing or closed, or the path is a folder.
  """
  target = pathlib.Path(os.path.realpath(path))
  folder = target.parent
  if not path:
    reason = 'the path is empty'
  elif target.is_dir():
    reason = 'it is a folder'
  elif not folder.is_dir():
    reason = f'{str(folder)!r} is not an existing folder'
  elif target.exists() and not os.access(target, os.W_OK):
    reason = 'it is read-only'
  elif not _is_special(target) and not os.access(folder, os.W_OK | os.X_OK):
    reason = f'folder {str(folder)!r} is read-only'
  else:
    return
  raise ValueError(f'cannot write {path!r}: {reason}.')


def _is_special(target: pathlib.Path) -> bool:
  """A pipe or device: written to in place, for renaming would replace it."""
  return target.exists() and not target.is_file()


def _plain(value: Any) -> Any:
  """The value in JSON's types; NaN and infinities become None."""
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
  if isinstance(value, dict):
    return {str(key): _plain(item) for key, item in value.items()}
  if isinstance(value, (np.ndarray, np.generic, jax.Array)):
    value = np.asarray(value).tolist()
  if isinstance(value, (list, tuple)):
    return [_plain(item) for item in value]
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  if value is None or isinstance(value, (str, int)):
    return value
  raise TypeError(f'{type(value).__name__} cannot be written as JSON: {value}')


def write_json(path: str, obj: Any):
  """Writes all of `obj` or nothing.

  The text goes to a temporary name in the same folder, which then takes the
  file's name in one step; a failure leaves the old file as it was. Dataclasses,
  NumPy and JAX values are accepted; NaN and infinities become null.
  """
  write_text(path, json.dumps(_plain(obj), indent=2, allow_nan=False) + '\n')


def write_text(path: str, text: str):
  """All of the text or, if it fails, the old file; pipes are written to."""
  target = pathlib.Path(os.path.realpath(path))
  if _is_special(target):
    target.write_text(text, encoding='utf-8')
    return
  with atomic.replacing(target) as unfinished:
    unfinished.write_text(text, encoding='utf-8')

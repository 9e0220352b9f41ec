"""Models ready to decode; with --cache_dir they are kept as they were loaded.

An entry is an orbax folder as `load.save` writes it, and a hash of its own
files. Its name is a hash of all that it depends on: every byte of the model's
files, dtype, quantisation, and the version of the conversion. Of several
processes that write one entry the first wins; an entry with a changed byte is
replaced by what the model's files say.
"""

import dataclasses
import functools
import hashlib
import os
import pathlib
import shutil
import sys
from concurrent import futures

import jax

from specjax import atomic
from specjax.mesh import View
from specjax.models import fused, load

# Changes with whatever changes the parameters that a file becomes.
_VERSION = 1
_CHUNK_BYTES = 1 << 23
_HASH_FILE = 'sha256'
_MODEL_FILES = ('*.safetensors', '*.json', '*.jinja')


def check_cache_dir(path: str):
  """Raises ValueError unless `path` is a folder or can be made one."""
  folder = pathlib.Path(os.path.realpath(path))
  if not path:
    reason = 'the path is empty'
  elif folder.exists() and not folder.is_dir():
    reason = 'it is not a folder'
  elif not folder.exists() and not folder.parent.is_dir():
    reason = f'{str(folder.parent)!r} is not an existing folder'
  elif not os.access(folder if folder.exists() else folder.parent, os.W_OK):
    reason = 'it is read-only'
  else:
    return
  raise ValueError(f'cannot use --cache_dir={path}: {reason}.')


def load_model(
  name: str,
  dtype: str,
  quantize: str,
  view: View | None,
  *,
  cache_dtype: str | None = None,
  cache_dir: str | None = None,
) -> load.Loaded:
  """A model ready to decode: loaded, and on one device fused.

  Args:
    name, dtype, quantize, view: as for `load.load`.
    cache_dtype: of keys and values, see `Transformer`.
    cache_dir: where converted models are kept; None keeps none.

  Raises:
    ValueError: as `load.load`.
  """
  loaded = _load(name, dtype, quantize, view, cache_dir)
  model, params = loaded.model, loaded.params
  model = dataclasses.replace(model, cache_dtype=cache_dtype)
  if model.placement is None:
    model, params = fused.fuse(model, params)
  return dataclasses.replace(loaded, model=model, params=params)


def _load(
  name: str,
  dtype: str,
  quantize: str,
  view: View | None,
  cache_dir: str | None,
) -> load.Loaded:
  """`load.load`, by way of the folder if one is given.

  Models that are not converted (orbax folders) go past it, and so do those that
  are not known by a path (hf:ORG/NAME, demo:target).

  Raises:
    ValueError: as `load.load`. What goes wrong with the folder itself is a
      line on stderr.
  """
  path = pathlib.Path(name)
  files = model_files(path) if cache_dir is not None else []
  if not files:
    return load.load(name, dtype, quantize, view)
  entry = pathlib.Path(cache_dir, entry_name(files, dtype, quantize))
  if entry.exists():
    try:
      _check_whole(entry)
      loaded = load.load(str(entry), dtype, quantize, view)
      return dataclasses.replace(loaded, name=name)
    except (ValueError, OSError) as error:
      _warn(f'{entry} cannot be read and is made anew', error)
      shutil.rmtree(entry, ignore_errors=True)
  loaded = load.load(name, dtype, quantize, view)
  if jax.process_count() == 1:
    _keep(entry, loaded)
  return loaded


def model_files(path: pathlib.Path) -> list[pathlib.Path]:
  """The files that a model is converted from; none if it is not."""
  if path.is_file():
    return [path]
  if (path / load.orbax.SETTINGS_FILE).exists():
    return []
  return sorted(file for glob in _MODEL_FILES for file in path.glob(glob))


def entry_name(files: list[pathlib.Path], dtype: str, quantize: str) -> str:
  """A hash of all that the converted model depends on.

  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   file = pathlib.Path(folder, 'a.gguf')
  ...   _ = file.write_bytes(b'abc')
  ...   len(entry_name([file], 'float32', 'none'))
  64
  """
  # A file alone may be called anything; in a folder names count.
  names = [file.name if len(files) > 1 else '' for file in files]
  settings = (_VERSION, dtype, quantize, _hash(names, files))
  return hashlib.sha256(repr(settings).encode()).hexdigest()


def _hash(names: list[str], files: list[pathlib.Path]) -> str:
  """Of every byte of the files, on every core."""
  whole = hashlib.sha256()
  with futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
    for name, file in zip(names, files, strict=True):
      size = file.stat().st_size
      whole.update(repr((name, size)).encode())
      read = functools.partial(_hash_chunk, file)
      for digest in pool.map(read, range(0, size, _CHUNK_BYTES)):
        whole.update(digest)
  return whole.hexdigest()


def _hash_chunk(file: pathlib.Path, start: int) -> bytes:
  with open(file, 'rb') as opened:
    opened.seek(start)
    return hashlib.sha256(opened.read(_CHUNK_BYTES)).digest()


def _hash_entry(entry: pathlib.Path) -> str:
  files = sorted(
    path
    for path in entry.rglob('*')
    if path.is_file() and path != entry / _HASH_FILE
  )
  return _hash([path.relative_to(entry).as_posix() for path in files], files)


def _check_whole(entry: pathlib.Path):
  """Orbax would take a changed byte for a weight."""
  stored = (entry / _HASH_FILE).read_bytes()[:64]
  if stored != _hash_entry(entry).encode():
    raise ValueError('its files are not those that were written')


def _keep(entry: pathlib.Path, loaded: load.Loaded):
  try:
    entry.parent.mkdir(exist_ok=True)
    with atomic.replacing(entry) as unfinished:
      load.save(unfinished, loaded)
      (unfinished / _HASH_FILE).write_text(_hash_entry(unfinished))
  except (ValueError, OSError) as error:
    if not entry.exists():  # Else another process was faster.
      _warn(f'{loaded.name} cannot be kept in {entry.parent}', error)


def _warn(what: str, error: BaseException):
  reason = ' '.join(str(error).split())[:300].rstrip('.')
  print(f'--cache_dir: {what}: {reason}.', file=sys.stderr)

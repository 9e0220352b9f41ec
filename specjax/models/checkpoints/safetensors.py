"""Reads a folder with config.json and safetensors, in one file or in shards."""

import json
import os
import pathlib
import re
from typing import Any

import numpy as np

from specjax.models import config as model_config
from specjax.models.checkpoints import base

_INDEX = 'model.safetensors.index.json'
_SINGLE = 'model.safetensors'
_SHARD = re.compile(r'(.*)-(\d{5})-of-(\d{5})\.safetensors')
_DTYPES = ('F64', 'F32', 'F16', 'BF16')
# An index of a hundred thousand tensors has some ten million bytes.
_MAX_JSON_BYTES = 1 << 26


def read_folder(
  path: str | os.PathLike, more_dtypes: tuple[str, ...] = ()
) -> base.Checkpoint:
  """A Hugging Face folder as a `Checkpoint`; no tensor is read yet.

  Args:
    path: holds config.json, optionally generation_config.json, and either
      model.safetensors, or shards with or without an index. Other formats in
      it are not looked at.
    more_dtypes: that tensors may have beside floats, as the format spells them.

  Raises:
    ValueError: if the folder or a file in it is missing, truncated, not what
      its name says, or does not agree with the index.
  """
  folder = pathlib.Path(path)
  if folder.is_file():
    raise ValueError(
      f'{folder} must be a folder with config.json and safetensors, it is a '
      'file.'
    )
  if not folder.is_dir():
    raise ValueError(f'checkpoint folder {folder} does not exist.')
  config = _read_json(folder / 'config.json')
  generation_config = None
  if (folder / 'generation_config.json').exists():
    generation_config = _read_json(folder / 'generation_config.json')

  shapes: dict[str, tuple[int, ...]] = {}
  file_of: dict[str, pathlib.Path] = {}
  for file in _files(folder):
    for name, shape in _header(file, (*_DTYPES, *more_dtypes)).items():
      if name in file_of:
        raise ValueError(
          f'{name} must be in one file, it is in {file_of[name].name} and in '
          f'{file.name}.'
        )
      shapes[name], file_of[name] = shape, file
  _check_index(folder, file_of)

  def read(name: str) -> np.ndarray:
    with _open(file_of[name]) as tensors:
      return tensors.get_tensor(name)

  return base.Checkpoint(
    config=config,
    shapes=shapes,
    read=read,
    stop_ids=model_config.stop_ids_from_hf(config, generation_config),
  )


def _read_json(file: pathlib.Path) -> dict[str, Any]:
  if not file.is_file():
    raise ValueError(f'{file.name} is missing from {file.parent}.')
  if file.stat().st_size > _MAX_JSON_BYTES:
    raise ValueError(
      f'{file} must have at most {_MAX_JSON_BYTES} bytes, it has '
      f'{file.stat().st_size}.'
    )
  try:
    value = json.loads(file.read_text(encoding='utf-8'))
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{file} must be JSON: {error}.') from None
  if not isinstance(value, dict):
    raise ValueError(f'{file} must hold a JSON object.')
  return value


def _weight_map(folder: pathlib.Path) -> dict[str, str]:
  weight_map = _read_json(folder / _INDEX).get('weight_map')
  if not isinstance(weight_map, dict) or not weight_map:
    raise ValueError(f'{folder / _INDEX} must have a weight_map.')
  for file in weight_map.values():
    # Only a plain name: an index does not lead out of its folder.
    if not isinstance(file, str) or pathlib.Path(file).name != file:
      raise ValueError(
        f'{folder / _INDEX} must name files of its folder, got {file!r}.'
      )
  return weight_map


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  """The files that together hold the model."""
  if (folder / _INDEX).exists():
    names = sorted(set(_weight_map(folder).values()))
  elif (folder / _SINGLE).exists():
    names = [_SINGLE]
  else:
    names = sorted(file.name for file in folder.glob('*.safetensors'))
    if not names:
      others = sorted(
        file.name
        for pattern in ('*.bin', '*.pt', '*.pth', '*.ckpt')
        for file in folder.glob(pattern)
      )
      also = ''
      if others:
        also = (
          f'; {", ".join(others)} is not read, a pickle may run code: convert '
          'it with safetensors.torch.save_file(torch.load(FILE, '
          "weights_only=True), 'model.safetensors')"
        )
      raise ValueError(f'{folder} must hold .safetensors files{also}.')
    for name in list(names):
      if match := _SHARD.fullmatch(name):
        stem, total = match[1], match[3]
        names += [
          f'{stem}-{i + 1:05d}-of-{total}.safetensors'
          for i in range(min(int(total), 10000))
        ]
    names = sorted(set(names))
  missing = [name for name in names if not (folder / name).is_file()]
  if missing:
    raise ValueError(f'{folder} lacks the shards {", ".join(missing)}.')
  return [folder / name for name in names]


def _check_index(folder: pathlib.Path, file_of: dict[str, pathlib.Path]):
  if not (folder / _INDEX).exists():
    return
  weight_map = _weight_map(folder)
  differing = sorted(
    name
    for name in set(weight_map) | set(file_of)
    if name not in file_of or weight_map.get(name) != file_of[name].name
  )
  if differing:
    raise ValueError(
      f'{_INDEX} and the files must agree, they differ in '
      f'{", ".join(differing[:20])}.'
    )


def _open(file: pathlib.Path):
  import safetensors

  try:
    # Maps the file and checks the header against the file's size.
    return safetensors.safe_open(file, framework='numpy')
  except (safetensors.SafetensorError, OSError) as error:
    raise ValueError(f'{file} is not a whole safetensors file: {error}.')


def _header(
  file: pathlib.Path, dtypes: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
  shapes = {}
  with _open(file) as tensors:
    for name in tensors.keys():
      tensor = tensors.get_slice(name)
      if tensor.get_dtype() not in dtypes:
        raise ValueError(
          f'{name} must have a dtype of {", ".join(dtypes)}, got '
          f'{tensor.get_dtype()} in {file}.'
        )
      shapes[name] = tuple(tensor.get_shape())
  return shapes

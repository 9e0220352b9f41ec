"""Saves and restores a model's own parameters, with orbax.

A checkpoint is a folder:

  specjax.json   config in config.json form, vocab_size, stop ids, version,
                 whether the weights are int8
  params/        orbax's files; the tree of `Transformer.param_specs`
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from specjax import atomic, sharding
from specjax.mesh import View, place
from specjax.models import config as model_config
from specjax.models import quantize as quantization
from specjax.models import transformer
from specjax.shapes import Params

SETTINGS_FILE = 'specjax.json'
_FORMAT = 'specjax checkpoint'
_VERSION = 1
_PARAMS = 'params'
_MAX_JSON_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True)
class Restored:
  """What a folder held.

  Attributes:
    model: in the dtype and with the weights asked for.
    params: its parameters.
    config: in the form of a config.json.
    stop_ids: the ids that end a text.
  """

  model: transformer.Transformer
  params: Params
  config: dict[str, Any]
  stop_ids: tuple[int, ...]


def save(
  path: str | os.PathLike,
  config: Mapping[str, Any],
  params: Params,
  *,
  vocab_size: int | None = None,
  stop_ids: tuple[int, ...] = (),
  quantize: str = 'none',
):
  """Writes a checkpoint folder, whole or not at all.

  Everything goes to a temporary folder beside the target, which is renamed
  when complete.

  Args:
    path: must not exist, or be an empty folder.
    config: in config.json form; `params` must be what it describes.
    params: a tree like `Transformer.param_specs()`.
    vocab_size: true ids where the embedding has more rows.
    stop_ids: the ids that end a text.
    quantize: 'int8' if `params` has int8 weights, which are kept as they are.

  Raises:
    ValueError: if `path` holds something, or `params` does not fit `config`.
  """
  path = pathlib.Path(path).absolute()
  check_free(path)
  model = model_config.config_from_hf(config, vocab_size, quantize=quantize)
  specs = sharding.abstract_params(model.param_specs())
  _check_fit(specs, params, 'params')
  settings = {
    'format': _FORMAT,
    'version': _VERSION,
    'config': dict(config),
    'vocab_size': model.vocab_size,
    'stop_ids': list(stop_ids),
    'quantize': quantize,
  }
  path.parent.mkdir(parents=True, exist_ok=True)
  with atomic.replacing(path) as unfinished:
    unfinished.mkdir()
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(unfinished / _PARAMS, params)
    text = json.dumps(settings, indent=1, sort_keys=True)
    (unfinished / SETTINGS_FILE).write_text(text + '\n', encoding='utf-8')


def check_free(path: pathlib.Path):
  """Raises ValueError unless a folder can be made there: absent, or empty."""
  if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
    raise ValueError(f'{path} must be absent or empty, it is not.')
  above = path.absolute().parent
  while not above.exists():
    above = above.parent
  if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
    raise ValueError(f'{path} cannot be made: {above} is no writable folder.')


def restore(
  path: str | os.PathLike,
  dtype: str = 'bfloat16',
  quantize: str = 'none',
  view: View | None = None,
) -> Restored:
  """Reads a folder that `save` wrote; weights are cast to `dtype`.

  Every device reads its own shards, however they lay when they were saved.

  Args:
    path: the folder.
    dtype: 'float32' or 'bfloat16'.
    quantize: 'int8' takes int8 weights as they are and rounds those of a float
      folder, which is read as a whole before; int8 weights never become float.
    view: of the mesh on which the model is placed; None is one device.

  Raises:
    ValueError: if the folder is missing, incomplete, not one of ours, of
      another version, holds a NaN or an infinity, or holds int8 weights and
      `quantize` is 'none'.
  """
  path = pathlib.Path(path).absolute()
  settings = _read_settings(path)
  quantization.check_scheme('quantize', quantize)
  stored = settings['quantize']
  if quantize == 'none' and stored != 'none':
    raise ValueError(
      f'{path} holds {stored} weights: quantize must be {stored}, got none.'
    )
  model = model_config.config_from_hf(
    settings['config'], settings['vocab_size'], dtype, stored
  )
  specs = model.param_specs()
  if view is not None:
    model = dataclasses.replace(model, placement=place(specs, view))
  target = sharding.abstract_params(specs, model.placement)
  if model.placement is None:
    # Here, whatever the placement was when they were saved.
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = jax.tree.map(lambda leaf: leaf.update(sharding=here), target)
  folder = path / _PARAMS
  with ocp.StandardCheckpointer() as checkpointer:
    try:
      metadata = checkpointer.metadata(folder).item_metadata
    except (OSError, KeyError) as error:
      raise _unreadable(folder, error) from None
    if metadata is None:
      raise ValueError(f'{folder} must hold whole orbax files.')
    # Shapes are compared before memory is taken.
    _check_fit(target, metadata, f'{folder}')
    if quantize != stored:
      target = _matrices_as_stored(target, metadata)
    try:
      params = checkpointer.restore(folder, target)
    except Exception as error:  # It raises nothing more precise.
      raise _unreadable(folder, error.__cause__ or error) from None
  for leaf_path, leaf in jax.tree_util.tree_leaves_with_path(params):
    is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
    if is_float and not jnp.all(jnp.isfinite(leaf)):
      raise ValueError(
        f'{_path_name(leaf_path)} must be finite, it has a NaN or an infinity.'
      )
  if quantize != stored:
    model = dataclasses.replace(model, quantize=quantize)
    params = quantization.quantize_params(params)
    params = sharding.put_params(model.param_specs(), params, model.placement)
  return Restored(
    model, params, settings['config'], tuple(settings['stop_ids'])
  )


def _matrices_as_stored(target: Any, metadata: Any) -> Any:
  """Matrices in the dtype of the files: int8 is rounded once, from that."""
  stored = _leaves(metadata)

  def as_stored(path, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if not quantization.is_quantized(leaf):
      return leaf
    return leaf.update(dtype=stored[_path_name(path)].dtype)

  return jax.tree_util.tree_map_with_path(as_stored, target)


def _unreadable(folder: pathlib.Path, error: BaseException) -> ValueError:
  # Its messages run over several lines.
  reason = ' '.join(str(error).split())[:300]
  return ValueError(f'{folder} cannot be read: {reason}')


def _read_settings(path: pathlib.Path) -> dict[str, Any]:
  file = path / SETTINGS_FILE
  if not file.is_file():
    raise ValueError(
      f'{path} must be a folder with {SETTINGS_FILE}, written by save.'
    )
  if file.stat().st_size > _MAX_JSON_BYTES:
    raise ValueError(f'{file} must have at most {_MAX_JSON_BYTES} bytes.')
  try:
    settings = json.loads(file.read_text(encoding='utf-8'))
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{file} must be JSON: {error}.') from None
  if not isinstance(settings, dict) or settings.get('format') != _FORMAT:
    raise ValueError(f'{file} must say format {_FORMAT!r}.')
  if settings.get('version') != _VERSION:
    raise ValueError(
      f'{file} must have version {_VERSION}, got {settings.get("version")!r}.'
    )
  missing = sorted({'config', 'vocab_size', 'stop_ids'} - set(settings))
  if missing:
    raise ValueError(f'{file} lacks {", ".join(missing)}.')
  # Folders of before int8 weights do not say that they have none.
  settings.setdefault('quantize', 'none')
  for name, is_right in (
    ('config', isinstance(settings['config'], dict)),
    ('vocab_size', type(settings['vocab_size']) is int),
    ('stop_ids', _is_list_of_ids(settings['stop_ids'])),
    ('quantize', settings['quantize'] in quantization.SCHEMES),
  ):
    if not is_right:
      raise ValueError(
        f'{name} must be what save wrote, got {settings[name]!r} in {file}.'
      )
  return settings


def _is_list_of_ids(value: Any) -> bool:
  return isinstance(value, list) and all(type(i) is int for i in value)


def _path_name(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator='.')


def _leaves(tree: Any) -> dict[str, Any]:
  """Path to leaf; a list and a tuple, and an index and a key, are alike."""
  leaves = jax.tree_util.tree_leaves_with_path(
    tree, is_leaf=lambda leaf: hasattr(leaf, 'shape')
  )
  return {_path_name(path): leaf for path, leaf in leaves}


def _check_fit(target: Any, got: Any, name: str):
  want_shapes, got_shapes = (
    {path: tuple(leaf.shape) for path, leaf in _leaves(tree).items()}
    for tree in (target, got)
  )
  differing = sorted(
    f'{leaf} (expected {want_shapes.get(leaf)}, got {got_shapes.get(leaf)})'
    for leaf in set(want_shapes) | set(got_shapes)
    if want_shapes.get(leaf) != got_shapes.get(leaf)
  )
  if differing:
    raise ValueError(
      f'{name} must be the parameters of its config, they differ in '
      f'{", ".join(differing[:20])}.'
    )

"""Heads in folders: config.json and safetensors, as they are published.

Loading is strict in both directions: no tensor is left over, none is missing,
and nothing stays at random values. What a file holds of the target's own must
equal it.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np

from specjax import atomic, sharding
from specjax.mesh import View, place
from specjax.models.checkpoints import base as checkpoints
from specjax.models.checkpoints import convert, orbax, safetensors
from specjax.models.heads import base, build, layouts
from specjax.models.heads.build import Head
from specjax.models.quantize import Int8Weight
from specjax.models.transformer import Transformer
from specjax.shapes import Params

KINDS = ('medusa', 'mtp', 'eagle')
_WHOLE = ('I64', 'I32', 'BOOL', 'U8')
_MAX_NAMES_SHOWN = 20
# How far an int8 target may be from what it was rounded from, of the largest.
_TOLERANCE = 0.02


def load_head(
  path: str | os.PathLike,
  kind: str,
  target: Transformer,
  target_params: Params,
  dtype: str | None = None,
  view: View | None = None,
) -> tuple[Head, Params]:
  """Reads a published head.

  Args:
    path: a folder with config.json and .safetensors.
    kind: one of `KINDS`.
    target: the model it is to draft for.
    target_params: its parameters.
    dtype: of the head's weights; None: the target's.
    view: of the mesh on which it is placed; None is one device.

  Raises:
    ValueError: the folder is not whole, is no head of this kind, or does not
      fit the target.
  """
  base.check_target(target)
  checkpoint = safetensors.read_folder(path, more_dtypes=_WHOLE)
  file_names = layouts.common_names(kind, sorted(checkpoint.shapes))
  if kind == 'mtp':
    # The module may lie in the target's own files.
    as_published = dataclasses.replace(target, is_fused=False, quantize='none')
    own = set(jax.tree.leaves(checkpoints.hf_names(as_published)))
    file_names = {k: v for k, v in file_names.items() if k not in own}
  read = lambda name: checkpoint.read(file_names[name])
  if layouts.EMBED in file_names and _equals(
    read(layouts.EMBED), target, target_params, 'embed'
  ):
    # The target's own: the head needs none.
    file_names.pop(layouts.EMBED)
  layout = layouts.layout_of(
    kind, checkpoint.config, file_names, target, dtype or target.dtype
  )
  specs = layout.head.param_specs()
  wanted = dict(
    zip(
      jax.tree.leaves(layout.names),
      jax.tree.leaves(specs, is_leaf=sharding.is_spec),
      strict=True,
    )
  )
  shapes = {
    name: tuple(checkpoint.shapes[file_name])
    for name, file_name in file_names.items()
  }
  optional = {name for name, _ in layout.shared}
  if 'd2t' in wanted:
    optional.add('t2d')
  _check_names(wanted, set(shapes) - optional)
  _check_shapes(wanted, shapes, target)
  for name, what in layout.shared:
    if name in shapes and not _equals(read(name), target, target_params, what):
      raise ValueError(f"{name} must equal the target's {what}, it does not.")

  head = layout.head
  if view is not None:
    head = build.placed(head, place(specs, view))
  placement = build.placement_of(head)

  def load(spec: sharding.ParamSpec, name: str) -> Any:
    if name == 'd2t':
      value = _ids(read(name), shapes, read, target)
    else:
      value = _floats(read(name), spec, name)
    if layout.hidden_first and name.endswith('input_proj.weight'):
      value = np.concatenate(np.split(value, 2, axis=1)[::-1], axis=1)
    return sharding.put_params(spec, value, placement)

  params = jax.tree.map(load, specs, layout.names, is_leaf=sharding.is_spec)
  return head, params


def _equals(tensor, target: Transformer, params: Params, what: str) -> bool:
  """Whether a file's matrix is the target's, rounded as that is."""
  name = 'embed' if what == 'embed' or target.tied else 'head'
  own = params[name]
  values = np.asarray(tensor)
  if isinstance(own, Int8Weight):
    own = np.asarray(own.int8_OI, np.float32) * np.asarray(own.scale_O)[:, None]
    tolerance = _TOLERANCE * float(np.max(np.abs(own)))
  else:
    values, tolerance = values.astype(own.dtype), 0.0
    own = np.asarray(own)
  if values.shape != own.shape:
    return False
  gap = np.abs(values.astype(np.float32) - own.astype(np.float32))
  return bool(np.max(gap, initial=0.0) <= tolerance)


def _check_names(wanted: dict[str, Any], got: set[str]):
  problems = []
  for what, names in (
    ('missing', sorted(set(wanted) - got)),
    ('unexpected', sorted(got - set(wanted))),
  ):
    if names:
      shown = ', '.join(names[:_MAX_NAMES_SHOWN])
      if len(names) > _MAX_NAMES_SHOWN:
        shown += f' and {len(names) - _MAX_NAMES_SHOWN} more'
      problems.append(f'{what}: {shown}')
  if problems:
    raise ValueError(
      'the head must hold exactly the tensors of its config; '
      f'{"; ".join(problems)}.'
    )


def _check_shapes(wanted, shapes, target: Transformer):
  wrong = []
  for name, spec in sorted(wanted.items()):
    allowed = [spec.shape]
    if spec.shape[0] == target.vocab_size:
      # Rows that round the size up are dropped, as they are of the target.
      allowed.append((target.padded_vocab_size, *spec.shape[1:]))
    if shapes[name] not in allowed:
      wrong.append(f'{name} must have shape {spec.shape}, got {shapes[name]}')
  if wrong:
    raise ValueError(f'{"; ".join(wrong[:_MAX_NAMES_SHOWN])}.')


def _floats(tensor, spec: sharding.ParamSpec, name: str) -> np.ndarray:
  if tensor.dtype.kind not in 'fV':  # V is bfloat16.
    raise ValueError(f'{name} must hold floats, got {tensor.dtype}.')
  value = convert.to_float(tensor[: spec.shape[0]], spec.dtype, False)
  if value is None:
    raise ValueError(f'{name} must be finite, it has a NaN or an infinity.')
  return value


def _ids(d2t, shapes, read, target: Transformer) -> np.ndarray:
  """The target's ids of a reduced vocabulary, checked against t2d if there."""
  if d2t.dtype.kind not in 'iu':
    raise ValueError(f'd2t must hold whole numbers, got {d2t.dtype}.')
  ids_R = np.asarray(d2t, np.int64) + np.arange(len(d2t))
  is_id = (ids_R >= 0) & (ids_R < target.vocab_size)
  if not is_id.all():
    raise ValueError(
      f'd2t[i] + i must be in 0..{target.vocab_size - 1}, the ids of the '
      f'target, got {ids_R[~is_id][0]}.'
    )
  if len(np.unique(ids_R)) != len(ids_R):
    raise ValueError('d2t must name every id once, it names one twice.')
  if 't2d' in shapes:
    if len(shapes['t2d']) != 1:
      raise ValueError(
        't2d must say of each id of the target whether the draft has it, got '
        f'shape {shapes["t2d"]}.'
      )
    is_in_V = np.asarray(read('t2d'))
    if is_in_V.dtype.kind not in 'biu':
      raise ValueError(f't2d must hold truth values, got {is_in_V.dtype}.')
    named = np.flatnonzero(is_in_V)
    if not np.array_equal(named, np.sort(ids_R)):
      raise ValueError('d2t and t2d must name the same ids, they do not.')
  return ids_R.astype(np.int32)


def save_head(path: str | os.PathLike, head: Head, params: Params):
  """Writes a folder that `load_head` and serving engines read.

  Everything goes to a temporary folder beside it, which is renamed when
  complete. The target's embedding and output head are not written.

  Args:
    path: must not exist, or be an empty folder.
    head: any; where it is placed does not matter.
    params: its parameters, ids included.

  Raises:
    ValueError: `path` holds something, or the head has no published form.
  """
  import safetensors.numpy

  path = pathlib.Path(path).absolute()
  orbax.check_free(path)
  file_name, config, names = layouts.written(head)
  tensors = dict(
    zip(jax.tree.leaves(names), map(np.asarray, jax.tree.leaves(params)))
  )
  if 'd2t' in tensors:
    ids_R = tensors['d2t'].astype(np.int64)
    is_in_V = np.zeros(head.target.padded_vocab_size, bool)
    is_in_V[ids_R] = True
    tensors |= {'d2t': ids_R - np.arange(len(ids_R)), 't2d': is_in_V}
  config['torch_dtype'] = str(
    next(x.dtype for x in tensors.values() if x.ndim == 2)
  )
  tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
  path.parent.mkdir(parents=True, exist_ok=True)
  with atomic.replacing(path) as unfinished:
    unfinished.mkdir()
    safetensors.numpy.save_file(
      tensors, unfinished / file_name, metadata={'format': 'pt'}
    )
    text = json.dumps(config, indent=2, sort_keys=True) + '\n'
    (unfinished / 'config.json').write_text(text, encoding='utf-8')

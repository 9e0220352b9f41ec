"""Device meshes by name, and the rules that place a model on one.

Target and draft may lie differently on the same devices. Both meshes are
ways to cut one ordered list of devices into factors, so they are cut finer
until one mesh serves both, and each is a view of it:

  devices            0 1 2 3 4 5 6 7        mesh axes d0, d1, d2 of size 2
  --mesh=data:2,model:4                     data = d0, model = d1 d2
  --draft_mesh=model:2                      model = d0, copies over d1 d2

Axes are cut down to primes, and an array takes as many of them as divide it:
with 2 key-value heads on model:4, they are split over d1 and copied over d2.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from specjax import sharding
from specjax.sharding import Placement


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
  """A mesh as it is asked for.

  Attributes:
    data: parts of the batch.
    model: parts of heads, feed-forward width and vocabulary.
  """

  data: int = 1
  model: int = 1

  @property
  def num_devices(self) -> int:
    """How many devices it takes: `data * model`."""
    return self.data * self.model

  def __str__(self) -> str:
    return f'data:{self.data},model:{self.model}'


def parse_mesh(text: str, name: str = '--mesh') -> MeshShape:
  """A mesh from 'data:2,model:4'; an axis that is not named has size 1.

  Args:
    text: axes and sizes.
    name: the flag, for the error.

  Raises:
    ValueError: an axis is unknown, named twice, or has no size.

  >>> parse_mesh('model:4')
  MeshShape(data=1, model=4)
  """
  sizes = {}
  for item in text.split(','):
    found = re.fullmatch(r'\s*(data|model|expert):([1-9][0-9]{0,5})\s*', item)
    if found is None or found[1] in sizes:
      raise ValueError(
        f'{name} must be sizes of the axes data and model, as in '
        f'data:2,model:4, got {text!r}.'
      )
    sizes[found[1]] = int(found[2])
  if sizes.pop('expert', 1) > 1:
    raise ValueError(
      f'{name} must have expert:1, the axis is reserved, got {text!r}.'
    )
  return MeshShape(**sizes)


# Which axis of a view splits which logical axis.
TENSOR_PARALLEL = {
  'batch': 'data',
  'heads': 'model',
  'kv_heads': 'model',
  'ffn': 'model',
  'vocab': 'model',
}
# Parameters are split over the batch's axis as well, and gathered for use.
FULLY_SHARDED = {**TENSOR_PARALLEL, 'embed': 'data'}


@dataclasses.dataclass(frozen=True)
class View:
  """A mesh as one model sees it.

  Attributes:
    mesh: the refined mesh, shared by all views.
    axes: a named axis ('data', 'model') to its mesh axes, the slowest first.
    rules: a logical axis to the named axis that splits it.
  """

  mesh: Mesh
  axes: Mapping[str, tuple[str, ...]]
  rules: Mapping[str, str]

  def mesh_axes(self, logical_axis: str) -> tuple[str, ...]:
    """The mesh axes that a rule would split a logical axis over."""
    return self.axes.get(self.rules.get(logical_axis), ())


def refine(
  shape: MeshShape,
  draft_shape: MeshShape | None = None,
  devices: Sequence[Any] | None = None,
  rules: Mapping[str, str] = TENSOR_PARALLEL,
) -> tuple[View, View]:
  """One mesh over the devices, seen as the target's and as the draft's.

  Args:
    shape: of the target; its product is the number of devices used.
    draft_shape: of the draft; its product must divide the target's, and the
      draft is copied over the rest. None: as the target.
    devices: in order; None: those of JAX.
    rules: of both views.

  Raises:
    ValueError: too few devices, some of a process left over, or two meshes
      that cannot be cut into common factors.
  """
  devices = list(jax.devices() if devices is None else devices)
  num = shape.num_devices
  draft_shape = shape if draft_shape is None else draft_shape
  if num > len(devices):
    raise ValueError(
      f'--mesh must have at most {len(devices)} devices in all, the number '
      f'here, got {shape}.'
    )
  used = devices[:num]
  if {d.process_index for d in used} != {d.process_index for d in devices}:
    raise ValueError(
      f'--mesh must use devices of every process, {len(devices)} in all, got '
      f'{shape}.'
    )
  if num % draft_shape.num_devices:
    raise ValueError(
      f"--draft_mesh must divide the target's {num} devices, got {draft_shape}."
    )
  own = [('data', shape.data), ('model', shape.model)]
  # Copies vary fastest: a shard of the draft's laws then holds the target's
  # shards on the same devices, and cutting them needs no communication.
  draft = [
    ('data', draft_shape.data),
    ('model', draft_shape.model),
    ('copies', num // draft_shape.num_devices),
  ]
  cuts = sorted({*_cuts(own), *_cuts(draft)})
  for low, high in itertools.pairwise(cuts):
    if high % low:
      raise ValueError(
        '--mesh and --draft_mesh must cut the devices into common factors, '
        f'got {shape} and {draft_shape}.'
      )
  factors = [
    p for low, high in itertools.pairwise(cuts) for p in _primes(high // low)
  ] or [1]
  names = tuple(f'd{i}' for i in range(len(factors)))
  # The order of devices follows their wiring, where they have one.
  grid = mesh_utils.create_device_mesh(
    (shape.data, shape.model), used, allow_split_physical_axes=True
  )
  mesh = Mesh(
    np.asarray(grid).reshape(factors),
    names,
    axis_types=(AxisType.Auto,) * len(names),
  )
  return _view(mesh, own, rules), _view(mesh, draft, rules)


def _cuts(axes: Sequence[tuple[str, int]]) -> list[int]:
  """Where the axes end, as products of the sizes so far."""
  return list(
    itertools.accumulate((n for _, n in axes), int.__mul__, initial=1)
  )


def _primes(n: int) -> list[int]:
  factors, p = [], 2
  while n > 1:
    while n % p == 0:
      factors.append(p)
      n //= p
    p += 1
  return factors


def _view(
  mesh: Mesh, axes: Sequence[tuple[str, int]], rules: Mapping[str, str]
) -> View:
  names = list(mesh.axis_names)
  own = {}
  for axis, size in axes:
    own[axis] = ()
    while math.prod(mesh.shape[name] for name in own[axis]) < size:
      own[axis] += (names.pop(0),)
  return View(mesh, own, rules)


def place(specs: Any, view: View) -> Placement:
  """Where a model's arrays lie.

  A logical axis is split over the leading mesh axes of its rule, as many as
  divide it in every parameter that has it; over the rest it is copied.

  Args:
    specs: a tree of `ParamSpec`.
    view: of the mesh. Its axis of 'batch', which is no parameter's, is taken
      as it is; the decoder checks that it divides.

  Raises:
    ValueError: two axes of one parameter fall on one mesh axis.

  >>> view, _ = refine(MeshShape(model=1))
  >>> spec = sharding.ParamSpec(shape=(8, 4), dtype='float32',
  ...                           logical_axes=('ffn', 'embed'))
  >>> place(spec, view).num_shards('ffn')
  1
  """
  axes = [('batch', view.mesh_axes('batch'))]
  for name, all_units in _units(specs).items():
    taken = ()
    for mesh_axis in view.mesh_axes(name):
      longer = (*taken, mesh_axis)
      num_parts = math.prod(view.mesh.shape[axis] for axis in longer)
      if not all(_comes_apart(units, num_parts) for units in all_units):
        break
      taken = longer
    axes.append((name, taken))
  placement = Placement(view.mesh, tuple(axes))
  for spec in jax.tree.leaves(specs, is_leaf=sharding.is_spec):
    placement.partition(*spec.logical_axes)
  return placement


def _units(specs: Any) -> dict[str, set[tuple[int, ...]]]:
  """How each logical axis comes apart, in all parameters that have it."""
  units = {}
  for spec in jax.tree.leaves(specs, is_leaf=sharding.is_spec):
    for name, axis_units in zip(spec.logical_axes, spec.axis_units()):
      if name is not None:
        units.setdefault(name, set()).add(axis_units)
  return units


def _comes_apart(units: tuple[int, ...], num_parts: int) -> bool:
  """Whether an axis splits evenly without mixing parts of different groups.

  >>> [n for n in range(1, 9) if _comes_apart((2, 6), n)]
  [1, 2, 4, 6]
  """
  for size in units:
    if size % num_parts == 0:
      return True
    if num_parts % size:
      return False
    num_parts //= size
  return num_parts == 1


def copied(specs: Any, view: View) -> list[str]:
  """What is copied where a rule would split it, a sentence for each axis."""
  placement = place(specs, view)
  sentences = []
  for name, all_units in _units(specs).items():
    want = math.prod(view.mesh.shape[axis] for axis in view.mesh_axes(name))
    got = placement.num_shards(name)
    if got < want:
      sizes = {'x'.join(map(str, units)) for units in all_units}
      split = f'it is split {got} ways and ' if got > 1 else 'it is '
      sentences.append(
        f'{name} ({", ".join(sorted(sizes))}) does not split {want} ways, '
        f'{split}copied {want // got} times.'
      )
  return sentences

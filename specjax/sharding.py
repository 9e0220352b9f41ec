"""One declaration per parameter, from which init, restore and placement follow.

  ParamSpec    what a parameter is: shape, dtype, a logical name per axis
  Placement    where a model lies: logical axis -> axes of a device mesh

A model with a placement pins its activations and caches to it (`constrain`);
parameters are made, restored or put straight into their shards. The programs
stay those of one device: the compiler partitions them.
"""

import dataclasses
import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.shapes import Array, Key, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamSpec:
  """What a parameter is before it has a value.

  Attributes:
    shape: its shape; weights of products are [out, in].
    dtype: its dtype.
    logical_axes: one name per axis ('vocab', 'embed', 'heads', ...), which a
      placement maps to mesh axes.
    init: 'normal' (variance 1 / last axis), 'ones', or 'zeros'.
    units: per axis, how it comes apart: (8, 4) is 8 groups of 4 parts, and a
      part is never split. None: every index is a part.

  Raises:
    ValueError: axes are missing, `init` is unknown, or `units` do not divide.

  >>> ParamSpec(shape=(2, 3), dtype='float32',
  ...           logical_axes=('ffn', 'embed')).num_bytes
  24
  """

  shape: tuple[int, ...]
  dtype: Any
  logical_axes: tuple[str | None, ...]
  init: str = 'normal'
  units: tuple[tuple[int, ...] | None, ...] | None = None

  def __post_init__(self):
    if len(self.shape) != len(self.logical_axes):
      raise ValueError(
        f'logical_axes must name {len(self.shape)} axes, '
        f'got {self.logical_axes}.'
      )
    if self.init not in ('normal', 'ones', 'zeros'):
      raise ValueError(
        f"init must be 'normal', 'ones' or 'zeros', got {self.init!r}."
      )
    for size, units in zip(self.shape, self.units or ()):
      if units is not None and size % math.prod(units):
        raise ValueError(
          f'units must divide an axis of {size} of {self.shape}, got {units}.'
        )

  @property
  def num_bytes(self) -> int:
    """What all of it takes, over every device that holds a part."""
    return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

  def axis_units(self) -> tuple[tuple[int, ...], ...]:
    """The units of every axis."""
    given = self.units or (None,) * len(self.shape)
    return tuple(units or (size,) for size, units in zip(self.shape, given))


def is_spec(leaf: Any) -> bool:
  """Whether a node is a `ParamSpec`: `is_leaf` for trees of them."""
  return isinstance(leaf, ParamSpec)


@dataclasses.dataclass(frozen=True)
class Placement:
  """Where one model's arrays lie; static and hashable.

  Attributes:
    mesh: the devices.
    axes: pairs of a logical axis and the mesh axes it is split over. A logical
      axis that is not named is not split.
  """

  mesh: Mesh
  axes: tuple[tuple[str, tuple[str, ...]], ...]

  def mesh_axes(self, logical_axis: str | None) -> tuple[str, ...]:
    """What a logical axis is split over; () if it is not split."""
    return dict(self.axes).get(logical_axis, ())

  def num_shards(self, logical_axis: str) -> int:
    """How many parts a logical axis is split into."""
    return math.prod(
      self.mesh.shape[name] for name in self.mesh_axes(logical_axis)
    )

  def partition(self, *logical_axes: str | None) -> PartitionSpec:
    """The partition of an array with these axes.

    Raises:
      ValueError: two of them are split over the same mesh axis.
    """
    entries = [self.mesh_axes(name) for name in logical_axes]
    flat = [mesh_axis for entry in entries for mesh_axis in entry]
    if len(set(flat)) < len(flat):
      raise ValueError(
        f'axes of one array must be split over different mesh axes, got '
        f'{dict(zip(logical_axes, entries))}.'
      )
    return PartitionSpec(*(entry or None for entry in entries))

  def sharding(self, *logical_axes: str | None) -> NamedSharding:
    """`partition` on this mesh.

    Raises:
      ValueError: as for `partition`.
    """
    return NamedSharding(self.mesh, self.partition(*logical_axes))


def constrain(
  x: Array, placement: Placement | None, *logical_axes: str | None
) -> Array:
  """`x`, laid out as a placement says; further axes are not split.

  Without a placement, `x` itself. An axis that does not divide is padded by
  the compiler.

  Args:
    x: [...], at least as many axes as are named.
    placement: where it shall lie; None is one device.
    *logical_axes: one name, or None, for each of the leading axes.

  Returns:
    [...], the same values.

  Raises:
    ValueError: two axes are split over the same mesh axis.
  """
  if placement is None:
    return x
  return jax.lax.with_sharding_constraint(x, placement.sharding(*logical_axes))


def constrain_rows(tree: Any, placement: Placement | None) -> Any:
  """The same tree, the first axis of every array split as rows of a batch are.

  Args:
    tree: of arrays [B, ...].
    placement: where the rows lie; None leaves the tree as it is.
  """
  return jax.tree.map(lambda x: constrain(x, placement, 'batch'), tree)


def init_params(
  specs: Any, key: Key, placement: Placement | None = None
) -> Params:
  """Random parameters for a tree of `ParamSpec`.

  A parameter's value depends on the key and on its own path only, so adding a
  layer changes no other layer's values, and no placement changes any.

  Args:
    specs: a pytree with `ParamSpec` leaves.
    key: consumed.
    placement: where they are made; None is the default device.

  Returns:
    The same tree with arrays for leaves.
  """

  def init_leaf(path, spec: ParamSpec):
    name = jax.tree_util.keystr(path).encode()
    leaf_key = jax.random.fold_in(key, zlib.crc32(name))
    return _init_leaf(leaf_key, spec, placement)

  return jax.tree_util.tree_map_with_path(init_leaf, specs, is_leaf=is_spec)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _init_leaf(key: Key, spec: ParamSpec, placement: Placement | None) -> Array:
  if spec.init == 'normal':
    value = jax.random.normal(key, spec.shape, jnp.float32)
    value = (value * spec.shape[-1] ** -0.5).astype(spec.dtype)
  else:
    value = jnp.full(spec.shape, spec.init == 'ones', spec.dtype)
  return constrain(value, placement, *spec.logical_axes)


def abstract_params(specs: Any, placement: Placement | None = None) -> Any:
  """The same tree with `jax.ShapeDtypeStruct` leaves: nothing is allocated."""

  def abstract(spec: ParamSpec) -> jax.ShapeDtypeStruct:
    sharding = placement and placement.sharding(*spec.logical_axes)
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)

  return jax.tree.map(abstract, specs, is_leaf=is_spec)


def put(
  value: Array | np.ndarray,
  placement: Placement | None,
  *logical_axes: str | None,
) -> Array:
  """A whole array that every process holds, put into its shards.

  Without a placement it goes to the default device. A NumPy array may from now
  on be the array's own memory: nobody may write to it.

  Args:
    value: [...], the same on every process.
    placement: where it shall lie; None is the default device.
    *logical_axes: one name, or None, for each of the leading axes.

  Returns:
    [...], a `jax.Array`.
  """
  if placement is None:
    return jax.device_put(value)
  sharding = placement.sharding(*logical_axes)
  if sharding.is_fully_addressable:
    return jax.device_put(value, sharding)
  value = np.asarray(value)
  return jax.make_array_from_callback(
    value.shape, sharding, lambda index: value[index]
  )


def put_params(specs: Any, values: Any, placement: Placement | None) -> Params:
  """Whole arrays, in a tree with the leaves of `specs`, into their shards."""
  leaves, tree = jax.tree.flatten(specs, is_leaf=is_spec)
  return jax.tree.unflatten(
    tree,
    [
      put(value, placement, *spec.logical_axes)
      for spec, value in zip(leaves, jax.tree.leaves(values), strict=True)
    ],
  )


def to_host(tree: Any) -> Any:
  """A tree of arrays as NumPy arrays, whole on every process."""
  leaves = jax.tree.leaves(tree)
  if all(x.is_fully_addressable for x in leaves):
    return jax.device_get(tree)
  # One program for all of them: several at once, each with communication of
  # its own, could wait for each other.
  copies = _copy_everywhere(leaves[0].sharding.mesh)(tree)
  return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), copies)


@functools.lru_cache(maxsize=8)
def _copy_everywhere(mesh: Mesh):
  whole = NamedSharding(mesh, PartitionSpec())
  return jax.jit(lambda tree: tree, out_shardings=whole)

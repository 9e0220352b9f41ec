"""One declaration per parameter, from which init and restore follow."""

import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from specjax.shapes import Key, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamSpec:
  """What a parameter is before it has a value.

  Attributes:
    shape: its shape; weights of products are [out, in].
    dtype: its dtype.
    logical_axes: one name per axis ('vocab', 'embed', 'heads', ...), which a
      placement maps to mesh axes.
    init: 'normal' (variance 1 / last axis), 'ones', or 'zeros'.

  >>> ParamSpec(shape=(2, 3), dtype='float32',
  ...           logical_axes=('ffn', 'embed')).num_bytes
  24
  """

  shape: tuple[int, ...]
  dtype: Any
  logical_axes: tuple[str | None, ...]
  init: str = 'normal'

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

  @property
  def num_bytes(self) -> int:
    return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def is_spec(leaf: Any) -> bool:
  return isinstance(leaf, ParamSpec)


def init_params(specs: Any, key: Key) -> Params:
  """Random parameters for a tree of `ParamSpec`.

  A parameter's value depends on the key and on its own path only, so adding a
  layer changes no other layer's values.

  Args:
    specs: a pytree with `ParamSpec` leaves.
    key: consumed.

  Returns:
    The same tree with arrays for leaves.
  """

  def init_leaf(path, spec: ParamSpec):
    if spec.init != 'normal':
      return jnp.full(spec.shape, spec.init == 'ones', spec.dtype)
    name = jax.tree_util.keystr(path).encode()
    leaf_key = jax.random.fold_in(key, zlib.crc32(name))
    value = jax.random.normal(leaf_key, spec.shape, jnp.float32)
    return (value * spec.shape[-1] ** -0.5).astype(spec.dtype)

  return jax.tree_util.tree_map_with_path(init_leaf, specs, is_leaf=is_spec)


def abstract_params(specs: Any) -> Any:
  """The same tree with `jax.ShapeDtypeStruct` leaves: nothing is allocated."""
  return jax.tree.map(
    lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
    specs,
    is_leaf=is_spec,
  )

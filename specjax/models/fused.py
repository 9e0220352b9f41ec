"""Matrices that read the same input, stored as one: fewer, larger products.

  q, k, v    ->  qkv        [(H + 2 G) * C, D]
  gate, up   ->  gate_up    [2 * F, D]

Nothing else changes: an output channel's weights, scale and bias stay what they
were. Checkpoints and meshes have the parts, because heads, key-value heads and
channels are split over devices in different ways.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from specjax.shapes import Params

if TYPE_CHECKING:
  from specjax.models.transformer import Transformer

PARTS = {'qkv': ('q', 'k', 'v'), 'gate_up': ('gate', 'up')}


def fuse(model: 'Transformer', params: Params) -> tuple['Transformer', Params]:
  """The model and its parameters with fused matrices.

  Args:
    model: on one device, not fused.
    params: its parameters; the parts are deleted layer by layer, so that only
      one layer is held twice.

  Raises:
    ValueError: the model is on a mesh, or fused already.
  """
  if model.placement is not None or model.is_fused:
    raise ValueError('only a model on one device that is not fused is fused.')
  layers = []
  for layer in params['layers']:
    layers.append(join(layer, _concatenate))
    kept = {id(x) for x in jax.tree.leaves(layers[-1])}
    jax.block_until_ready(layers[-1])
    for x in jax.tree.leaves(layer):
      if id(x) not in kept:
        x.delete()
  return (
    dataclasses.replace(model, is_fused=True),
    {**params, 'layers': tuple(layers)},
  )


def join(layer: dict[str, Any], concatenate) -> dict[str, Any]:
  """A layer's entries with those of parts joined, biases as well."""
  layer = dict(layer)
  for name, parts in PARTS.items():
    for suffix in ('', '_bias'):
      if parts[0] + suffix in layer:
        entries = [layer.pop(part + suffix) for part in parts]
        layer[name + suffix] = concatenate(entries)
  return layer


def _concatenate(entries: list[Any]) -> Any:
  return jax.tree.map(lambda *parts: jnp.concatenate(parts), *entries)

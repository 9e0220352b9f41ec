"""The parameters of a transformer: shapes, axes, and how they come apart."""

import dataclasses
from typing import TYPE_CHECKING

from specjax import sharding
from specjax.models import fused, quantize
from specjax.shapes import Params

if TYPE_CHECKING:
  from specjax.models.transformer import Transformer


def param_specs(model: 'Transformer') -> Params:
  """{'embed', 'layers': one dict per layer, 'final_norm', 'head'?}."""
  d = model.embed_dim
  vocab_axes = ('vocab', 'embed')
  specs = {
    'embed': _weight(model, vocab_axes, model.padded_vocab_size, d),
    'layers': tuple(_layer_specs(model) for _ in range(model.num_layers)),
    'final_norm': _scale('norm', d),
  }
  if not model.tied:
    specs['head'] = _weight(model, vocab_axes, model.padded_vocab_size, d)
  if model.quantize == 'int8':
    specs = quantize.quantize_specs(specs)
  return specs


def _units(model: 'Transformer', axis: str) -> tuple[int, ...] | None:
  """Heads stay whole, and so do the groups that share a key-value head."""
  groups = model.num_kv_heads
  if axis == 'heads':
    return (groups, model.num_heads // groups)
  return (groups,) if axis == 'kv_heads' else None


def _weight(model: 'Transformer', axes, *shape: int) -> sharding.ParamSpec:
  return sharding.ParamSpec(
    shape=shape,
    dtype=model.dtype,
    logical_axes=axes,
    units=tuple(_units(model, axis) for axis in axes),
  )


def _scale(axis: str, size: int) -> sharding.ParamSpec:
  return sharding.ParamSpec(
    shape=(size,), dtype='float32', logical_axes=(axis,), init='ones'
  )


def _bias(model: 'Transformer', axis: str, size: int) -> sharding.ParamSpec:
  return sharding.ParamSpec(
    shape=(size,),
    dtype=model.dtype,
    logical_axes=(axis,),
    init='zeros',
    units=(_units(model, axis),),
  )


def _layer_specs(model: 'Transformer') -> dict[str, sharding.ParamSpec]:
  d, f = model.embed_dim, model.ffn_dim
  q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
  wide = model.side_dim + d
  specs = {
    'attn_norm': _scale('norm', d),
    'q': _weight(model, ('heads', 'embed'), q, wide),
    'k': _weight(model, ('kv_heads', 'embed'), kv, wide),
    'v': _weight(model, ('kv_heads', 'embed'), kv, wide),
    'o': _weight(model, ('embed', 'heads'), d, q),
    'ffn_norm': _scale('norm', d),
    'gate': _weight(model, ('ffn', 'embed'), f, d),
    'up': _weight(model, ('ffn', 'embed'), f, d),
    'down': _weight(model, ('embed', 'ffn'), d, f),
  }
  if not model.input_norm:
    del specs['attn_norm']
  if model.qkv_bias:
    specs['q_bias'] = _bias(model, 'heads', q)
    specs['k_bias'] = _bias(model, 'kv_heads', kv)
    specs['v_bias'] = _bias(model, 'kv_heads', kv)
  if model.out_bias:
    specs['o_bias'] = _bias(model, 'embed', d)
  if model.ffn_bias:
    specs['gate_bias'] = _bias(model, 'ffn', f)
    specs['up_bias'] = _bias(model, 'ffn', f)
    specs['down_bias'] = _bias(model, 'embed', d)
  if model.qk_norm:
    specs['q_norm'] = _scale('head_dim', model.head_dim)
    specs['k_norm'] = _scale('head_dim', model.head_dim)
  if model.post_norms:
    specs['post_attn_norm'] = _scale('norm', d)
    specs['post_ffn_norm'] = _scale('norm', d)
  return fused.join(specs, _stacked) if model.is_fused else specs


def _stacked(specs: list[sharding.ParamSpec]) -> sharding.ParamSpec:
  """One under the other; fused matrices are never split."""
  rows = sum(spec.shape[0] for spec in specs)
  return dataclasses.replace(
    specs[0],
    shape=(rows, *specs[0].shape[1:]),
    logical_axes=(None, *specs[0].logical_axes[1:]),
    units=None,
  )

"""A layer of a transformer: what its two halves add to the stream."""

from typing import TYPE_CHECKING

import jax.numpy as jnp

from specjax.models import attention, layers, rope, slots
from specjax.models.attention import Memory
from specjax.shapes import Array
from specjax.sharding import constrain

if TYPE_CHECKING:
  from specjax.models.transformer import Transformer


def _pin(model: 'Transformer', x: Array, *logical_axes: str | None) -> Array:
  return constrain(x, model.placement, *logical_axes)


def norm(model: 'Transformer', params, name: str, x: Array) -> Array:
  """`layers.rms_norm` with the model's epsilon.

  Args:
    model: what the block belongs to.
    params: has the scale [D] under `name`, float32.
    name: of the scale.
    x: [B, T, ..., D].

  Returns:
    The shape and dtype of `x`.
  """
  return layers.rms_norm(
    x, params[name], model.norm_eps, is_local=model.placement is None
  )


def dense(
  model: 'Transformer', params, name: str, x_BTI: Array, dtype=None
) -> Array:
  """`layers.dense` where the model lies.

  Args:
    model: what the block belongs to.
    params: has the weight [O, I] under `name`, and the bias [O], if there is
      one, under `name` and '_bias'.
    name: of the weight.
    x_BTI: [B, T, I].
    dtype: of the result; None is that of `x_BTI`.

  Returns:
    [B, T, O].
  """
  return layers.dense(
    x_BTI,
    params[name],
    params.get(f'{name}_bias'),
    dtype=dtype,
    is_local=model.placement is None,
  )


def attend(
  model: 'Transformer',
  params,
  x_BTD: Array,
  own: Memory,
  slot_BT: Array,
  angles,
  past,
  side_BTX: Array | None,
) -> tuple[Array, Memory]:
  """The block's first half: what it adds, and the memory with its entries.

  Args:
    model: what the block belongs to.
    params: of this layer.
    x_BTD: the stream before it, [B, T, D], the model's dtype.
    own: the layer's keys and values, with room for the new ones.
    slot_BT: int32 [B, T], where they are written; S drops them.
    angles: cosine and sine, see `Rope.angles`.
    past: memories that are only read, seen before `own`.
    side_BTX: [B, T, side_dim], what attention reads before the stream; None
      where the model has no such width.

  Returns:
    [B, T, D], and `own` with the new entries.
  """
  b, t, _ = x_BTD.shape
  if model.input_norm:
    x_BTD = norm(model, params, 'attn_norm', x_BTD)
  if model.side_dim:
    x_BTD = jnp.concatenate([side_BTX, x_BTD], axis=-1)

  if model.is_fused:
    h, g, c = model.num_heads, model.num_kv_heads, model.head_dim
    qkv_BTO = dense(model, params, 'qkv', x_BTD)
    qkv = jnp.split(qkv_BTO, (h * c, (h + g) * c), axis=-1)
  else:
    qkv = [dense(model, params, name, x_BTD) for name in 'qkv']
  q_BTHC, k_BTGC, v_BTGC = (
    _pin(model, y.reshape(b, t, -1, model.head_dim), 'batch', None, axis)
    for y, axis in zip(qkv, ('heads', 'kv_heads', 'kv_heads'))
  )
  if model.qk_norm:
    q_BTHC = norm(model, params, 'q_norm', q_BTHC)
    k_BTGC = norm(model, params, 'k_norm', k_BTGC)
  q_BTHC, k_BTGC = rope.rotate(q_BTHC, *angles), rope.rotate(k_BTGC, *angles)
  own = own._replace(
    k=slots.write(own.k, k_BTGC.transpose(0, 2, 1, 3), slot_BT),
    v=slots.write(own.v, v_BTGC.transpose(0, 2, 1, 3), slot_BT),
  )
  y = attention.attend(
    q_BTHC, (*past, own), model.score_scale, by_block=model.placement is None
  )
  y_BTD = dense(model, params, 'o', y)
  if model.post_norms:
    y_BTD = norm(model, params, 'post_attn_norm', y_BTD)
  return y_BTD, own


def feed_forward(model: 'Transformer', params, x_BTD: Array) -> Array:
  """The block's second half: what it adds.

    down(act(gate(x)) * up(x)),  x = norm(stream)

  Args:
    model: what the block belongs to.
    params: of this layer.
    x_BTD: the stream behind the first half, [B, T, D], the model's dtype.

  Returns:
    [B, T, D].
  """
  x_BTD = norm(model, params, 'ffn_norm', x_BTD)
  act = layers.ACTIVATIONS[model.activation]
  if model.is_fused:
    both_BTF = dense(model, params, 'gate_up', x_BTD, dtype=jnp.float32)
    gate_BTF, up_BTF = jnp.split(both_BTF, 2, axis=-1)
  else:
    gate_BTF, up_BTF = (
      dense(model, params, name, x_BTD, dtype=jnp.float32)
      for name in ('gate', 'up')
    )
  y_BTF = (act(gate_BTF) * up_BTF).astype(x_BTD.dtype)
  y_BTF = _pin(model, y_BTF, 'batch', None, 'ffn')
  y_BTD = dense(model, params, 'down', y_BTF)
  if model.post_norms:
    y_BTD = norm(model, params, 'post_ffn_norm', y_BTD)
  return y_BTD

"""A toy language model that reads its whole cache, and can be enumerated.

Its logits are a table row chosen by a hash of every (token, position) that
the mask lets it see. One stale entry, hole, wrong position or entry of another
row changes the hash and with it the law; the arithmetic is integer, so a block
of rows and single steps agree bit for bit.
"""

import dataclasses

import jax.numpy as jnp

from specjax import sharding
from specjax.models import base, slots
from specjax.shapes import Array, Key, Params
from specjax.sharding import Placement, constrain

_TOKEN, _POSITION, _MIX = 0x9E3779B1, 0x85EBCA77, 0x2C1B3C6D


def checksum(token_BS: Array, position_BS: Array, visible_BTS: Array) -> Array:
  """Order-free hash of the visible (token, position) pairs, uint32 [B, T]."""
  h_BS = hash_pair(token_BS, position_BS)
  h_BTS = jnp.where(visible_BTS, h_BS[:, None, :], jnp.uint32(0))
  return jnp.sum(h_BTS, axis=-1, dtype=jnp.uint32)


def hash_pair(token: Array, position: Array) -> Array:
  """What one (token, position) adds to a checksum.

  Args:
    token: integers [...].
    position: integers [...].

  Returns:
    uint32 [...].
  """
  h = token.astype(jnp.uint32) * jnp.uint32(_TOKEN)
  h += position.astype(jnp.uint32) * jnp.uint32(_POSITION)
  h = (h ^ (h >> 15)) * jnp.uint32(_MIX)
  return h ^ (h >> 12)


def table_row(hash_BT: Array, table_size: int) -> Array:
  """The row of a table that a checksum leads to, float32 [B, T, 1]."""
  row_BT = hash_BT % jnp.uint32(table_size)
  return row_BT[:, :, None].astype(jnp.float32)


def halves(hash_BT: Array) -> Array:
  """Two halves of 16 bits, exact in float32: [B, T, 2]."""
  both = hash_BT >> 16, hash_BT & 0xFFFF
  return jnp.stack(both, axis=-1).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyModel:
  """A checksum language model; implements `LanguageModel`.

  The cache is the real one, with one layer, one head and width 1: the token
  lies in the key slot and its position in the value slot. As a feature of layer
  1 it shows the checksum itself.

  Attributes:
    vocab_size: V.
    context_length: positions it was made for.
    table_size: rows of the table; a prime makes collisions rare.
    sharpness: standard deviation of the logits, in nats.
    window: a token sees this many last positions, itself included; None: all.
    placement: where it lies; None is one device.
  """

  vocab_size: int
  context_length: int = 1024
  table_size: int = 4099
  sharpness: float = 1.0
  window: int | None = None
  placement: Placement | None = None
  has_independent_rows = False  # Nobody has looked.

  def param_specs(self) -> dict[str, sharding.ParamSpec]:
    """{'table': float32 [table_size, V]}."""
    return {
      'table': sharding.ParamSpec(
        shape=(self.table_size, self.vocab_size),
        dtype=jnp.float32,
        logical_axes=(None, 'vocab'),
      )
    }

  def init(self, key: Key) -> Params:
    """A table of normal logits with standard deviation `sharpness`."""
    params = sharding.init_params(self.param_specs(), key, self.placement)
    scale = self.sharpness * self.vocab_size**0.5
    return {'table': params['table'] * scale}

  def init_cache(
    self, batch_size: int, num_slots: int, max_rewind: int
  ) -> base.KVCache:
    """`LanguageModel.init_cache`: int32, [B, 1, S, 1] on either side."""
    del max_rewind
    return base.init_kv_cache(
      num_layers=1,
      batch_size=batch_size,
      num_kv_heads=1,
      num_slots=num_slots,
      head_dim=1,
      dtype=jnp.int32,
      placement=self.placement,
    )

  def apply(
    self,
    params: Params,
    tokens_BT: Array,
    cache: base.KVCache,
    *,
    num_tokens_B: Array | None = None,
    positions_BT: Array | None = None,
    mask_BTT: Array | None = None,
    capture: tuple[int, ...] = (),
  ) -> tuple[base.Hidden, base.KVCache]:
    """`LanguageModel.apply`; the hidden is [B, T, 1], the number of a row.

    Raises:
      ValueError: `capture` names another layer than 1.
    """
    del params
    if capture not in ((), (1,)):
      raise ValueError(
        f'capture must be () or (1,) for a ToyModel, got {capture}.'
      )
    num_new = tokens_BT.shape[1]
    cache = base.pin_cache(cache, self.placement)
    positions_BT = base.new_positions(cache, num_new, positions_BT)
    slot_BT = base.append_slots(cache, num_new, num_tokens_B)
    tokens_BT = jnp.clip(tokens_BT, 0, self.vocab_size - 1)
    k_B1S1 = slots.write(cache.k[0], tokens_BT[:, None, :, None], slot_BT)
    v_B1S1 = slots.write(cache.v[0], positions_BT[:, None, :, None], slot_BT)
    visible_BTS = base.visible_slots(
      cache.length_B, cache.num_slots, positions_BT, mask_BTT, self.window
    )
    hash_BT = checksum(k_B1S1[:, 0, :, 0], v_B1S1[:, 0, :, 0], visible_BTS)
    # The hidden is the table row's number, exact in float32.
    hidden = base.Hidden(
      last_BTD=table_row(hash_BT, self.table_size),
      features_BTE=halves(hash_BT) if capture else None,
    )
    length_B = base.advance(cache, num_new, num_tokens_B)
    cache = base.KVCache(k=(k_B1S1,), v=(v_B1S1,), length_B=length_B)
    return hidden, base.pin_cache(cache, self.placement)

  def final_norm(self, params: Params, last_BTD: Array) -> Array:
    """As it is, [B, T, 1]: there is no norm."""
    del params
    return last_BTD

  def unembed(self, params: Params, last_BTD: Array) -> Array:
    """float32 [B, T, V]: the rows of the table that the hiddens name."""
    logits_BTV = params['table'][last_BTD[:, :, 0].astype(jnp.int32)]
    return constrain(logits_BTV, self.placement, 'batch', None, 'vocab')

  def keep(
    self,
    cache: base.KVCache,
    start_B: Array,
    path_BM: Array | None,
    num_B: Array,
  ) -> base.KVCache:
    """`LanguageModel.keep`; a window is a mask, so nothing is lost."""
    return base.keep_kv(cache, start_B, path_BM, num_B, self.placement)

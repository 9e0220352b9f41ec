"""Heads for the toy model: what they read is integer, and nothing is forgiven.

Where a feature is stale, is paired with the wrong token, or an entry is left
from a rejected draft, a toy head's law is another. So a head that has the
target's table has all drafts accepted if and only if everything is in place.
"""

import dataclasses

import jax.numpy as jnp

from specjax import sharding
from specjax.models import base as models
from specjax.models import slots
from specjax.models.heads import base
from specjax.models.toy import ToyModel, halves, hash_pair, table_row
from specjax.shapes import Array, Key, Params
from specjax.sharding import Placement

_MIX = 0x2C1B3C6D  # Odd: what is 0 stays it, and nothing else becomes it.


def _whole(feature_BT2: Array) -> Array:
  """uint32 from its `halves`."""
  high_BT, low_BT = (feature_BT2[:, :, i].astype(jnp.uint32) for i in (0, 1))
  return (high_BT << 16) | low_BT


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyHead:
  """A feature-fed head that checks what it is fed; a `FeatureHead`.

  The feature f(t) is the target's checksum of tokens 0..t, so f(t) plus the
  hash of token t + 1 is the next one, and the row of the table. Token and
  feature of every entry lie in the cache; each pair of neighbours that does not
  add up changes the row.

  Attributes:
    target: a toy without a window, whose checksums add up.
    num_ids: R, ids of its own vocabulary; None: all of the target's.

  Raises:
    ValueError: R is not in 1..V.
  """

  target: ToyModel
  num_ids: int | None = None
  target_features = (1,)
  feature_dim = 2
  feature_dtype = 'float32'

  def __post_init__(self):
    base.check_num_ids(self.num_ids, self.vocab_size)

  @property
  def block(self) -> ToyModel:
    """Keeps two integers per entry."""
    return self.target

  @property
  def vocab_size(self) -> int:
    """V, the target's."""
    return self.target.vocab_size

  def param_specs(self) -> Params:
    """{'table', 'ids'?}."""
    size = self.num_ids or self.vocab_size
    specs = {
      'table': sharding.ParamSpec(
        shape=(self.target.table_size, size),
        dtype=jnp.float32,
        logical_axes=(None, 'vocab'),
      )
    }
    if self.num_ids is not None:
      specs['ids'] = base.ids_spec(self.num_ids)
    return specs

  def init(self, key: Key) -> Params:
    """A random table; a reduced vocabulary has the first R ids."""
    return base.init_params(self, key)

  def begin(self, params: Params, target_params: Params) -> Params:
    """With the target's table."""
    table = target_params['table']
    if self.num_ids is not None:
      table = table[:, params['ids']]
    return {**params, 'table': table}

  def fuse(self, params: Params, features_BTE: Array) -> Array:
    """The checksum as it was captured, [B, T, 2]: its `halves`."""
    del params
    return features_BTE

  def apply(
    self,
    params: Params,
    feature_BTD: Array,
    tokens_BT: Array,
    cache: models.KVCache,
    *,
    num_tokens_B: Array | None = None,
  ) -> tuple[Array, models.KVCache]:
    """`FeatureHead.apply`: the checksum of tokens up to t + 1, [B, T, 2].

    Every pair of neighbouring entries that does not add up is mixed into it,
    wherever in the row it lies.
    """
    del params
    num_new = tokens_BT.shape[1]
    cache = models.pin_cache(cache, self.block.placement)
    positions_BT = models.new_positions(cache, num_new, None)
    slot_BT = models.append_slots(cache, num_new, num_tokens_B)
    tokens_BT = jnp.clip(tokens_BT, 0, self.vocab_size - 1)
    hash_BT = _whole(feature_BTD)
    write = lambda old, new_BT: slots.write(
      old, new_BT.astype(jnp.int32)[:, None, :, None], slot_BT
    )
    k_B1S1, v_B1S1 = write(cache.k[0], tokens_BT), write(cache.v[0], hash_BT)
    token_BS, hash_BS = k_B1S1[:, 0, :, 0], v_B1S1[:, 0, :, 0]
    index_1S = jnp.arange(cache.num_slots, dtype=jnp.int32)[None, :]
    next_BS = hash_BS.astype(jnp.uint32) + hash_pair(token_BS, index_1S + 1)
    # How far entry s + 1 is from what entry s makes of it.
    gap_BS = jnp.roll(hash_BS, -1, axis=1).astype(jnp.uint32) - next_BS
    gap_BS = (gap_BS ^ (gap_BS >> 15)) * jnp.uint32(_MIX)
    is_past_BTS = index_1S[:, None, :] < positions_BT[:, :, None]
    gap_BT = jnp.sum(
      jnp.where(is_past_BTS, gap_BS[:, None, :], 0), axis=-1, dtype=jnp.uint32
    )
    hash_BT += hash_pair(tokens_BT, positions_BT + 1) + gap_BT
    length_B = models.advance(cache, num_new, num_tokens_B)
    cache = models.KVCache(k=(k_B1S1,), v=(v_B1S1,), length_B=length_B)
    cache = models.pin_cache(cache, self.block.placement)
    return halves(hash_BT), cache

  def unembed(self, params: Params, feature_BTD: Array) -> Array:
    """float32 [B, T, R]: the table's row of a checksum [B, T, 2]."""
    row_BT1 = table_row(_whole(feature_BTD), self.target.table_size)
    return params['proposer']['table'][row_BT1[:, :, 0].astype(jnp.int32)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyHeads:
  """Independent heads that shift the checksum; implements `IndependentHeads`.

  Attributes:
    target: any toy.
    num_heads: how many.
  """

  target: ToyModel
  num_heads: int
  target_features = (1,)
  feature_dim = 2
  feature_dtype = 'float32'

  @property
  def vocab_size(self) -> int:
    """V, the target's."""
    return self.target.vocab_size

  @property
  def placement(self) -> Placement | None:
    """The target's."""
    return self.target.placement

  def param_specs(self) -> Params:
    """{'table'}, as the target's own."""
    return self.target.param_specs()

  def init(self, key: Key) -> Params:
    """A random table."""
    return self.target.init(key)

  def begin(self, params: Params, target_params: Params) -> Params:
    """With the target's table."""
    return {**params, 'table': target_params['table']}

  def logits(
    self, params: Params, features_BTE: Array, num_heads: int
  ) -> tuple[Array, ...]:
    """Head i takes the row of the checksum plus i, float32 [B, T, V]."""
    found = []
    for i in range(num_heads):
      row_BT1 = table_row(
        _whole(features_BTE) + jnp.uint32(i), self.target.table_size
      )
      row_BT = row_BT1[:, :, 0].astype(jnp.int32)
      found.append(params['proposer']['table'][row_BT])
    return tuple(found)

"""A language model made by counting, small enough to build while you wait.

The probability of a token is a mixture over context lengths: how often it
followed the last 1, 2, 3, ... tokens in a text. It needs no training and no
download, writes text one can read, and a shorter context makes a natural
draft. The demo pair is two of them, counted over specjax's own source.
"""

import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np

from specjax import sharding
from specjax.models import base, slots
from specjax.shapes import Array, Key, Params
from specjax.sharding import Placement, constrain

_FLOOR = 1e-4  # Share of every token, so that none is impossible.
_FAVOUR = 20.0  # Weight of a context over one that is one token shorter.


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountingModel:
  """Next-token counts after hashed contexts; implements `LanguageModel`.

  Attributes:
    vocab_size: V.
    orders: context lengths that are mixed, in tokens, increasing.
    table_size: rows of each table; contexts are hashed into them.
    context_length: positions it was made for.
    placement: where it lies; None is one device.
  """

  vocab_size: int
  orders: tuple[int, ...]
  table_size: int = 16381
  context_length: int = 4096
  placement: Placement | None = None
  has_independent_rows = False  # Nobody has looked.

  def param_specs(self) -> tuple[dict[str, sharding.ParamSpec], ...]:
    """Per order: the weights of each row, and the hash that owns it."""
    table = sharding.ParamSpec(
      shape=(self.table_size + 1, self.vocab_size),
      dtype=jnp.float32,
      logical_axes=(None, 'vocab'),
      init='zeros',
    )
    owner = sharding.ParamSpec(
      shape=(self.table_size,),
      dtype=jnp.uint32,
      logical_axes=(None,),
      init='zeros',
    )
    return tuple({'table': table, 'owner': owner} for _ in self.orders)

  def init(self, key: Key) -> Params:
    """Empty tables, a uniform law; `count` makes useful ones."""
    return sharding.init_params(self.param_specs(), key, self.placement)

  def count(self, tokens: np.ndarray) -> Params:
    """Tables from a text.

    A row belongs to the most frequent of the contexts that hash to it; the
    others are not counted and fall back on shorter contexts. The row behind
    the last stays zero, for contexts that own none.

    Args:
      tokens: int [n], ids below `vocab_size`.
    """
    params = []
    for rank, order in enumerate(self.orders):
      index = np.arange(order, len(tokens))
      context = [tokens[index - back] for back in range(order, 0, -1)]
      h = _hash(np, context)
      contexts, frequency = np.unique(h, return_counts=True)
      contexts = contexts[np.argsort(frequency, kind='stable')]
      owner = np.zeros(self.table_size, np.uint32)
      owner[contexts % self.table_size] = contexts  # The last one stays.
      row = h % self.table_size
      is_owned = owner[row] == h
      table = np.zeros((self.table_size + 1, self.vocab_size), np.float32)
      np.add.at(table, (row[is_owned], tokens[index][is_owned]), 1.0)
      total = np.maximum(table.sum(axis=1, keepdims=True), 1.0)
      table *= _FAVOUR**rank / total
      params.append({'table': table, 'owner': owner})
    return sharding.put_params(self.param_specs(), params, self.placement)

  def init_cache(
    self, batch_size: int, num_slots: int, max_rewind: int
  ) -> base.KVCache:
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
    if capture:
      raise ValueError(f'capture must be () for counting, got {capture}.')
    num_new = tokens_BT.shape[1]
    cache = base.pin_cache(cache, self.placement)
    positions_BT = base.new_positions(cache, num_new, positions_BT)
    slot_BT = base.append_slots(cache, num_new, num_tokens_B)
    tokens_BT = jnp.clip(tokens_BT, 0, self.vocab_size - 1)
    k_B1S1 = slots.write(cache.k[0], tokens_BT[:, None, :, None], slot_BT)
    v_B1S1 = slots.write(cache.v[0], positions_BT[:, None, :, None], slot_BT)
    visible_BTS = base.visible_slots(
      cache.length_B, cache.num_slots, positions_BT, mask_BTT
    )

    def token_back(back: int) -> Array:
      """The visible token `back` positions before each query, int32 [B, T]."""
      position_BT1 = (positions_BT - back)[:, :, None]
      is_it_BTS = visible_BTS & (v_B1S1[:, :, :, 0] == position_BT1)
      return jnp.sum(jnp.where(is_it_BTS, k_B1S1[:, :, :, 0], 0), axis=-1)

    last = [token_back(back) for back in range(self.orders[-1])]

    def row(order: int, owner: Array) -> Array:
      h_BT = _hash(jnp, last[order - 1 :: -1])
      row_BT = h_BT % jnp.uint32(self.table_size)
      return jnp.where(owner[row_BT] == h_BT, row_BT, self.table_size)

    row_BTO = jnp.stack(
      [row(n, own['owner']) for n, own in zip(self.orders, params)], axis=-1
    )
    # The hidden is the tables' row numbers, exact in float32.
    hidden = base.Hidden(last_BTD=row_BTO.astype(jnp.float32))
    length_B = base.advance(cache, num_new, num_tokens_B)
    cache = base.KVCache(k=(k_B1S1,), v=(v_B1S1,), length_B=length_B)
    return hidden, base.pin_cache(cache, self.placement)

  def final_norm(self, params: Params, last_BTD: Array) -> Array:
    del params
    return last_BTD

  def unembed(self, params: Params, last_BTD: Array) -> Array:
    row_BTO = last_BTD.astype(jnp.int32)
    weight_BTV = sum(
      own['table'][row_BTO[:, :, rank]] for rank, own in enumerate(params)
    )
    logits_BTV = jnp.log(weight_BTV + _FLOOR)
    return constrain(logits_BTV, self.placement, 'batch', None, 'vocab')

  def keep(
    self,
    cache: base.KVCache,
    start_B: Array,
    path_BM: Array | None,
    num_B: Array,
  ) -> base.KVCache:
    return base.keep_kv(cache, start_B, path_BM, num_B, self.placement)


def _hash(xp, context: list) -> Array:
  """Hash of a context, oldest token first, uint32 of the tokens' shape."""
  h = xp.zeros_like(context[0], dtype=xp.uint32)
  for token in context:
    h = (h ^ token.astype(xp.uint32)) * xp.uint32(0x01000193)
    h = h ^ (h >> xp.uint32(15))
  return h


def own_source() -> bytes:
  """The source text of specjax itself, the demo pair's training text."""
  root = pathlib.Path(__file__).resolve().parents[1]
  paths = sorted(root.rglob('*.py'), key=lambda path: path.as_posix())
  return b'\n\n'.join(path.read_bytes() for path in paths)

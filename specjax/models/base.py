"""The language-model protocol and the key-value cache under every model.

The cache knows nothing of words: it appends rows at each row's own length,
says which slots a query may see, and keeps a path of what was appended last.
Models differ in what they store; rollback is the same for all of them.

  slot      0 1 2 3 4 | 5 6 7 . .       length 5, three tokens just appended
  keep(start=5, path=None, num=2)       -> length 7, slot 7 is free again
  keep(start=5, path=[0, 2], num=2)     -> slot 7 moves to slot 6, length 7
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from specjax.models import slots as slots_lib
from specjax.models.slots import Slots
from specjax.shapes import Array, Key, Params
from specjax.sharding import Placement, constrain

Cache = Any


class Hidden(NamedTuple):
  """What a pass over T tokens yields.

  Attributes:
    last_BTD: the residual stream after the last block, before the final norm.
    features_BTE: the captured layers side by side, or None; layer 0 is the
      embeddings, layer i the residual stream after block i.
  """

  last_BTD: Array
  features_BTE: Array | None = None


class Chunk(NamedTuple):
  """A piece of every row's prompt, as it went through a model.

  Attributes:
    start: int32 [], the index of its first token.
    hidden: of its T tokens; those behind a row's own are junk.
  """

  start: Array
  hidden: Hidden


class LanguageModel(Protocol):
  """A causal language model as the decoder sees it.

  The object is static (a frozen dataclass: hashable, no arrays); parameters
  and cache are arguments. Laws, held by the conformance tests: apply in chunks
  == at once; junk + keep == never written; no row sees another; writes past
  the last slot are dropped, never shifted; the hidden of token t does not
  depend on tokens after t (as long as these are finite: 0 x NaN is NaN).

  Attributes:
    vocab_size: number of true token ids; logits have exactly this width.
    context_length: how many positions the model was made for.
    placement: where its arrays lie; None is one device. A model pins its
      caches and logits to it.
    has_independent_rows: whether a token's logits have the same bits in a pass
      of any width.
  """

  vocab_size: int
  context_length: int
  placement: Placement | None
  has_independent_rows: bool

  def param_specs(self) -> Any:
    """A pytree of `ParamSpec`, the declaration of every parameter."""
    ...

  def init(self, key: Key) -> Params:
    """Random parameters."""
    ...

  def init_cache(
    self, batch_size: int, num_slots: int, max_rewind: int
  ) -> Cache:
    """An empty, all-zero cache.

    Args:
      batch_size: B.
      num_slots: S, entries per row; slack for a step's drafts included.
      max_rewind: the most entries a `keep` may forget. A cache that can go
        back to any length ignores it.
    """
    ...

  def apply(
    self,
    params: Params,
    tokens_BT: Array,
    cache: Cache,
    *,
    num_tokens_B: Array | None = None,
    positions_BT: Array | None = None,
    mask_BTT: Array | None = None,
    capture: tuple[int, ...] = (),
  ) -> tuple[Hidden, Cache]:
    """Appends tokens to each row at its own length and returns their hiddens.

    Args:
      params: the model's parameters.
      tokens_BT: int32 [B, T]; ids outside the vocabulary are clamped.
      cache: what came before.
      num_tokens_B: int32 [B], how many of the T tokens are real (None: all).
        The rest is computed and dropped.
      positions_BT: int32 [B, T], None: length + 0..T-1. Trees pass depths.
      mask_BTT: bool [B, T, T], which new token (rows) sees which new token
        (columns); None: causal.
      capture: layers to return as features.

    Returns:
      The hiddens of all T rows, and the cache with length + num_tokens.
    """
    ...

  def final_norm(self, params: Params, last_BTD: Array) -> Array:
    """The last norm, for heads that read the hidden after it, [B, T, D]."""
    ...

  def unembed(self, params: Params, last_BTD: Array) -> Array:
    """float32 logits [B, T, vocab_size]; includes the final norm."""
    ...

  def keep(
    self, cache: Cache, start_B: Array, path_BM: Array | None, num_B: Array
  ) -> Cache:
    """Keeps entries `start + path[:num]` of those appended since `start`.

    Args:
      cache: after one or more `apply` calls.
      start_B: int32 [B], the length to go back to.
      path_BM: int32 [B, M], increasing offsets from `start` in the order in
        which they are kept; None stands for 0, 1, 2, ...
      num_B: int32 [B], how many of them are kept. A finished row keeps 0.
    """
    ...


@flax.struct.dataclass
class KVCache:
  """Keys and values of every layer, each row with its own length.

  Attributes:
    k: one `Slots` [B, G, S, C] per layer.
    v: the same.
    length_B: int32 [B], 0..S; what lies at or beyond it is not there.
  """

  k: tuple[Slots, ...]
  v: tuple[Slots, ...]
  length_B: Array

  @property
  def num_slots(self) -> int:
    """S, the entries that a row has room for."""
    return slots_lib.num_slots(self.k[0])


def init_kv_cache(
  *,
  num_layers: int,
  batch_size: int,
  num_kv_heads: int,
  num_slots: int,
  head_dim: int,
  dtype: Any,
  placement: Placement | None = None,
) -> KVCache:
  """An empty cache; `dtype` may be int8."""
  shape = (batch_size, num_kv_heads, num_slots, head_dim)
  # One array per layer and side: a shared zeros() could not be donated twice.
  cache = KVCache(
    k=tuple(slots_lib.empty(shape, dtype) for _ in range(num_layers)),
    v=tuple(slots_lib.empty(shape, dtype) for _ in range(num_layers)),
    length_B=jnp.zeros(batch_size, jnp.int32),
  )
  return pin_cache(cache, placement)


def pin_cache(cache: KVCache, placement: Placement | None) -> KVCache:
  """The cache, split by row and by key-value head as the placement says.

  Models pin it where it comes in and where it goes out. Inside a loop both are
  needed: a carry takes the layout of any use that is not pinned.
  """
  pin = lambda x: constrain(x, placement, 'batch', 'kv_heads')
  return KVCache(
    k=jax.tree.map(pin, cache.k),
    v=jax.tree.map(pin, cache.v),
    length_B=constrain(cache.length_B, placement, 'batch'),
  )


def append_slots(
  cache: KVCache, num_new: int, num_tokens_B: Array | None
) -> Array:
  """The slot that each new token is written to, int32 [B, T].

  Tokens that are not real, and tokens that no longer fit, get slot S, which
  scatters with `mode='drop'` ignore: nothing is ever shifted or clamped.
  """
  offset_1T = jnp.arange(num_new, dtype=jnp.int32)[None, :]
  slot_BT = cache.length_B[:, None] + offset_1T
  if num_tokens_B is not None:
    slot_BT = jnp.where(
      offset_1T < num_tokens_B[:, None], slot_BT, cache.num_slots
    )
  return jnp.minimum(slot_BT, cache.num_slots)


def visible_slots(
  length_B: Array,
  num_slots: int,
  positions_BT: Array,
  mask_BTT: Array | None = None,
  window: int | None = None,
) -> Array:
  """Which slots each new token may see, bool [B, T, S].

  Args:
    length_B: int32 [B], the lengths before the new tokens.
    num_slots: S.
    positions_BT: int32 [B, T], the new tokens' positions.
    mask_BTT: bool [B, T, T] among the new tokens; None is causal.
    window: a token sees positions greater than its own minus this; None sees
      all.

  Slots before `length` hold positions equal to their index. The new token t
  sits in slot `length + t` at `positions[t]`:

    length 3, T 2, causal       slot  0 1 2 3 4
                         t = 0        x x x x .
                         t = 1        x x x x x
  """
  num_new = positions_BT.shape[1]
  slot_11S = jnp.arange(num_slots, dtype=jnp.int32)[None, None, :]
  offset_B1S = slot_11S - length_B[:, None, None]
  is_new_B1S = (offset_B1S >= 0) & (offset_B1S < num_new)
  query_1T1 = jnp.arange(num_new, dtype=jnp.int32)[None, :, None]
  if mask_BTT is None:
    seen_BTS = offset_B1S <= query_1T1
  else:
    index_B1S = jnp.clip(offset_B1S, 0, num_new - 1)
    index_BTS = jnp.broadcast_to(
      index_B1S, (index_B1S.shape[0], num_new, num_slots)
    )
    among_BTS = jnp.take_along_axis(mask_BTT, index_BTS, axis=2)
    seen_BTS = (offset_B1S < 0) | (is_new_B1S & among_BTS)
  if window is None:
    return seen_BTS
  index_BS = jnp.clip(offset_B1S[:, 0, :], 0, num_new - 1)
  new_position_BS = jnp.take_along_axis(positions_BT, index_BS, axis=1)
  position_B1S = jnp.where(is_new_B1S, new_position_BS[:, None, :], slot_11S)
  return seen_BTS & (position_B1S > positions_BT[:, :, None] - window)


def earlier_slots(
  length_B: Array,
  num_slots: int,
  positions_BT: Array,
  window: int | None = None,
) -> Array:
  """Which slots of a cache that is only read new tokens see, bool [B, T, S].

  Args:
    length_B: int32 [B], the cache's lengths; the new tokens lie elsewhere.
    num_slots: S.
    positions_BT: int32 [B, T], the new tokens' positions.
    window: as in `visible_slots`.
  """
  slot_11S = jnp.arange(num_slots, dtype=jnp.int32)[None, None, :]
  seen_BTS = jnp.broadcast_to(
    slot_11S < length_B[:, None, None], (*positions_BT.shape, num_slots)
  )
  if window is None:
    return seen_BTS
  return seen_BTS & (slot_11S > positions_BT[:, :, None] - window)


def new_positions(
  cache: KVCache, num_new: int, positions_BT: Array | None
) -> Array:
  """The given positions, or each row's length + 0..T-1, int32 [B, T]."""
  if positions_BT is not None:
    return positions_BT
  return cache.length_B[:, None] + jnp.arange(num_new, dtype=jnp.int32)[None]


def advance(cache: KVCache, num_new: int, num_tokens_B: Array | None):
  """The length after an append, int32 [B]; it never passes the last slot."""
  num_B = num_new if num_tokens_B is None else num_tokens_B
  return jnp.minimum(cache.length_B + num_B, cache.num_slots)


def keep_kv(
  cache: KVCache,
  start_B: Array,
  path_BM: Array | None,
  num_B: Array,
  placement: Placement | None = None,
) -> KVCache:
  """`LanguageModel.keep` for a `KVCache`.

  A chain only sets the length. A path moves the kept entries together first;
  keys carry their rotation, and positions are depths, so none is redone.
  """
  cache = cache.replace(length_B=start_B + num_B)
  if path_BM is None:
    return pin_cache(cache, placement)
  index_1M = jnp.arange(path_BM.shape[1], dtype=jnp.int32)[None, :]
  source_BM = start_B[:, None] + path_BM
  source_BM = jnp.clip(source_BM, 0, cache.num_slots - 1)
  target_BM = start_B[:, None] + index_1M
  target_BM = jnp.where(index_1M < num_B[:, None], target_BM, cache.num_slots)

  move = lambda slots: slots_lib.move(slots, source_BM, target_BM)
  cache = cache.replace(
    k=tuple(map(move, cache.k)), v=tuple(map(move, cache.v))
  )
  return pin_cache(cache, placement)


def prefill(
  model: LanguageModel,
  params: Params,
  cache: Cache,
  tokens_BL: Array,
  num_B: Array,
  chunk: int,
) -> Cache:
  """Feeds the first `num` tokens of each row to an empty cache.

  Args:
    model: any language model.
    params: its parameters.
    cache: an empty cache with at least max(num) slots.
    tokens_BL: int32 [B, L].
    num_B: int32 [B], 0..L.
    chunk: tokens per pass.
  """
  nothing = lambda carry, _: carry
  return fold_prompts(
    model, params, cache, tokens_BL, num_B, chunk, fold=nothing, carry=()
  )[0]


def fold_prompts(
  model: LanguageModel,
  params: Params,
  cache: Cache,
  tokens_BL: Array,
  num_B: Array,
  chunk: int,
  *,
  fold: Callable[[Any, Chunk], Any],
  carry: Any,
  capture: tuple[int, ...] = (),
) -> tuple[Cache, Any]:
  """`prefill` that hands every chunk to somebody who wants its hiddens.

  The prompt goes through in chunks of one shape, in a loop whose length is
  traced: one compilation serves every prompt, and nothing is unembedded.

  Args:
    model, params, cache, tokens_BL, num_B, chunk: as for `prefill`.
    fold: `(carry, chunk)` to the next carry.
    carry: the first.
    capture: layers that the chunks have as features.

  Returns:
    The cache and the last carry.
  """
  chunk = min(chunk, tokens_BL.shape[1])
  last_index = tokens_BL.shape[1] - 1

  def more(loop):
    return loop[0] < jnp.max(num_B)

  def feed(loop):
    start, cache, carry = loop
    index_T = start + jnp.arange(chunk, dtype=jnp.int32)
    chunk_BT = tokens_BL[:, jnp.minimum(index_T, last_index)]
    num_tokens_B = jnp.clip(num_B - start, 0, chunk)
    hidden, cache = model.apply(
      params, chunk_BT, cache, num_tokens_B=num_tokens_B, capture=capture
    )
    carry = fold(carry, Chunk(start, hidden))
    return start + chunk, cache, carry

  loop = jax.lax.while_loop(more, feed, (jnp.int32(0), cache, carry))
  return loop[1:]

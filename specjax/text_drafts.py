"""String-level exact match: a draft with another tokenizer, by way of text.

  committed ids -> text -> own ids -> the draft goes on -> text -> target's ids

The host does it between two steps; drafts go through `proposers.given.Given`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import base
from specjax.proposers.given import Offer
from specjax.shapes import Array, Params
from specjax.tokenizers import Tokenizer

_CHUNK = 16  # Own ids per pass.
# Target tokens that are cut again together with the new text, because where a
# text is cut depends on what stands before it.
_LOOK_BEHIND = 8


class TextDrafter:
  """Drafts for a batch of rows with a model that reads the same text.

  The target decides by its own tokens: a draft is accepted while it equals what
  the target emits, so it may be any text, and a bad cut costs acceptance alone.
  The draft goes on greedily.

  Lossless with every rule (one-hot drafts).
  Source: Timor et al., arXiv:2502.05202 (SLEM). Deviation: the draft is greedy
    at every temperature; where the old and the new cut do not meet at the end
    of the committed text, the new text is cut by itself.

  Attributes:
    num_draft_tokens: K, drafts in the target's ids; K own ids are drafted.
  """

  def __init__(
    self,
    model: base.LanguageModel,
    params: Params,
    tokenizer: Tokenizer,
    target: Tokenizer,
    num_draft_tokens: int,
    max_length: int,
  ):
    """Makes a drafter.

    Args:
      model, params, tokenizer: the draft's.
      target: the target's tokenizer.
      num_draft_tokens: K.
      max_length: own ids per row at most; longer texts get no drafts.
    """
    self._model, self._params = model, params
    self._own, self._target = tokenizer, target
    self.num_draft_tokens = num_draft_tokens
    self._size = min(max_length, model.context_length)
    self._cache = None
    self._fed: list[list[int]] = []

  def begin(self, batch_size: int):
    """Forgets all rows; the next texts are of a new batch."""
    self._cache = self._model.init_cache(
      batch_size, self._size + _CHUNK, max_rewind=self._size
    )
    self._fed = [[] for _ in range(batch_size)]

  def offer(
    self, rows: Sequence[Sequence[int]], is_done: Sequence[bool]
  ) -> Offer:
    """Drafts for every row that is not done.

    Args:
      rows: the committed ids of each row, prompt included.
      is_done: rows that need none.
    """
    k = self.num_draft_tokens
    draft_BK = np.zeros((len(rows), k), np.int32)
    num_draft_B = np.zeros(len(rows), np.int32)
    texts = [
      None if done else self._text(row) for row, done in zip(rows, is_done)
    ]
    own = [
      [] if text is None else self._own.encode(text, add_special=True)
      for text in texts
    ]
    # Too long or half a character: such a row is left alone.
    own = [ids if len(ids) + k <= self._size else [] for ids in own]
    ids_BJ = self._go_on(own)
    for row, ids in enumerate(own):
      if ids:
        new = ids_BJ[row].tolist()
        text = _before_end(self._own, new)
        drafts = cut_behind(self._target, rows[row], text)[:k]
        draft_BK[row, : len(drafts)] = drafts
        num_draft_B[row] = len(drafts)
    return Offer(jnp.asarray(draft_BK), jnp.asarray(num_draft_B))

  def _text(self, row: Sequence[int]) -> str | None:
    """The text of a row; None if it ends inside a character.

    Without the id that begins it: the draft's tokenizer adds one of its own.
    """
    start = int(row[0] == self._target.bos_id)
    try:
      return _bytes(self._target, row[start:]).decode('utf-8')
    except UnicodeDecodeError:
      return None

  def _go_on(self, own: list[list[int]]) -> np.ndarray:
    """K own ids behind each row's; the cache keeps what it has of them."""
    kept = [
      min(_num_common(fed, ids), max(len(ids) - 1, 0))
      for fed, ids in zip(self._fed, own)
    ]
    fresh = [ids[n:] for ids, n in zip(own, kept)]
    # Powers of two, or every prompt would compile a loop of its own.
    num_chunks = -(-max(map(len, fresh)) // _CHUNK) or 1
    width = _CHUNK * (1 << (num_chunks - 1).bit_length())
    fresh_BX = np.zeros((len(own), width), np.int32)
    for row, ids in enumerate(fresh):
      fresh_BX[row, : len(ids)] = ids
    self._cache, ids_JB = _continue(
      self._model,
      self._params,
      self._cache,
      np.asarray(kept, np.int32),
      fresh_BX.reshape(len(own), -1, _CHUNK).swapaxes(0, 1),
      np.asarray([len(ids) for ids in fresh], np.int32),
      self.num_draft_tokens,
    )
    ids_BJ = np.asarray(ids_JB).T
    # The last id was drawn and not fed.
    self._fed = [[*a, *b[:-1].tolist()] for a, b in zip(own, ids_BJ)]
    return ids_BJ


def cut_behind(target: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
  """A text that follows some ids, cut as the target would cut it.

  The last ids are cut again with it. If a cut falls on their end, what stands
  behind is the answer; else the text is cut by itself.

  >>> from specjax.tokenizers import ByteTokenizer
  >>> cut_behind(ByteTokenizer(), list(b'ab'), 'c')
  [99]
  """
  old = _bytes(target, ids[-_LOOK_BEHIND:])
  try:
    whole = old.decode('utf-8') + text
  except UnicodeDecodeError:  # It begins inside a character.
    return target.encode(text, add_special=False)
  again = target.encode(whole, add_special=False)
  ends = np.cumsum([len(target.token_bytes(i)) for i in again])
  meets = np.flatnonzero(ends == len(old))
  if len(meets):
    return again[meets[-1] + 1 :]
  return target.encode(text, add_special=False)


def _bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
  return b''.join(map(tokenizer.token_bytes, ids))


def _before_end(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
  """The text of ids up to the first that is none, or that ends the text."""
  first = next(
    (n for n, i in enumerate(ids) if tokenizer.is_special(i)), len(ids)
  )
  return _bytes(tokenizer, ids[:first]).decode('utf-8', errors='ignore')


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
  pairs = zip(first, second)
  return next(
    (n for n, (a, b) in enumerate(pairs) if a != b),
    min(len(first), len(second)),
  )


@functools.partial(
  jax.jit, static_argnames=('model', 'num_ids'), donate_argnames='cache'
)
def _continue(
  model: base.LanguageModel,
  params: Params,
  cache: Any,
  kept_B: Array,
  fresh_CBX: Array,
  num_fresh_B: Array,
  num_ids: int,
) -> tuple[Any, Array]:
  """Goes back to `kept`, feeds what is new, and goes on greedily.

  Returns:
    The cache, and int32 [num_ids, B].
  """
  b, width = fresh_CBX.shape[1:]
  cache = model.keep(cache, kept_B, None, jnp.zeros_like(kept_B))

  def best(hidden_B1D: Array) -> Array:
    logits_B1V = model.unembed(params, hidden_B1D)
    return jnp.argmax(logits_B1V[:, 0], axis=-1).astype(jnp.int32)

  def feed(carry, chunk_BX):
    start, cache, id_B = carry
    num_B = jnp.clip(num_fresh_B - start, 0, width)
    hidden, cache = model.apply(params, chunk_BX, cache, num_tokens_B=num_B)
    last_B = jnp.maximum(num_B - 1, 0)[:, None, None]
    own_B = best(jnp.take_along_axis(hidden.last_BTD, last_B, axis=1))
    return (start + width, cache, jnp.where(num_B > 0, own_B, id_B)), None

  def draw(carry, _):
    cache, id_B = carry
    hidden, cache = model.apply(params, id_B[:, None], cache)
    new_B = best(hidden.last_BTD)
    return (cache, new_B), id_B

  zero_B = jnp.zeros(b, jnp.int32)
  (_, cache, id_B), _ = jax.lax.scan(
    feed, (jnp.int32(0), cache, zero_B), fresh_CBX
  )
  (cache, id_B), ids_JB = jax.lax.scan(
    draw, (cache, id_B), None, length=num_ids - 1
  )
  return cache, jnp.concatenate([ids_JB, id_B[None]])

"""A language model that is spoken to in the ids of another vocabulary.

  to_draft   [V]      the own id with the same bytes as id v, or -1
  spelled    [V, R]   the own ids that spell id v; one if to_draft has one
  num_ids    [V]      how many they are, 1..R

What is fed goes through `spelled`, what is asked goes through `to_draft`: the
logits of ids that both have are the model's, the others can not be drawn.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import base
from specjax.shapes import Array, Key, Params
from specjax.sharding import ParamSpec, Placement, constrain, put
from specjax.tokenizers import Tokenizer

# A logit that weighs exactly 0 beside any other; -inf would be a broken law.
ABSENT = -1e30


@flax.struct.dataclass
class TranslatedCache:
  """The model's own cache, and where each foreign token ends in it.

  Attributes:
    own: of the model.
    end_BS: int32 [B, S + 1]: own ids behind the first i foreign tokens.
    length_B: int32 [B], foreign tokens.
  """

  own: base.Cache
  end_BS: Array
  length_B: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translated:
  """Token-level intersection: a model drafts in a target's vocabulary.

    q'(v) = q(v's own id) / sum over the ids that both have

  Its law is the model's on the ids whose bytes are in both vocabularies, and
  nothing elsewhere. What the target wrote is fed token by token, spelled in own
  ids; so of a token that both have nothing is lost, and the others reach the
  model as some other cut of the same bytes. Everything is looked up on the
  device; the tables are parameters.

  A chain of tokens costs as many own rows as it has own ids: a pass over T
  tokens is made in chunks of T rows until all ids are through, so that a draft,
  which both have, is one row.

  Lossless as a draft: proposals are drawn from the law that is reported.
  Source: Timor et al., Accelerating LLM Inference with Lossless Speculative
    Decoding Algorithms for Heterogeneous Vocabularies, arXiv:2502.05202 (TLI).

  Attributes:
    model: the draft, with a vocabulary of its own.
    vocab_size: V, the target's.
    max_ids: R, own ids per foreign token; of longer ones the last R are fed.
    slots_per_token: slots of the own cache for each foreign token; a text that
      needs more is cut off for the draft, which then guesses worse.

  Raises:
    ValueError: a number is below 1.
  """

  model: base.LanguageModel
  vocab_size: int
  max_ids: int = 8
  slots_per_token: int = 2
  has_independent_rows = False  # Nobody has looked.

  def __post_init__(self):
    for name in ('vocab_size', 'max_ids', 'slots_per_token'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} must be >= 1, got {getattr(self, name)}.')

  @property
  def context_length(self) -> int:
    """The model's own, as if every token were one id."""
    return self.model.context_length

  @property
  def placement(self) -> Placement | None:
    """The model's own."""
    return self.model.placement

  def param_specs(self) -> dict[str, Any]:
    """{'model', 'to_draft', 'spelled', 'num_ids'}, see the top of this file."""
    table = lambda *shape: ParamSpec(
      shape=shape,
      dtype=jnp.int32,
      logical_axes=(None,) * len(shape),
      init='zeros',
    )
    return {
      'model': self.model.param_specs(),
      'to_draft': table(self.vocab_size),
      'spelled': table(self.vocab_size, self.max_ids),
      'num_ids': table(self.vocab_size),
    }

  def init(self, key: Key) -> Params:
    """A random model, and tables in which ids mean the same to both."""
    id_V = np.arange(self.vocab_size, dtype=np.int32)
    is_shared_V = id_V < self.model.vocab_size
    spelled_VR = np.zeros((self.vocab_size, self.max_ids), np.int32)
    spelled_VR[:, 0] = np.where(is_shared_V, id_V, 0)
    return {
      'model': self.model.init(key),
      'to_draft': jnp.asarray(np.where(is_shared_V, id_V, -1)),
      'spelled': jnp.asarray(spelled_VR),
      'num_ids': jnp.ones(self.vocab_size, jnp.int32),
    }

  def init_cache(
    self, batch_size: int, num_slots: int, max_rewind: int
  ) -> TranslatedCache:
    """`LanguageModel.init_cache`, S and `max_rewind` in foreign tokens."""
    own = self.model.init_cache(
      batch_size,
      num_slots * self.slots_per_token + self.max_ids,
      max_rewind * self.max_ids,
    )
    return self._pin(
      TranslatedCache(
        own=own,
        end_BS=jnp.zeros((batch_size, num_slots + 1), jnp.int32),
        length_B=jnp.zeros(batch_size, jnp.int32),
      )
    )

  def _pin(self, cache: TranslatedCache) -> TranslatedCache:
    """The model pins its own cache."""
    return cache.replace(
      end_BS=constrain(cache.end_BS, self.placement, 'batch'),
      length_B=constrain(cache.length_B, self.placement, 'batch'),
    )

  def apply(
    self,
    params: Params,
    tokens_BT: Array,
    cache: TranslatedCache,
    *,
    num_tokens_B: Array | None = None,
    positions_BT: Array | None = None,
    mask_BTT: Array | None = None,
    capture: tuple[int, ...] = (),
  ) -> tuple[base.Hidden, TranslatedCache]:
    """As `LanguageModel.apply`; a token's hidden is that of its last own id.

    Raises:
      ValueError: for trees, and for features.
    """
    if positions_BT is not None or mask_BTT is not None or capture:
      raise ValueError(
        'a translated model takes chains of tokens and has no features, got '
        'positions, a mask or capture.'
      )
    b, t = tokens_BT.shape
    if num_tokens_B is None:
      num_tokens_B = jnp.full(b, t, jnp.int32)
    cache = self._pin(cache)
    ids_BX, end_BT = _spell(params, tokens_BT, num_tokens_B)
    total_B = end_BT[:, -1]
    last_BTD = jax.eval_shape(
      lambda: (
        self.model.apply(params['model'], tokens_BT, cache.own)[0].last_BTD
      )
    )
    last_BTD = jnp.zeros(last_BTD.shape, last_BTD.dtype)

    def more(carry):
      return carry[0] < jnp.max(total_B)

    def feed(carry):
      start, last_BTD, own = carry
      chunk_BT = jax.lax.dynamic_slice_in_dim(ids_BX, start, t, axis=1)
      hidden, own = self.model.apply(
        params['model'],
        chunk_BT,
        own,
        num_tokens_B=jnp.clip(total_B - start, 0, t),
      )
      index_BT = end_BT - 1 - start
      is_here_BT1 = ((index_BT >= 0) & (index_BT < t))[:, :, None]
      found_BTD = jnp.take_along_axis(
        hidden.last_BTD, jnp.clip(index_BT, 0, t - 1)[:, :, None], axis=1
      )
      return start + t, jnp.where(is_here_BT1, found_BTD, last_BTD), own

    _, last_BTD, own = jax.lax.while_loop(
      more, feed, (jnp.int32(0), last_BTD, cache.own)
    )
    length_B, size = cache.length_B, cache.end_BS.shape[1]
    begin_B1 = jnp.take_along_axis(cache.end_BS, length_B[:, None], axis=1)
    slot_BT = length_B[:, None] + 1 + jnp.arange(t, dtype=jnp.int32)[None]
    is_real_BT = jnp.arange(t)[None] < num_tokens_B[:, None]
    slot_BT = jnp.where(is_real_BT, slot_BT, size)
    write = jax.vmap(lambda x_S, i_T, v_T: x_S.at[i_T].set(v_T, mode='drop'))
    cache = TranslatedCache(
      own=own,
      end_BS=write(cache.end_BS, slot_BT, begin_B1 + end_BT),
      length_B=jnp.minimum(length_B + num_tokens_B, size - 1),
    )
    return base.Hidden(last_BTD=last_BTD), self._pin(cache)

  def final_norm(self, params: Params, last_BTD: Array) -> Array:
    """The model's own, [B, T, D]."""
    return self.model.final_norm(params['model'], last_BTD)

  def unembed(self, params: Params, last_BTD: Array) -> Array:
    """float32 [B, T, V]: own logits of shared ids, `ABSENT` elsewhere."""
    own_BTV = self.model.unembed(params['model'], last_BTD)
    logits_BTV = own_BTV[:, :, jnp.maximum(params['to_draft'], 0)]
    logits_BTV = jnp.where(params['to_draft'] >= 0, logits_BTV, ABSENT)
    return constrain(logits_BTV, self.placement, 'batch', None, 'vocab')

  def keep(
    self,
    cache: TranslatedCache,
    start_B: Array,
    path_BM: Array | None,
    num_B: Array,
  ) -> TranslatedCache:
    """As `LanguageModel.keep`, of chains.

    Raises:
      ValueError: with a path.
    """
    if path_BM is not None:
      raise ValueError('a translated model keeps chains, got a path.')
    ends = [
      jnp.take_along_axis(cache.end_BS, index_B[:, None], axis=1)[:, 0]
      for index_B in (start_B, start_B + num_B)
    ]
    own = self.model.keep(cache.own, ends[0], None, ends[1] - ends[0])
    return self._pin(cache.replace(own=own, length_B=start_B + num_B))


def _spell(
  params: Params, tokens_BT: Array, num_tokens_B: Array
) -> tuple[Array, Array]:
  """The own ids of a pass, side by side, and where each token ends.

    tokens  7 3      spelled  7 -> a, 3 -> b c      ids  a b c 0 ..   ends 1 3

  Returns:
    int32 [B, T * R] and int32 [B, T].
  """
  spelled_VR, num_ids_V = params['spelled'], params['num_ids']
  size, r = spelled_VR.shape
  b, t = tokens_BT.shape
  tokens_BT = jnp.clip(tokens_BT, 0, size - 1)
  is_real_BT = jnp.arange(t)[None] < num_tokens_B[:, None]
  num_BT = jnp.where(is_real_BT, num_ids_V[tokens_BT], 0)
  end_BT = jnp.cumsum(num_BT, axis=1, dtype=jnp.int32)
  offset_R = jnp.arange(r, dtype=jnp.int32)
  place_BTR = (end_BT - num_BT)[:, :, None] + offset_R[None, None]
  place_BTR = jnp.where(
    offset_R[None, None] < num_BT[:, :, None], place_BTR, t * r
  )
  write = jax.vmap(lambda x_X, i_X, v_X: x_X.at[i_X].set(v_X, mode='drop'))
  ids_BX = write(
    jnp.zeros((b, t * r), jnp.int32),
    place_BTR.reshape(b, -1),
    spelled_VR[tokens_BT].reshape(b, -1),
  )
  return ids_BX, end_BT


def translate(
  model: base.LanguageModel,
  params: Params,
  draft: Tokenizer,
  target: Tokenizer,
  vocab_size: int,
) -> tuple[Translated, Params]:
  """A draft with ids of its own as one with those of a target.

  Args:
    model: the draft.
    params: its parameters.
    draft, target: the tokenizers of both.
    vocab_size: of the target's model.

  Raises:
    ValueError: no id of the target is in the draft.
  """
  wrapped = Translated(model=model, vocab_size=vocab_size)
  tables = make_tables(
    target,
    draft,
    vocab_size=vocab_size,
    draft_vocab_size=model.vocab_size,
    max_ids=wrapped.max_ids,
  )
  specs = wrapped.param_specs()
  placed = {
    name: put(table, model.placement, *specs[name].logical_axes)
    for name, table in tables.items()
  }
  return wrapped, {'model': params, **placed}


def make_tables(
  target: Tokenizer,
  draft: Tokenizer,
  *,
  vocab_size: int,
  draft_vocab_size: int,
  max_ids: int,
) -> dict[str, np.ndarray]:
  """The tables of `Translated`, from what every id's bytes are.

  Two ids are the same if they have the same bytes and both are text, or both
  are control tokens. What a target's id lacks in the draft is spelled by the
  longest of the draft's tokens, again and again, without the bytes that none
  begins with; where nothing is left, by the draft's end of a text, or its id 0.

  Args:
    target, draft: the tokenizers.
    vocab_size, draft_vocab_size: of the models; ids beyond a tokenizer's are
      nobody's.
    max_ids: R.

  Raises:
    ValueError: no id of the target is in the draft.

  >>> from specjax.tokenizers import ByteTokenizer
  >>> same = make_tables(ByteTokenizer(), ByteTokenizer(), vocab_size=258,
  ...                    draft_vocab_size=257, max_ids=2)
  >>> same['to_draft'][255:].tolist()
  [255, 256, -1]
  """
  own = {}
  for i in range(min(draft.vocab_size, draft_vocab_size)):
    key = _key(draft, i)
    if key[0] and key not in own:
      own[key] = i
  longest = max((len(text) for text, _ in own), default=0)
  to_draft = np.full(vocab_size, -1, np.int32)
  spelled = np.zeros((vocab_size, max_ids), np.int32)
  spelled[:, 0] = draft.eos_id or 0
  num_ids = np.ones(vocab_size, np.int32)
  for i in range(min(target.vocab_size, vocab_size)):
    text, is_special = _key(target, i)
    ids = [own[text, is_special]] if (text, is_special) in own else None
    if ids:
      to_draft[i] = ids[0]
    elif not is_special:
      ids = _longest_first(text, own, longest)[-max_ids:]
    if ids:
      spelled[i, : len(ids)] = ids
      num_ids[i] = len(ids)
  if np.all(to_draft < 0):
    raise ValueError('target and draft must have an id in common, got none.')
  return {'to_draft': to_draft, 'spelled': spelled, 'num_ids': num_ids}


def _key(tokenizer: Tokenizer, token_id: int) -> tuple[bytes, bool]:
  return tokenizer.token_bytes(token_id), tokenizer.is_special(token_id)


def _longest_first(
  text: bytes, own: dict[tuple[bytes, bool], int], longest: int
) -> Sequence[int]:
  ids, start = [], 0
  while start < len(text):
    for end in range(min(len(text), start + longest), start, -1):
      found = own.get((text[start:end], False))
      if found is not None:
        ids.append(found)
        break
    start = end if found is not None else start + 1
  return ids

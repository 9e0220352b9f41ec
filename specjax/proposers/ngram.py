"""Prompt lookup: the text itself is the draft."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax.proposers.base import (
  Outcome,
  Proposal,
  TargetView,
  check_num_draft_tokens,
)
from specjax.proposers.stopping import Fixed, StoppingRule
from specjax.sampling import Sampling
from specjax.shapes import Array, Key, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGram:
  """Proposes what followed an earlier occurrence of the last few tokens.

  The longest suffix of `max_ngram`..`min_ngram` tokens that occurs earlier in
  prompt or output decides; among its occurrences the latest that is followed
  by K tokens, else the latest of all with the shorter draft it allows (so a
  periodic text drafts K at once). No occurrence, no draft: a token is never
  made up.

    text   a b c d a b c e a b c      n = 3: 'abc' ends at 2 and at 6
                         ^ ^ ^        latest with K = 2 following: e a

  Everything happens on the device.

  Lossless: the drafts are not drawn, so q is one-hot.
  Source: Saxena, Prompt Lookup Decoding, 2023. Deviation: his takes the
  earliest match and only full continuations.

  Attributes:
    num_draft_tokens: K, 1..64.
    stop: ends a row's drafts before K; one that reads no logits.
    min_ngram: shortest suffix that counts, at least 1.
    max_ngram: longest suffix that is looked for.

  Raises:
    ValueError: a number is out of range, or `stop` reads logits.
  """

  num_draft_tokens: int
  stop: StoppingRule = Fixed()
  min_ngram: int = 1
  max_ngram: int = 3
  target_features = ()

  def __post_init__(self):
    check_num_draft_tokens(self.num_draft_tokens)
    if not 1 <= self.min_ngram <= self.max_ngram <= 64:
      raise ValueError(
        'min_ngram and max_ngram must satisfy 1 <= min <= max <= 64, '
        f'got {self.min_ngram} and {self.max_ngram}.'
      )
    if self.stop.reads_logits:
      raise ValueError(
        'ngram has no logits, so stop must be a rule that reads none, got '
        f'{self.stop}.'
      )

  def init(
    self,
    params: Params,
    target: TargetView,
    tokens_BL: Array,
    length_B: Array,
    num_slots: int,
  ) -> Any:
    """The rule's state: the token buffer is the table."""
    del params, target, length_B, num_slots
    return self.stop.init(tokens_BL.shape[0])

  def propose(
    self,
    params: Params,
    keys_BK: Key,
    state: Any,
    target: TargetView,
    tokens_BL: Array,
    length_B: Array,
    sampling: Sampling,
  ) -> tuple[Proposal, Any]:
    """Looks every row's suffix up in the row itself."""
    del params, keys_BK, target, sampling
    k, size = self.num_draft_tokens, tokens_BL.shape[1]
    index_1L = jnp.arange(size, dtype=jnp.int32)[None, :]
    last_B1 = length_B[:, None] - 1

    # run_BL: how many tokens up to and with i equal the row's last ones.
    run_BL = jnp.zeros(tokens_BL.shape, jnp.int32)
    is_equal_BL = index_1L < last_B1
    for back in range(self.max_ngram):
      suffix_B1 = jnp.take_along_axis(
        tokens_BL, jnp.maximum(last_B1 - back, 0), axis=1
      )
      shifted_BL = jnp.roll(tokens_BL, back, axis=1)
      is_equal_BL &= (shifted_BL == suffix_B1) & (index_1L >= back)
      run_BL += is_equal_BL

    num_behind_BL = jnp.where(run_BL > 0, last_B1 - index_1L, 0)
    # One number ranks the matches: longer first, then full, then later.
    rank_BL = (2 * run_BL + (num_behind_BL >= k)) * size + index_1L
    rank_BL = jnp.where(run_BL >= self.min_ngram, rank_BL, -1)
    match_B1 = jnp.argmax(rank_BL, axis=1, keepdims=True).astype(jnp.int32)
    is_found_B = jnp.max(rank_BL, axis=1) >= 0
    index_BK = match_B1 + 1 + jnp.arange(k, dtype=jnp.int32)[None, :]
    draft_BK = jnp.take_along_axis(
      tokens_BL, jnp.minimum(index_BK, size - 1), axis=1
    )
    num_draft_B = jnp.minimum(
      (last_B1 - match_B1)[:, 0], self.stop.most(state, k)
    )
    num_draft_B = jnp.where(is_found_B, num_draft_B, 0)
    return Proposal(draft_BK, None, num_draft_B), state

  def observe(self, params: Params, state: Any, outcome: Outcome) -> Any:
    """For the rule alone: the committed text is all there is."""
    del params
    return self.stop.observe(state, outcome)

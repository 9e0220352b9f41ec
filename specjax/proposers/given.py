"""Drafts that come from outside: what the host, or a script, has laid ready."""

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp

from specjax.models.base import Chunk
from specjax.proposers.base import (
  Outcome,
  Proposal,
  Proposer,
  TargetView,
  check_num_draft_tokens,
)
from specjax.sampling import Sampling
from specjax.shapes import Array, Key, Params


@flax.struct.dataclass
class Offer:
  """Drafts for one step.

  Attributes:
    draft_BK: int32 [B, K].
    num_draft_B: int32 [B], 0..K; 0 once they were proposed.
  """

  draft_BK: Array
  num_draft_B: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
  """Proposes what lies in its state, once.

  A host that drafts puts an `Offer` into `DecodeState.proposer_state` between
  two steps, `run(max_steps=1)`, as `text_drafts.TextDrafter` does.

  Lossless: the drafts are not drawn, so q is one-hot, and every rule keeps its
  law, whatever they are.
  Source: none; the door for drafts that are made on the host.

  Attributes:
    num_draft_tokens: K, 1..64.

  Raises:
    ValueError: K is out of range.
  """

  num_draft_tokens: int
  target_features = ()

  def __post_init__(self):
    check_num_draft_tokens(self.num_draft_tokens)

  def init(
    self,
    params: Params,
    target: TargetView,
    tokens_BL: Array,
    length_B: Array,
    num_slots: int,
  ) -> Offer:
    """Nothing is offered yet."""
    del params, target, num_slots
    shape = tokens_BL.shape[0], self.num_draft_tokens
    return Offer(jnp.zeros(shape, jnp.int32), jnp.zeros_like(length_B))

  def propose(
    self,
    params: Params,
    keys_BK: Key,
    state: Offer,
    target: TargetView,
    tokens_BL: Array,
    length_B: Array,
    sampling: Sampling,
  ) -> tuple[Proposal, Offer]:
    """What is offered; the decoder cuts it to the row's room."""
    del params, keys_BK, target, tokens_BL, length_B, sampling
    proposal = Proposal(state.draft_BK, None, state.num_draft_B)
    return proposal, state.replace(
      num_draft_B=jnp.zeros_like(state.num_draft_B)
    )

  def observe(self, params: Params, state: Offer, outcome: Outcome) -> Offer:
    """Nothing to learn: the host sees the text."""
    del params, outcome
    return state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scripted:
  """Forced acceptance: so many drafts are right, and the next one is wrong.

  For measuring a system apart from its models. The parameters hold the text
  that plain decoding writes with the same seeds and settings; of every step's
  drafts the first `num_right` are this text, and the next one is another id. A
  proposer inside does its work, and its guesses are thrown away, so that a step
  costs what it costs; its laws are reported, and no more than that.

  Lossless for `Greedy` and `Coupled`, which do not look at the reported laws.
  `Rejection` and `Block` must not be used with it; `verify.forced` is for the
  former.
  Source: none; an instrument for measuring.

  Attributes:
    proposer: works for each step; its parameters are
      params['proposer']['inner'].
    num_right: 0..K.

  Raises:
    ValueError: `num_right` is out of range.
  """

  proposer: Proposer
  num_right: int

  def __post_init__(self):
    if not 0 <= self.num_right <= self.num_draft_tokens:
      raise ValueError(
        f'num_right must be in 0..{self.num_draft_tokens}, got '
        f'{self.num_right}.'
      )

  @property
  def num_draft_tokens(self) -> int:
    """K of the proposer inside."""
    return self.proposer.num_draft_tokens

  @property
  def target_features(self) -> tuple[int, ...]:
    """Those of the proposer inside."""
    return self.proposer.target_features

  def _inner(self, params: Params) -> Params:
    return {**params, 'proposer': params['proposer']['inner']}

  def init(
    self,
    params: Params,
    target: TargetView,
    tokens_BL: Array,
    length_B: Array,
    num_slots: int,
  ) -> Any:
    """The state of the proposer inside."""
    return self.proposer.init(
      self._inner(params), target, tokens_BL, length_B, num_slots
    )

  def read_prompt(
    self,
    params: Params,
    state: Any,
    chunk: Chunk,
    tokens_BL: Array,
    length_B: Array,
  ) -> Any:
    """For the proposer inside, if it reads features."""
    return self.proposer.read_prompt(
      self._inner(params), state, chunk, tokens_BL, length_B
    )

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
    """The script at the row's length; params['proposer']['text'] is [B, L]."""
    proposal, state = self.proposer.propose(
      self._inner(params), keys_BK, state, target, tokens_BL, length_B, sampling
    )
    text_BL = params['proposer']['text']
    index_1K = jnp.arange(self.num_draft_tokens, dtype=jnp.int32)[None]
    place_BK = jnp.minimum(length_B[:, None] + index_1K, text_BL.shape[1] - 1)
    draft_BK = jnp.take_along_axis(text_BL, place_BK, axis=1)
    # Id 0 and id 1 are in every vocabulary.
    other_BK = jnp.where(draft_BK == 0, 1, 0)
    draft_BK = jnp.where(index_1K == self.num_right, other_BK, draft_BK)
    num_draft_B = jnp.full_like(length_B, self.num_draft_tokens)
    return proposal._replace(draft_BK=draft_BK, num_draft_B=num_draft_B), state

  def observe(self, params: Params, state: Any, outcome: Outcome) -> Any:
    """For the proposer inside: it learns of the scripted drafts."""
    return self.proposer.observe(self._inner(params), state, outcome)

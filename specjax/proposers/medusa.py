"""Heads that each guess a token of its own, all from one hidden: Medusa."""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specjax import sampling as sampling_lib
from specjax.models.base import Chunk
from specjax.models.heads import base as heads
from specjax.proposers.base import (
  Outcome,
  Proposal,
  TargetView,
  check_num_draft_tokens,
)
from specjax.proposers.drafting import Laws, draw_chain, row_of
from specjax.proposers.stopping import Fixed, StoppingRule
from specjax.sampling import Sampling
from specjax.shapes import Array, Key, Params
from specjax.sharding import constrain, constrain_rows


@flax.struct.dataclass
class MedusaState:
  """What Medusa carries.

  Attributes:
    features_BE: the target's of the token before the pending one; zeros where
      there is none.
    stop: the stopping rule's state.
  """

  features_BE: Array
  stop: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Medusa:
  """Drafts K tokens at once, none of which has seen another.

  The feature of the last token that the target has read gives K laws, one for
  each token behind the pending one. Sampling settings are applied draft by
  draft, so penalties count the drafts before. A row of one token has no feature
  and is proposed nothing.

  Lossless: drafts are drawn from the laws that are reported.
  Source: Cai et al., Medusa, arXiv:2401.10774, section 2.1. Deviations: a chain
    in place of a tree, and an exact rule in place of typical acceptance.

  Attributes:
    heads: at least K.
    num_draft_tokens: K, 1..64.
    stop: ends a row's drafts before K.

  Raises:
    ValueError: K is out of range, or above the number of heads.
  """

  heads: heads.IndependentHeads
  num_draft_tokens: int
  stop: StoppingRule = Fixed()

  def __post_init__(self):
    check_num_draft_tokens(self.num_draft_tokens)
    if self.heads.num_heads < self.num_draft_tokens:
      raise ValueError(
        f'num_draft_tokens must be at most {self.heads.num_heads}, the number '
        f'of heads, got {self.num_draft_tokens}.'
      )

  @property
  def target_features(self) -> tuple[int, ...]:
    """The layers that the heads read, see `Hidden.features_BTE`."""
    return self.heads.target_features

  def init(
    self,
    params: Params,
    target: TargetView,
    tokens_BL: Array,
    length_B: Array,
    num_slots: int,
  ) -> MedusaState:
    """No feature yet: `read_prompt` takes it."""
    del params, target, num_slots
    b = tokens_BL.shape[0]
    features_BE = jnp.zeros(
      (b, self.heads.feature_dim), self.heads.feature_dtype
    )
    return MedusaState(self._pin(features_BE), self.stop.init(b))

  def _pin(self, x: Any) -> Any:
    """Rows where the heads' rows are."""
    return constrain_rows(x, self.heads.placement)

  def read_prompt(
    self,
    params: Params,
    state: MedusaState,
    chunk: Chunk,
    tokens_BL: Array,
    length_B: Array,
  ) -> MedusaState:
    """Takes the feature of the last token but the pending one."""
    del params, tokens_BL
    features_BTE = chunk.hidden.features_BTE
    num_new = features_BTE.shape[1]
    last_B = length_B - 2 - chunk.start
    last_BE = row_of(features_BTE, jnp.clip(last_B, 0, num_new - 1))
    is_here_B1 = ((last_B >= 0) & (last_B < num_new))[:, None]
    features_BE = jnp.where(is_here_B1, last_BE, state.features_BE)
    return state.replace(features_BE=self._pin(features_BE))

  def propose(
    self,
    params: Params,
    keys_BK: Key,
    state: MedusaState,
    target: TargetView,
    tokens_BL: Array,
    length_B: Array,
    sampling: Sampling,
  ) -> tuple[Proposal, MedusaState]:
    """One pass through all heads, then K draws."""
    k, size = self.num_draft_tokens, self.heads.vocab_size
    counts = sampling_lib.penalty_counts(
      sampling, tokens_BL, length_B, target.prompt_length_B, size
    )
    logits = self.heads.logits(params, state.features_BE[:, None], k)
    placement = self.heads.target.placement
    logits_KB1V = constrain(
      jnp.stack(logits), placement, None, 'batch', None, 'vocab'
    )

    def feed(_: Array, i: Array) -> tuple[Array, Array]:
      return jax.lax.dynamic_index_in_dim(logits_KB1V, i, 0, False), i + 1

    most_B = jnp.minimum(self.stop.most(state.stop, k), target.room_B)
    proposal, _ = draw_chain(
      Laws(lambda logits_B1V: logits_B1V, size, placement),
      keys_BK,
      feed,
      jnp.int32(0),
      row_of(tokens_BL, length_B - 1),
      None,
      counts,
      sampling,
      most_B=jnp.where(length_B > 1, most_B, 0),
      goes_on=functools.partial(self.stop.goes_on, state.stop),
    )
    return proposal, state

  def observe(
    self, params: Params, state: MedusaState, outcome: Outcome
  ) -> MedusaState:
    """Takes the feature of the last emitted token but one."""
    del params
    features_BNE = outcome.hidden.features_BTE
    row_B = jnp.maximum(outcome.num_emitted_B - 1, 0)
    if outcome.path_BM is not None:
      row_B = row_of(outcome.path_BM, row_B)
    is_live_B1 = (outcome.num_emitted_B > 0)[:, None]
    features_BE = jnp.where(
      is_live_B1, row_of(features_BNE, row_B), state.features_BE
    )
    return state.replace(
      features_BE=self._pin(features_BE),
      stop=self._pin(self.stop.observe(state.stop, outcome)),
    )

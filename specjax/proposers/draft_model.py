"""A second, smaller language model drafts token by token."""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax.numpy as jnp

from specjax import sampling as sampling_lib
from specjax.models import base as models
from specjax.proposers.base import (
  Outcome,
  Proposal,
  TargetView,
  check_num_draft_tokens,
)
from specjax.proposers.drafting import Laws, draw_chain
from specjax.proposers.stopping import Fixed, StoppingRule
from specjax.sampling import Sampling
from specjax.shapes import Array, Key, Params
from specjax.sharding import constrain_rows


@flax.struct.dataclass
class DraftState:
  """What a draft model carries.

  Attributes:
    cache: the model's.
    stop: the stopping rule's state.
  """

  cache: models.Cache
  stop: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel:
  """Drafts with a language model that shares the target's vocabulary.

  Of the committed text the model's cache has *absorbed with true inputs* all
  but the last two tokens; `propose` feeds those two first, so a step that
  accepted every draft, or made none, is no special case:

    step t      ... a b | d1 d2 d3      b pending, fed: a b d1 d2
    all kept    ... a b d1 d2 d3 x      next feeds: d3 x (d3 was never fed)
    none kept   ... a b y               next feeds: b y, over the old d1 d2
    none made   ... a b y               next feeds: b y

  A row whose text has reached the model's context gets no more drafts; the
  row itself goes on.

  Lossless: drafts are drawn from the laws that are reported.
  Source: Leviathan et al., arXiv:2211.17192, Algorithm 1; Chen et al.,
    arXiv:2302.01318, Algorithm 2.

  Attributes:
    model: the draft, any `LanguageModel`.
    num_draft_tokens: K, 1..64.
    stop: ends a row's drafts before K.
    prefill_chunk: prompt tokens per pass.

  Raises:
    ValueError: K is out of range.
  """

  model: models.LanguageModel
  num_draft_tokens: int
  stop: StoppingRule = Fixed()
  prefill_chunk: int = 128
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
  ) -> DraftState:
    """Feeds all but the last two prompt tokens to an empty cache."""
    del target
    cache = self.model.init_cache(
      tokens_BL.shape[0], num_slots, max_rewind=self.num_draft_tokens + 1
    )
    cache = models.prefill(
      self.model,
      params['proposer'],
      cache,
      tokens_BL,
      jnp.maximum(length_B - 2, 0),
      self.prefill_chunk,
    )
    return DraftState(cache, self.stop.init(tokens_BL.shape[0]))

  def propose(
    self,
    params: Params,
    keys_BK: Key,
    state: DraftState,
    target: TargetView,
    tokens_BL: Array,
    length_B: Array,
    sampling: Sampling,
  ) -> tuple[Proposal, DraftState]:
    """A pass over two rows; then one over one row for each draft but the first.

    The first pass is made whether or not a row drafts, to absorb the text.
    """
    absorbed_B = jnp.maximum(length_B - 2, 0)
    index_B2 = absorbed_B[:, None] + jnp.arange(2, dtype=jnp.int32)[None, :]
    index_B2 = jnp.minimum(index_B2, tokens_BL.shape[1] - 1)
    fresh_B2 = jnp.take_along_axis(tokens_BL, index_B2, axis=1)
    # The rows may be split over fewer devices than the target's are. Pinned
    # here, it is their ids that are gathered, and not the activations.
    keys_BK, fresh_B2, absorbed_B, length_B, room_B, sampling = constrain_rows(
      (keys_BK, fresh_B2, absorbed_B, length_B, target.room_B, sampling),
      self.model.placement,
    )
    # A draft that is past its context falls silent.
    context_B = jnp.maximum(self.model.context_length - length_B, 0)
    most_B = self.stop.most(state.stop, self.num_draft_tokens)
    cache = self.model.keep(
      state.cache, absorbed_B, None, jnp.zeros_like(length_B)
    )
    num_fresh_B = length_B - absorbed_B
    hidden, cache = self.model.apply(
      params['proposer'], fresh_B2, cache, num_tokens_B=num_fresh_B
    )
    last_B1 = (num_fresh_B - 1)[:, None]
    pending_B1 = jnp.take_along_axis(fresh_B2, last_B1, axis=1)
    last_B1D = jnp.take_along_axis(hidden.last_BTD, last_B1[..., None], axis=1)
    counts = sampling_lib.penalty_counts(
      sampling,
      tokens_BL,
      length_B,
      target.prompt_length_B,
      self.model.vocab_size,
    )

    def feed(draft_B1, cache):
      hidden, cache = self.model.apply(params['proposer'], draft_B1, cache)
      return hidden.last_BTD, cache

    proposal, cache = draw_chain(
      Laws(
        functools.partial(self.model.unembed, params['proposer']),
        self.model.vocab_size,
        self.model.placement,
      ),
      keys_BK,
      feed,
      cache,
      pending_B1[:, 0],
      last_B1D,
      counts,
      sampling,
      most_B=jnp.minimum(most_B, jnp.minimum(room_B, context_B)),
      goes_on=functools.partial(self.stop.goes_on, state.stop),
    )
    return proposal, state.replace(cache=cache)

  def observe(
    self, params: Params, state: DraftState, outcome: Outcome
  ) -> DraftState:
    """For the rule alone: `propose` goes back by the row's length."""
    del params
    stop = self.stop.observe(state.stop, outcome)
    return state.replace(stop=constrain_rows(stop, self.model.placement))

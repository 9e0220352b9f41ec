"""A head drafts token by token from the target's hiddens: MTP and EAGLE."""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax.numpy as jnp

from specjax import sampling as sampling_lib
from specjax.models.base import Cache, Chunk
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
from specjax.sharding import constrain_rows


@flax.struct.dataclass
class HeadState:
  """What a feature-fed head carries.

  Attributes:
    cache: of its entries; those that it drafted itself are forgotten before
      they are read again.
    feature_BND: the target's features of the last tokens, as `fuse` gives them.
    num_fresh_B: int32 [B], 0..N, how many of them are in no entry yet.
    stop: the stopping rule's state.
  """

  cache: Cache
  feature_BND: Array
  num_fresh_B: Array
  stop: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureFed:
  """Drafts with a head that goes on from its own output.

  Entry t joins the target's feature of token t with token t + 1; the law behind
  it is that of token t + 2. A step verifies with N rows, so it leaves features
  of as many tokens as it emits. `propose` first makes their entries, over what
  it drafted itself, so that each rests on true features; then one more entry
  for each draft but the first, from its own output:

    step t      ... a p | d1 d2 d3         p pending, K = 3, last entry (fa, p)
                drafted entries            (g1, d1) (g2, d2)
    d1 kept     ... a p d1 x               features of p and d1 are there
                next makes                 (fp, d1) (fd1, x)

  A row of one token has no feature and is proposed nothing; a row whose text
  has reached the head's context gets no more drafts.

  Lossless: drafts are drawn from the laws that are reported, which are over the
  target's ids and -inf where the head has none.
  Source: DeepSeek-V3, arXiv:2412.19437, section 2.2; Li et al., EAGLE,
    arXiv:2401.15077, section 3.1, and EAGLE-3, arXiv:2503.01840, section 3.
    Deviation: a chain in place of a tree.

  Attributes:
    head: any `FeatureHead`.
    num_draft_tokens: K, 1..64.
    stop: ends a row's drafts before K.

  Raises:
    ValueError: K is out of range.
  """

  head: heads.FeatureHead
  num_draft_tokens: int
  stop: StoppingRule = Fixed()

  def __post_init__(self):
    check_num_draft_tokens(self.num_draft_tokens)

  @property
  def target_features(self) -> tuple[int, ...]:
    """The layers that the head reads, see `Hidden.features_BTE`."""
    return self.head.target_features

  def init(
    self,
    params: Params,
    target: TargetView,
    tokens_BL: Array,
    length_B: Array,
    num_slots: int,
  ) -> HeadState:
    """Empty: `read_prompt` makes the entries."""
    del params, target
    b, n = tokens_BL.shape[0], self.num_draft_tokens + 1
    feature_BND = jnp.zeros(
      (b, n, self.head.feature_dim), self.head.feature_dtype
    )
    return HeadState(
      cache=self.head.block.init_cache(b, num_slots, max_rewind=n),
      feature_BND=self._pin(feature_BND),
      num_fresh_B=jnp.minimum(length_B - 1, 1),
      stop=self.stop.init(b),
    )

  def _pin(self, x: Any) -> Any:
    """Rows where the head's rows are."""
    return constrain_rows(x, self.head.block.placement)

  def read_prompt(
    self,
    params: Params,
    state: HeadState,
    chunk: Chunk,
    tokens_BL: Array,
    length_B: Array,
  ) -> HeadState:
    """Makes the entries of a chunk; the prompt's last one is left to `propose`.

    It is the one behind which the first draft is drawn.
    """
    feature_BTD = self.head.fuse(params, chunk.hidden.features_BTE)
    num_new = feature_BTD.shape[1]
    last_B = length_B - 2 - chunk.start
    index_T = chunk.start + 1 + jnp.arange(num_new, dtype=jnp.int32)
    _, cache = self.head.apply(
      params,
      feature_BTD,
      tokens_BL[:, jnp.minimum(index_T, tokens_BL.shape[1] - 1)],
      state.cache,
      num_tokens_B=jnp.clip(last_B, 0, num_new),
    )
    last_BD = row_of(feature_BTD, jnp.clip(last_B, 0, num_new - 1))
    is_here_B1 = ((last_B >= 0) & (last_B < num_new))[:, None]
    fresh_BD = jnp.where(is_here_B1, last_BD, state.feature_BND[:, 0])
    return state.replace(
      cache=cache,
      feature_BND=self._pin(state.feature_BND.at[:, 0].set(fresh_BD)),
    )

  def propose(
    self,
    params: Params,
    keys_BK: Key,
    state: HeadState,
    target: TargetView,
    tokens_BL: Array,
    length_B: Array,
    sampling: Sampling,
  ) -> tuple[Proposal, HeadState]:
    """A pass over N entries; then one over one for each draft but the first."""
    head, k = self.head, self.num_draft_tokens
    num_fresh_B = state.num_fresh_B
    start_B = length_B - 1 - num_fresh_B
    index_BN = start_B[:, None] + 1 + jnp.arange(k + 1, dtype=jnp.int32)[None]
    index_BN = jnp.minimum(index_BN, tokens_BL.shape[1] - 1)
    cache = head.block.keep(state.cache, start_B, None, jnp.zeros_like(start_B))
    next_BND, cache = head.apply(
      params,
      state.feature_BND,
      self._pin(jnp.take_along_axis(tokens_BL, index_BN, axis=1)),
      cache,
      num_tokens_B=num_fresh_B,
    )
    last_B1D = row_of(next_BND, jnp.maximum(num_fresh_B - 1, 0))[:, None]
    counts = sampling_lib.penalty_counts(
      sampling, tokens_BL, length_B, target.prompt_length_B, head.vocab_size
    )

    def feed(draft_B1: Array, memory: Any) -> tuple[Array, Any]:
      feature_B1D, cache = memory
      feature_B1D, cache = head.apply(params, feature_B1D, draft_B1, cache)
      return feature_B1D, (feature_B1D, cache)

    most_B = jnp.minimum(self.stop.most(state.stop, k), target.room_B)
    context_B = jnp.maximum(head.block.context_length - length_B, 0)
    proposal, (_, cache) = draw_chain(
      Laws(
        functools.partial(head.unembed, params),
        head.vocab_size,
        head.target.placement,
        self._widen(params),
      ),
      keys_BK,
      feed,
      (last_B1D, cache),
      row_of(tokens_BL, length_B - 1),
      last_B1D,
      counts,
      sampling,
      most_B=jnp.where(length_B > 1, jnp.minimum(most_B, context_B), 0),
      goes_on=functools.partial(self.stop.goes_on, state.stop),
    )
    return proposal, state.replace(
      cache=cache, num_fresh_B=jnp.zeros_like(num_fresh_B)
    )

  def _widen(self, params: Params):
    if self.head.num_ids is None:
      return None
    ids_R = params['proposer']['ids']
    return lambda logits: heads.widen(logits, ids_R, self.head.vocab_size)

  def observe(
    self, params: Params, state: HeadState, outcome: Outcome
  ) -> HeadState:
    """Takes the features of what was emitted: of the rows along its path."""
    n = self.num_draft_tokens + 1
    features_BNE = outcome.hidden.features_BTE
    if outcome.path_BM is not None:
      features_BNE = jnp.take_along_axis(
        features_BNE, outcome.path_BM[:, :, None], axis=1
      )
    return state.replace(
      feature_BND=self._pin(self.head.fuse(params, features_BNE[:, :n])),
      num_fresh_B=self._pin(outcome.num_emitted_B),
      stop=self._pin(self.stop.observe(state.stop, outcome)),
    )

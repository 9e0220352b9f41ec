"""The target's own first layers draft; there is no second model."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from specjax import sampling as sampling_lib
from specjax.models import base as models
from specjax.models.transformer import Transformer
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyExit:
  """Drafts with the first layers of the target, its final norm and its head.

  `logits = head(final_norm(x_E))`, x_E being the stream behind block E. The
  committed text lies in the target's own cache, which is read and never
  written; what is drafted lies beside it, in a cache of K slots that lives for
  one call:

    target's cache, layers 0..E-1    a b c . . .   read
    beside it                        p d1 d2       p pending, K = 3; d3 is
                                                   drawn and not fed

  So there is nothing to roll back, and no copy of a cache; the state is that of
  the stopping rule. What the exit costs is E of the layers for each draft, one
  row each. How often it is right is up to the target: models that were not
  trained for it exit late.

  Lossless: the drafts are drawn from the laws that are reported.
  Source: Elhoushi et al., LayerSkip, arXiv:2404.16710, section 4.3, and Zhang
    et al., Draft & Verify, arXiv:2309.08168. Deviation: the verification runs
    all layers, the first E once more, as for any other proposer.

  Attributes:
    model: the target itself.
    exit_layer: E, at least 1 and below the number of layers.
    num_draft_tokens: K, 1..64.
    stop: ends a row's drafts before K.

  Raises:
    ValueError: the model is no transformer, or a number is out of range.
  """

  model: Transformer
  exit_layer: int
  num_draft_tokens: int
  stop: StoppingRule = Fixed()
  target_features = ()

  def __post_init__(self):
    check_num_draft_tokens(self.num_draft_tokens)
    if not isinstance(self.model, Transformer):
      raise ValueError(
        'early exit needs a transformer for a target, whose first layers '
        f'draft, got a {type(self.model).__name__}.'
      )
    if not 1 <= self.exit_layer < self.model.num_layers:
      raise ValueError(
        f'exit_layer must be at least 1 and below {self.model.num_layers}, '
        f"the target's number of layers, got {self.exit_layer}."
      )

  @property
  def first_layers(self) -> Transformer:
    """The draft: the target without the layers behind the exit."""
    return dataclasses.replace(
      self.model,
      windows=self.model.windows[: self.exit_layer],
      ropes=self.model.ropes[: self.exit_layer],
    )

  def first_params(self, params: Params) -> Params:
    """The draft's parameters: those of the target, less whole layers."""
    return {**params, 'layers': params['layers'][: self.exit_layer]}

  def init(
    self,
    params: Params,
    target: TargetView,
    tokens_BL: Array,
    length_B: Array,
    num_slots: int,
  ) -> Any:
    """The rule's state: the target's cache is the memory."""
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
    """Feeds the pending token and all drafts but the last, one by one."""
    draft, draft_params = self.first_layers, self.first_params(params['target'])
    cache = models.KVCache(
      k=target.cache.k[: self.exit_layer],
      v=target.cache.v[: self.exit_layer],
      length_B=target.cache.length_B,
    )

    def feed(tokens_B1, side):
      hidden, side = draft.apply_beside(draft_params, tokens_B1, cache, side)
      return hidden.last_BTD, side

    k = self.num_draft_tokens
    side = draft.init_cache(tokens_BL.shape[0], num_slots=k, max_rewind=0)
    pending_B1 = jnp.take_along_axis(tokens_BL, (length_B - 1)[:, None], axis=1)
    most_B = self.stop.most(state, k)
    counts = sampling_lib.penalty_counts(
      sampling, tokens_BL, length_B, target.prompt_length_B, draft.vocab_size
    )
    proposal, _ = draw_chain(
      Laws(
        functools.partial(draft.unembed, draft_params),
        draft.vocab_size,
        draft.placement,
      ),
      keys_BK,
      feed,
      side,
      pending_B1[:, 0],
      None,
      counts,
      sampling,
      most_B=jnp.minimum(most_B, target.room_B),
      goes_on=functools.partial(self.stop.goes_on, state),
    )
    return proposal, state

  def observe(self, params: Params, state: Any, outcome: Outcome) -> Any:
    """For the rule alone: the drafts' cache is gone."""
    del params
    return constrain_rows(
      self.stop.observe(state, outcome), self.model.placement
    )

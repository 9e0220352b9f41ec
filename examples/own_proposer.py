"""A proposer of your own: it draws each draft given the token before it."""

import dataclasses

import jax.numpy as jnp

from specjax import sampling as sampling_lib
from specjax.proposers.base import Proposal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bigram:
  """Its parameters are log-weights [V, V]: row i is the law behind token i.

  Lossless: any law will do, as long as it is the one that is reported.
  """

  num_draft_tokens: int
  target_features = ()

  def init(self, params, target, tokens_BL, length_B, num_slots):
    return ()  # It remembers nothing.

  def propose(
    self, params, keys_BK, state, target, tokens_BL, length_B, sampling
  ):
    token_B = jnp.take_along_axis(tokens_BL, length_B[:, None] - 1, 1)[:, 0]
    drafts, laws = [], []
    for i in range(self.num_draft_tokens):
      laws.append(params['proposer'][token_B])
      token_B = sampling_lib.draw(laws[-1], keys_BK[:, i], sampling)
      drafts.append(token_B)
    num_draft_B = jnp.full_like(length_B, self.num_draft_tokens)
    return Proposal(
      jnp.stack(drafts, 1), jnp.stack(laws, 1), num_draft_B
    ), state

  def observe(self, params, state, outcome):
    return state

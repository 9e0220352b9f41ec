"""A verification rule of your own: the target draws without looking."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax import noise as noise_lib
from specjax.verify import chain


@dataclasses.dataclass(frozen=True)
class Matching:
  """Accepts a draft iff the target, drawing by itself, draws the same token.

  Lossless, and the very tokens of plain sampling. It accepts with probability
  sum p q, where `Rejection` has sum min(p, q).
  """

  name = 'matching'
  draft_purpose = noise_lib.DRAFT  # Not the target's noise: see `Coupled`.

  def __call__(
    self, noise, draft_K, draft_log_weights_KV, num_draft, target_log_weights_NV
  ):
    index_N = jnp.arange(target_log_weights_NV.shape[0])
    own_N = jax.vmap(
      lambda log_weights_V, i: chain.draw_token(log_weights_V, noise.token_N, i)
    )(target_log_weights_NV, index_N)
    is_right_K = (draft_K == own_N[:-1]) & (index_N[:-1] < num_draft)
    num_accepted = jnp.sum(jnp.cumprod(is_right_K), dtype=jnp.int32)
    return chain.Verdict(num_accepted, own_N[num_accepted])

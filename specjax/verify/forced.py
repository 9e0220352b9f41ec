"""Forced acceptance, for measuring systems apart from models."""

import dataclasses

import jax.numpy as jnp

from specjax.shapes import Array
from specjax.verify import chain


@dataclasses.dataclass(frozen=True)
class Forced:
  """`Rejection` with scripted uniforms: so many drafts are accepted.

    u_i = 0 for i < num_accepted, else 2

  A draft that the target could never emit is still rejected. At temperature 0
  a batch is decided greedily, and nothing is forced.

  Lossy: the text has the law of whatever drafts were accepted. `num_accepted`
  controls it; without drafts the text is the target's.
  Source: none; an instrument for measuring.

  Attributes:
    num_accepted: per step, at least 0.

  Raises:
    ValueError: `num_accepted` is below 0.
  """

  num_accepted: int
  draft_purpose = chain.Rejection.draft_purpose

  def __post_init__(self):
    if self.num_accepted < 0:
      raise ValueError(f'num_accepted must be >= 0, got {self.num_accepted}.')

  @property
  def name(self) -> str:
    """With the number, and the word lossy, for result files."""
    return f'rejection, {self.num_accepted} accepted (lossy)'

  def __call__(
    self,
    noise: chain.Noise,
    draft_K: Array,
    draft_log_weights_KV: Array | None,
    num_draft: Array,
    target_log_weights_NV: Array,
  ) -> chain.Verdict:
    """`Rejection` on the scripted uniforms."""
    index_K = jnp.arange(draft_K.shape[0])
    accept_K = jnp.where(index_K < self.num_accepted, 0.0, 2.0)
    return chain.Rejection()(
      noise._replace(accept_K=accept_K),
      draft_K,
      draft_log_weights_KV,
      num_draft,
      target_log_weights_NV,
    )

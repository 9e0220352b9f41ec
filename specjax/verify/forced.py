"""Forced acceptance, for measuring systems apart from models."""

import dataclasses

import jax.numpy as jnp

from specjax.shapes import Array
from specjax.verify import chain


@dataclasses.dataclass(frozen=True)
class Forced:
  """A rule with scripted uniforms: as many drafts as asked for are accepted.

    u_i = 0 for i < num_accepted, else 1

  A draft that the target could never emit is still rejected. At temperature 0
  a batch is decided greedily, and nothing is forced.

  Lossy: the text has the law of whatever drafts were accepted. `num_accepted`
  controls it; with 0 drafts the text is the target's.

  Attributes:
    rule: `chain.Rejection` or `chain.Block`, whose uniforms are scripted.
    num_accepted: per step, at least 0.
  """

  rule: chain.Rule
  num_accepted: int

  def __post_init__(self):
    if not isinstance(self.rule, (chain.Rejection, chain.Block)):
      raise ValueError(
        'only rejection and block accept by uniforms, got '
        f'{self.rule.name}; proposers.given.Scripted serves the others.'
      )
    if self.num_accepted < 0:
      raise ValueError(f'num_accepted must be >= 0, got {self.num_accepted}.')

  @property
  def name(self) -> str:
    return f'{self.rule.name}, {self.num_accepted} accepted (lossy)'

  @property
  def draft_purpose(self) -> int:
    return self.rule.draft_purpose

  def __call__(
    self,
    noise: chain.Noise,
    draft_K: Array,
    draft_log_weights_KV: Array | None,
    num_draft: Array,
    target_log_weights_NV: Array,
  ) -> chain.Verdict:
    index_K = jnp.arange(draft_K.shape[0])
    accept_K = jnp.where(index_K < self.num_accepted, 0.0, 1.0)
    return self.rule(
      noise._replace(accept_K=accept_K),
      draft_K,
      draft_log_weights_KV,
      num_draft,
      target_log_weights_NV,
    )

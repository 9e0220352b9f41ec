"""A verification rule over the rows of a batch."""

import jax
import jax.numpy as jnp

from specjax import ranking
from specjax import sampling as sampling_lib
from specjax.sampling import Sampling
from specjax.shapes import Array
from specjax.verify import chain


def verify(
  rule: chain.Rule,
  sampling: Sampling,
  seed_B: Array,
  length_B: Array,
  draft_BK: Array,
  draft_log_weights_BKV: Array | None,
  num_draft_B: Array,
  target_log_weights_BNV: Array,
) -> tuple[chain.Verdict, Array]:
  """The verdicts, and sum min(p, q) at each draft, float32 [B, K].

  At temperature 0 every lossless rule decides as `Greedy` does, so a batch of
  greedy rows takes its branch and makes no noise.

  Args:
    rule: decides on a row.
    sampling: the rows' settings.
    seed_B: uint32 [B].
    length_B: int32 [B], before the step.
    draft_BK: int32 [B, K].
    draft_log_weights_BKV: what they were drawn from; None if not drawn.
    num_draft_B: int32 [B], how many are judged.
    target_log_weights_BNV: float32 [B, K + 1, V].
  """
  k = draft_BK.shape[1]
  p_BKV, q_BKV = target_log_weights_BNV[:, :k], draft_log_weights_BKV

  def run(rule: chain.Rule, noise):
    operands = (noise, draft_BK, q_BKV, num_draft_B, target_log_weights_BNV)
    axes = tuple(None if x is None else 0 for x in operands)
    return jax.vmap(rule, in_axes=axes)(*operands)

  def sampled():
    noise = jax.vmap(lambda s, n: chain.make_noise(s, n, k))(seed_B, length_B)
    return run(rule, noise), _overlap(p_BKV, q_BKV)

  def greedy():
    best_BK = ranking.best(p_BKV)
    match_BK = (best_BK == draft_BK).astype(jnp.float32)
    overlap_BK = jnp.full_like(match_BK, jnp.nan)
    return (
      run(chain.Greedy(), None),
      overlap_BK if q_BKV is None else match_BK,
    )

  if isinstance(rule, chain.Greedy):
    return greedy()
  return jax.lax.cond(sampling_lib.any_sampled(sampling), sampled, greedy)


def _overlap(p_BKV: Array, q_BKV: Array | None) -> Array:
  """sum min(p, q) per draft; NaN where the drafts were not drawn."""
  if q_BKV is None:
    return jnp.full(p_BKV.shape[:2], jnp.nan)
  p_BKV = jax.nn.softmax(p_BKV, axis=-1)
  q_BKV = jax.nn.softmax(q_BKV, axis=-1)
  return jnp.sum(jnp.minimum(p_BKV, q_BKV), axis=-1)

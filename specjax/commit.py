"""From a verdict to committed tokens: what is emitted, and its records.

Stopping is decided here and nowhere else, for every proposer and rule, so the
output is that of plain decoding cut by the same rule, whatever block the cut
falls in.
"""

import flax.struct
import jax
import jax.numpy as jnp

from specjax import state as states
from specjax.shapes import Array
from specjax.state import DecodeState
from specjax.verify.chain import Verdict


@flax.struct.dataclass
class Emission:
  """What a step adds to each row.

  Attributes:
    tokens_BN: int32 [B, N], zero at and beyond `num_emitted`.
    num_draft_B: int32 [B], drafts that were verified.
    num_accepted_B: int32 [B], accepted drafts among the emitted tokens.
    num_emitted_B: int32 [B], 0 for a finished row.
    finish_reason_B: int32 [B], after the step.
    is_error_B: bool [B], the row ended because a law was not finite.
  """

  tokens_BN: Array
  num_draft_B: Array
  num_accepted_B: Array
  num_emitted_B: Array
  finish_reason_B: Array
  is_error_B: Array


def num_leading(flag_BN: Array) -> Array:
  """How many columns lead before the first False, int32 [B].

  >>> num_leading(jnp.array([[True, True, False, True], [False] * 4]))
  Array([2, 0], dtype=int32)
  """
  leading_BN = jnp.cumprod(flag_BN.astype(jnp.int32), axis=1)
  return jnp.sum(leading_BN, axis=1, dtype=jnp.int32)


def emit(
  state: DecodeState,
  draft_BK: Array,
  num_draft_B: Array,
  verdict: Verdict,
  num_finite_B: Array,
) -> Emission:
  """Accepted drafts, then the rule's token, up to the first stop id.

  Args:
    state: before the step.
    draft_BK: int32 [B, K].
    num_draft_B: int32 [B], how many of them were verified.
    verdict: the rule's, vmapped.
    num_finite_B: int32 [B], how many of the target's N laws lead before one
      that is not finite. The row ends where plain decoding would meet it.
  """
  n = draft_BK.shape[1] + 1
  index_1N = jnp.arange(n)[None, :]
  is_next_BN = index_1N == verdict.num_accepted[:, None]
  tokens_BN = jnp.where(
    is_next_BN, verdict.next_token[:, None], jnp.pad(draft_BK, ((0, 0), (0, 1)))
  )
  num_emitted_B = jnp.minimum(verdict.num_accepted + 1, num_finite_B)
  num_before_stop_B = num_leading(~_is_any(tokens_BN, state.stop_ids_BJ))
  is_stop_B = ~state.done_B & (num_before_stop_B < num_emitted_B)
  is_error_B = ~state.done_B & (num_finite_B <= verdict.num_accepted)
  is_error_B &= ~is_stop_B
  num_emitted_B = jnp.where(is_stop_B, num_before_stop_B + 1, num_emitted_B)
  num_emitted_B = jnp.where(state.done_B, 0, num_emitted_B)

  is_full_B = state.length_B + num_emitted_B >= state.limit_B
  reason_B = jnp.where(is_full_B, state.limit_reason_B, states.RUNNING)
  reason_B = jnp.where(is_error_B, states.ERROR, reason_B)
  reason_B = jnp.where(is_stop_B, states.STOP, reason_B)
  reason_B = jnp.where(state.done_B, state.finish_reason_B, reason_B)
  return Emission(
    tokens_BN=jnp.where(index_1N < num_emitted_B[:, None], tokens_BN, 0),
    num_draft_B=num_draft_B,
    num_accepted_B=jnp.minimum(verdict.num_accepted, num_emitted_B),
    num_emitted_B=num_emitted_B,
    finish_reason_B=reason_B.astype(jnp.int32),
    is_error_B=is_error_B,
  )


def _is_any(tokens_BN: Array, ids_BJ: Array) -> Array:
  return jnp.any(tokens_BN[:, :, None] == ids_BJ[:, None, :], axis=-1)


def record(
  state: DecodeState, emission: Emission, logits_BNV: Array, overlap_BK: Array
) -> DecodeState:
  """Writes the tokens and what is known of each behind every row's length.

  Args:
    state: before the step; caches and proposer state are left alone.
    emission: what is added.
    logits_BNV: float32 [B, N, V], raw.
    overlap_BK: float32 [B, K], sum min(p, q) per draft, or NaN.
  """
  b, n = emission.tokens_BN.shape
  index_1N = jnp.arange(n, dtype=jnp.int32)[None, :]
  is_emitted_BN = index_1N < emission.num_emitted_B[:, None]
  slot_BN = state.length_B[:, None] + index_1N
  slot_BN = jnp.where(is_emitted_BN, slot_BN, state.tokens_BL.shape[1])

  def write(buffer_BL: Array, value_BN: Array) -> Array:
    value_BN = jnp.broadcast_to(value_BN, (b, n)).astype(buffer_BL.dtype)
    write_row = lambda buffer_L, slot_N, value_N: buffer_L.at[slot_N].set(
      value_N, mode='drop'
    )
    return jax.vmap(write_row)(buffer_BL, slot_BN, value_BN)

  is_accepted_BN = index_1N < emission.num_accepted_B[:, None]
  is_rejection_B = emission.num_accepted_B < emission.num_draft_B
  own_B = jnp.where(is_rejection_B, states.CORRECTION, states.BONUS)
  source_BN = jnp.where(is_accepted_BN, states.ACCEPTED, own_B[:, None])
  is_tested_BN = index_1N < emission.num_draft_B[:, None]
  overlap_BN = jnp.pad(overlap_BK, ((0, 0), (0, 1)))
  reason_B = emission.finish_reason_B
  return state.replace(
    tokens_BL=write(state.tokens_BL, emission.tokens_BN),
    length_B=state.length_B + emission.num_emitted_B,
    done_B=state.done_B | (reason_B != states.RUNNING),
    finish_reason_B=reason_B,
    num_steps_B=state.num_steps_B + (emission.num_emitted_B > 0),
    step_BL=write(state.step_BL, state.num_steps_B[:, None]),
    source_BL=write(state.source_BL, source_BN),
    num_draft_BL=write(
      state.num_draft_BL,
      jnp.where(index_1N == 0, emission.num_draft_B[:, None], 0),
    ),
    logprob_BL=write(
      state.logprob_BL, _log_prob(logits_BNV, emission.tokens_BN)
    ),
    overlap_BL=write(
      state.overlap_BL, jnp.where(is_tested_BN, overlap_BN, jnp.nan)
    ),
    num_nonfinite_B=state.num_nonfinite_B + emission.is_error_B,
  )


def _log_prob(logits_BNV: Array, tokens_BN: Array) -> Array:
  """log-softmax of the raw logits at the tokens, float32 [B, N].

  Written as -log sum exp(x - x_token), so that the sum waits for the tokens: on
  a mesh it may not run beside the branches in which they are decided.
  """
  chosen_BN1 = jnp.take_along_axis(logits_BNV, tokens_BN[:, :, None], axis=-1)
  return -jax.scipy.special.logsumexp(logits_BNV - chosen_BN1, axis=-1)

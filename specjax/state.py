"""What the decode loop carries, takes in, and shows of a step."""

from typing import Any

import flax.struct

from specjax.models import base as models
from specjax.shapes import Array

# Where a token of the buffer came from (`DecodeState.source_BL`).
PROMPT, ACCEPTED, CORRECTION, BONUS = range(4)

# Why a row ended (`DecodeState.finish_reason_B`).
RUNNING, STOP, LENGTH, CONTEXT, ERROR = range(5)
FINISH_REASONS = ('running', 'stop', 'length', 'context', 'error')


@flax.struct.dataclass
class DecodeState:
  """Everything the loop carries. Lengths say what is real, never token values.

  Attributes:
    tokens_BL: int32, committed below `length`; the rest is junk.
    length_B: int32, 1..limit; the last committed token is *pending*.
    prompt_length_B: int32, 1..length.
    limit_B: int32, the length at which the row ends.
    limit_reason_B: int32, LENGTH or CONTEXT: what that end is called.
    stop_ids_BJ: int32, ids that end a row; unused places hold -1, which no
      emitted id equals.
    done_B: bool; a finished row is frozen.
    finish_reason_B: int32, an index into FINISH_REASONS.
    seed_B: uint32, the requests' seeds.
    num_steps_B: int32, verifications the row took part in.
    target_cache: holds length - 1 tokens of each row.
    proposer_state: the proposer's own.
    step_BL: int32, the row's step in which the token was emitted.
    source_BL: int8, PROMPT, ACCEPTED, CORRECTION or BONUS.
    num_draft_BL: int8, at a step's first token: how many drafts it verified.
    logprob_BL: float32, nats under the raw target law of the emitted token.
    overlap_BL: float32, sum min(p, q) where a draft was tested, else NaN.
    num_nonfinite_B: int32, laws of the target that were needed and not finite.
  """

  tokens_BL: Array
  length_B: Array
  prompt_length_B: Array
  limit_B: Array
  limit_reason_B: Array
  stop_ids_BJ: Array
  done_B: Array
  finish_reason_B: Array
  seed_B: Array
  num_steps_B: Array
  target_cache: models.Cache
  proposer_state: Any
  step_BL: Array
  source_BL: Array
  num_draft_BL: Array
  logprob_BL: Array
  overlap_BL: Array
  num_nonfinite_B: Array


@flax.struct.dataclass
class StepInfo:
  """What one step did, for those who only look.

  Attributes:
    draft_BK: int32 [B, K], the drafts.
    num_draft_B: int32 [B], how many of them were verified.
    num_accepted_B: int32 [B], accepted drafts among the emitted tokens.
    tokens_BN: int32 [B, N], the emitted tokens.
    num_emitted_B: int32 [B], 0 for a finished row.
  """

  draft_BK: Array
  num_draft_B: Array
  num_accepted_B: Array
  tokens_BN: Array
  num_emitted_B: Array


@flax.struct.dataclass
class Requests:
  """What the host hands to `init`.

  Attributes:
    tokens_BL: int32 [B, max_length], prompts; any values behind them.
    prompt_length_B: int32 [B], 1..max_length.
    max_new_tokens_B: int32 [B], at least 0.
    seed_B: uint32 [B].
    stop_ids_BJ: int32 [B, J], filled up with -1.
  """

  tokens_BL: Array
  prompt_length_B: Array
  max_new_tokens_B: Array
  seed_B: Array
  stop_ids_BJ: Array

"""What a proposer is, and the one that proposes nothing."""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp

from specjax.models.base import Cache, Chunk, Hidden
from specjax.sampling import Sampling
from specjax.shapes import Array, Key, Params

State = Any


class TargetView(NamedTuple):
  """What a proposer may see of the target; read-only.

  Attributes:
    cache: the target's cache; it holds length - 1 tokens, none at `init`.
    prompt_length_B: int32 [B].
    room_B: int32 [B], the most drafts that the row's limit has room for; 0 for
      a finished row.
  """

  cache: Cache
  prompt_length_B: Array
  room_B: Array


class Proposal(NamedTuple):
  """Guesses for the next tokens; never part of the loop's carry.

  Attributes:
    draft_BK: int32 [B, K].
    log_weights_BKV: float32 [B, K, V], exactly what each draft was drawn from;
      None if they are not drawn (a one-hot q, never made dense).
    num_draft_B: int32 [B], 0..K; drafts at and beyond it are not there. It may
      depend on the row's own history and on the drafts' laws before the token
      decided on, never on that token or on another row.
    parents_BK: int32 [B, K], each draft's parent, 0 = the pending token, i + 1
      = draft i; None for a chain.
  """

  draft_BK: Array
  log_weights_BKV: Array | None
  num_draft_B: Array
  parents_BK: Array | None = None


class Outcome(NamedTuple):
  """What became of a proposal.

  Attributes:
    tokens_BN: int32 [B, N], the emitted tokens, zero behind `num_emitted`.
    start_B: int32 [B], the length before the step.
    length_B: int32 [B], the length after it.
    num_emitted_B: int32 [B], 0..N; 0 for a finished row.
    num_accepted_B: int32 [B], accepted drafts among the emitted.
    num_draft_B: int32 [B], drafts that were verified.
    path_BM: int32 [B, M] or None, see `Verdict.path_M`.
    hidden: the target's hiddens of the verified block, rows 0..N-1.
    target_log_weights_BNV: float32 [B, N, V], the target's laws.
  """

  tokens_BN: Array
  start_B: Array
  length_B: Array
  num_emitted_B: Array
  num_accepted_B: Array
  num_draft_B: Array
  path_BM: Array | None
  hidden: Hidden
  target_log_weights_BNV: Array


class Proposer(Protocol):
  """Guesses tokens for the target to verify.

  The object is static; `params` is {'target': ..., 'proposer': ...}. Laws,
  held by the conformance tests: drawn tokens follow softmax(log_weights); the
  state keeps structure, shapes and dtypes; nothing at or beyond a row's length
  is read; a proposer whose laws equal the target's has all K accepted.

  Attributes:
    num_draft_tokens: K, static: drafts are padded to it.
    target_features: layers of the target to capture for it; () for none. With
      any it is a `FeatureProposer`.
  """

  num_draft_tokens: int
  target_features: tuple[int, ...]

  def init(
    self,
    params: Params,
    target: TargetView,
    tokens_BL: Array,
    length_B: Array,
    num_slots: int,
  ) -> State:
    """State for rows whose prompts stand in `tokens_BL`."""
    ...

  def propose(
    self,
    params: Params,
    keys_BK: Key,
    state: State,
    target: TargetView,
    tokens_BL: Array,
    length_B: Array,
    sampling: Sampling,
  ) -> tuple[Proposal, State]:
    """Absorbs what was committed since the last call, then guesses.

    Args:
      params: the parameters of target and proposer.
      keys_BK: typed keys [B, K], one per draft; consumed.
      state: the proposer's own.
      target: read-only view of the target.
      tokens_BL: int32 [B, L], committed below `length_B`; the rest is junk.
      length_B: int32 [B], at least 1.
      sampling: the rows' settings; drafts pass through the same transform.
    """
    ...

  def observe(self, params: Params, state: State, outcome: Outcome) -> State:
    """Learns what became of the proposal."""
    ...


class FeatureProposer(Proposer, Protocol):
  """A proposer that reads the target's hiddens, those of the prompt too."""

  def read_prompt(
    self,
    params: Params,
    state: State,
    chunk: Chunk,
    tokens_BL: Array,
    length_B: Array,
  ) -> State:
    """Sees the prompts pass through the target, chunk by chunk.

    Args:
      params: the parameters of target and proposer.
      state: from `init` or the chunk before.
      chunk: all that the target is fed of a prompt goes by: its first
        length - 1 tokens.
      tokens_BL: int32 [B, L], prompts.
      length_B: int32 [B], their lengths.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Nothing:
  """Proposes nothing: plain decoding in the same loop, K = 0.

  Lossless: every token is the target's own draw.
  Source: none needed; with Leviathan et al. (arXiv:2211.17192), gamma = 0.
  """

  num_draft_tokens = 0
  target_features = ()

  def init(self, params, target, tokens_BL, length_B, num_slots) -> State:
    """Nothing to carry: ()."""
    del params, target, tokens_BL, length_B, num_slots
    return ()

  def propose(
    self, params, keys_BK, state, target, tokens_BL, length_B, sampling
  ) -> tuple[Proposal, State]:
    """No drafts, [B, 0]."""
    del params, keys_BK, target, sampling
    no_draft_BK = jnp.zeros((tokens_BL.shape[0], 0), jnp.int32)
    return Proposal(no_draft_BK, None, jnp.zeros_like(length_B)), state

  def observe(self, params, state, outcome) -> State:
    """Nothing to learn."""
    del params, outcome
    return state


def check_num_draft_tokens(num_draft_tokens: int) -> None:
  """Raises ValueError unless K is in 1..64."""
  if not 1 <= num_draft_tokens <= 64:
    raise ValueError(
      'num_draft_tokens must be in 1..64 (plain decoding is the proposer '
      f"'none'), got {num_draft_tokens}."
    )

"""The speculative loop: propose, verify, commit, all on the device.

    tokens -> proposer -> target -> verify -> commit

Plain decoding is the same loop with a proposer that proposes nothing.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax import commit
from specjax import noise as noise_lib
from specjax import sampling as sampling_lib
from specjax.models import base as models
from specjax.proposers import base as proposers
from specjax.sampling import Sampling
from specjax.shapes import Array, Params, check_shape
from specjax.sharding import Placement, constrain
from specjax.state import (
  CONTEXT,
  LENGTH,
  PROMPT,
  RUNNING,
  DecodeState,
  Requests,
  StepInfo,
)
from specjax.verify import batch, chain
from specjax.verify import widths as widths_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
  """A target, a proposer and a rule, joined into one loop.

  Static: the parts, K, the buffer sizes. Traced: parameters, lengths, limits,
  seeds, stop ids and every sampling setting, so that none of them recompiles.

  Invariants (each has a test):

    I1 `tokens_BL[b, length - 1]` is pending: committed, in no cache yet.
    I2 The target's cache holds length - 1 tokens; a step feeds the pending
       token and K drafts.
    I3 A proposer absorbs committed text itself, in `propose`, and forgets what
       it drafted.
    I4 Caches have N slots of slack and start at zero; writes at a row's own
       offset drop what does not fit.
    I5 Lengths say what is real; padding ids may be any int32.
    I6 A finished row emits nothing and nothing of it changes; a row whose
       target law is not finite ends with reason 'error'.
    I7 After warm-up nothing recompiles.
    I8 Noise is a function of seed, position or step, and purpose.
    I9 At one `width` every target pass has the same shape, or the target's
      rows do not depend on it: greedy and coupled text equals plain decoding
      bit for bit, in any dtype.
    I10 No draft is made that could not be emitted, so a limit cuts no block.

  Attributes:
    target: the model whose text is produced.
    proposer: guesses tokens.
    verify: decides on them; `Greedy` is for temperature 0 alone.
    max_length: L, tokens per row, prompt included.
    width: N, rows of a target pass, K + 1 at least; None is K + 1. Plain
      decoding with the width of a speculative run yields its exact text.
    widths: ascending, the last is N: a pass takes the first of them that holds
      the longest draft of the batch. None is N alone, which I9 needs unless the
      target's rows are independent: where they are not, a row's logits may
      differ in their last bits with who shares its batch, so the text keeps
      its law, and greedy and coupled text is that of plain decoding up to
      near-ties.
    prefill_chunk: prompt tokens per pass.

  Raises:
    ValueError: the length exceeds the target's context, `width` has no room for
      K drafts, or `widths` do not ascend to it.
  """

  target: models.LanguageModel
  proposer: proposers.Proposer
  verify: chain.Rule
  max_length: int
  width: int | None = None
  widths: tuple[int, ...] | None = None
  prefill_chunk: int = 128

  def __post_init__(self):
    if self.max_length < 1:
      raise ValueError(f'max_length must be >= 1, got {self.max_length}.')
    if self.max_length > self.target.context_length:
      raise ValueError(
        f'max_length must be at most {self.target.context_length}, the '
        f"target's context, got {self.max_length}."
      )
    if self.num_rows < self.proposer.num_draft_tokens + 1:
      raise ValueError(
        f'width must be at least {self.proposer.num_draft_tokens + 1}, one '
        f'more than the drafts, got {self.width}.'
      )
    widths_lib.check(self.pass_widths, self.num_rows)

  @property
  def num_rows(self) -> int:
    """N, the rows of every target pass."""
    if self.width is None:
      return self.proposer.num_draft_tokens + 1
    return self.width

  @property
  def pass_widths(self) -> tuple[int, ...]:
    """The widths that are compiled, ascending, the last N."""
    return (self.num_rows,) if self.widths is None else self.widths

  @property
  def num_slots(self) -> int:
    """S, slots of every cache: L tokens and N of slack (I4)."""
    return self.max_length + self.num_rows

  def check_batch(self, batch_size: int):
    """Raises ValueError unless the rows divide over the devices."""
    for model in (self.target, getattr(self.proposer, 'model', None)):
      placement = getattr(model, 'placement', None)
      parts = placement.num_shards('batch') if placement else 1
      if batch_size % parts:
        raise ValueError(
          f'batch_size must be a multiple of {parts}, the size of the data '
          f'axis, got {batch_size}.'
        )

  def init(self, params: Params, requests: Requests) -> DecodeState:
    """Prefills the caches; the first token comes from the first step.

    Raises:
      ValueError: at trace time, if `tokens_BL` has not L columns, or its rows
        do not divide over the devices.
    """
    b, size = requests.tokens_BL.shape
    check_shape('tokens_BL', requests.tokens_BL, (b, self.max_length))
    self.check_batch(b)
    length_B = requests.prompt_length_B
    cache = self.target.init_cache(b, self.num_slots, max_rewind=self.num_rows)
    proposer_state = self.proposer.init(
      params,
      proposers.TargetView(cache, length_B, jnp.zeros_like(length_B)),
      requests.tokens_BL,
      length_B,
      self.num_slots,
    )
    cache, proposer_state = self._prefill(
      params, cache, proposer_state, requests.tokens_BL, length_B
    )
    # min before the sum: a huge token limit must not overflow.
    room_B = size - length_B
    is_context_B = requests.max_new_tokens_B > room_B
    limit_B = length_B + jnp.minimum(requests.max_new_tokens_B, room_B)
    limit_reason_B = jnp.where(is_context_B, CONTEXT, LENGTH).astype(jnp.int32)
    done_B = length_B >= limit_B
    row = lambda dtype, value=0: jnp.full((b, size), value, dtype)
    state = DecodeState(
      tokens_BL=requests.tokens_BL,
      length_B=length_B,
      prompt_length_B=length_B,
      limit_B=limit_B,
      limit_reason_B=limit_reason_B,
      stop_ids_BJ=requests.stop_ids_BJ,
      done_B=done_B,
      finish_reason_B=jnp.where(done_B, limit_reason_B, RUNNING),
      seed_B=requests.seed_B,
      num_steps_B=jnp.zeros(b, jnp.int32),
      target_cache=cache,
      proposer_state=proposer_state,
      step_BL=row(jnp.int32),
      source_BL=row(jnp.int8, PROMPT),
      num_draft_BL=row(jnp.int8),
      logprob_BL=row(jnp.float32),
      overlap_BL=row(jnp.float32, jnp.nan),
      num_nonfinite_B=jnp.zeros(b, jnp.int32),
    )
    return pin_rows(state, self.target.placement)

  def _prefill(
    self,
    params: Params,
    cache: models.Cache,
    proposer_state: Any,
    tokens_BL: Array,
    length_B: Array,
  ) -> tuple[models.Cache, Any]:
    """Feeds the prompts; who wants the target's features sees them pass."""
    feed = (self.target, params['target'], cache, tokens_BL, length_B - 1)
    features = self.proposer.target_features
    if not features:
      return models.prefill(*feed, self.prefill_chunk), proposer_state
    return models.fold_prompts(
      *feed,
      self.prefill_chunk,
      fold=lambda state, chunk: self.proposer.read_prompt(
        params, state, chunk, tokens_BL, length_B
      ),
      carry=proposer_state,
      capture=features,
    )

  def step(
    self, params: Params, state: DecodeState, sampling: Sampling
  ) -> tuple[DecodeState, StepInfo]:
    """One round: at least one token for every unfinished row."""
    state = pin_rows(state, self.target.placement)
    proposal, proposer_state = self.propose(params, state, sampling)
    pending_B1 = jnp.take_along_axis(
      state.tokens_BL, (state.length_B - 1)[:, None], axis=1
    )
    hidden, logits_BNV, cache = widths_lib.target_pass(
      self.target,
      params['target'],
      jnp.concatenate([pending_B1, proposal.draft_BK], axis=1),
      state.target_cache,
      jnp.where(state.done_B, 0, proposal.num_draft_B + 1),
      widths=self.pass_widths,
      capture=self.proposer.target_features,
    )
    # Drafts behind a law that is not finite are not there: whether one is
    # judged depends on what stands before it alone.
    logits_BNV, is_finite_BN = sampling_lib.blank_broken(logits_BNV)
    num_finite_B = commit.num_leading(is_finite_BN)
    num_draft_B = jnp.minimum(proposal.num_draft_B, num_finite_B)
    log_weights_BNV = self._target_law(state, sampling, proposal, logits_BNV)
    verdict, overlap_BK = batch.verify(
      self.verify,
      sampling,
      state.seed_B,
      state.length_B,
      proposal.draft_BK,
      proposal.log_weights_BKV,
      num_draft_B,
      log_weights_BNV,
    )

    emission = commit.emit(
      state, proposal.draft_BK, num_draft_B, verdict, num_finite_B
    )
    new_state = commit.record(state, emission, logits_BNV, overlap_BK)
    outcome = proposers.Outcome(
      tokens_BN=emission.tokens_BN,
      start_B=state.length_B,
      length_B=new_state.length_B,
      num_emitted_B=emission.num_emitted_B,
      num_accepted_B=emission.num_accepted_B,
      num_draft_B=num_draft_B,
      path_BM=verdict.path_M,
      hidden=hidden,
      target_log_weights_BNV=log_weights_BNV,
    )
    new_state = new_state.replace(
      target_cache=self.target.keep(
        cache, state.length_B - 1, verdict.path_M, emission.num_emitted_B
      ),
      proposer_state=self.proposer.observe(params, proposer_state, outcome),
    )
    info = StepInfo(
      draft_BK=proposal.draft_BK,
      num_draft_B=num_draft_B,
      num_accepted_B=emission.num_accepted_B,
      tokens_BN=emission.tokens_BN,
      num_emitted_B=emission.num_emitted_B,
    )
    placement = self.target.placement
    return pin_rows(new_state, placement), pin_rows(info, placement)

  def propose(
    self, params: Params, state: DecodeState, sampling: Sampling
  ) -> tuple[proposers.Proposal, Any]:
    """The proposal, padded to N - 1 columns and cut to what can be verified.

    Raises:
      ValueError: at trace time, if the proposer reports laws of another shape.
    """
    k = self.proposer.num_draft_tokens
    keys_BK = jax.vmap(
      lambda seed, length: noise_lib.draw_keys(
        seed, self.verify.draft_purpose, length, k
      )
    )(state.seed_B, state.length_B)
    # I10: the bonus must fit too.
    room_B = jnp.where(state.done_B, 0, state.limit_B - state.length_B - 1)
    proposal, proposer_state = self.proposer.propose(
      params,
      keys_BK,
      state.proposer_state,
      proposers.TargetView(state.target_cache, state.prompt_length_B, room_B),
      state.tokens_BL,
      state.length_B,
      sampling,
    )
    missing = self.num_rows - 1 - k
    log_weights_BKV = proposal.log_weights_BKV
    if log_weights_BKV is not None:
      check_shape(
        'log_weights_BKV', log_weights_BKV, ('B', k, self.target.vocab_size)
      )
      log_weights_BKV = constrain(
        jnp.pad(log_weights_BKV, ((0, 0), (0, missing), (0, 0))),
        self.target.placement,
        'batch',
        None,
        'vocab',
      )
    num_draft_B = jnp.minimum(proposal.num_draft_B, room_B)
    # A draft that is no id would be judged by another's probability.
    draft_BK = proposal.draft_BK
    is_id_BK = (draft_BK >= 0) & (draft_BK < self.target.vocab_size)
    proposal = proposal._replace(
      draft_BK=jnp.pad(draft_BK, ((0, 0), (0, missing))),
      log_weights_BKV=log_weights_BKV,
      num_draft_B=jnp.minimum(num_draft_B, commit.num_leading(is_id_BK)),
    )
    return proposal, proposer_state

  def _target_law(
    self,
    state: DecodeState,
    sampling: Sampling,
    proposal: proposers.Proposal,
    logits_BNV: Array,
  ) -> Array:
    """The target's log-weights; row i has seen the drafts before it."""
    counts = sampling_lib.penalty_counts(
      sampling,
      state.tokens_BL,
      state.length_B,
      state.prompt_length_B,
      self.target.vocab_size,
    )
    if counts is not None:
      counts = sampling_lib.count_drafts(counts, proposal.draft_BK)
    return sampling_lib.transform(sampling, logits_BNV, counts)


def pin_rows(rows: Any, placement: Placement | None) -> Any:
  """A state or a step's info with its rows where the target's rows are.

  Caches and the proposer's state are pinned by the models they belong to.
  """
  own = {'target_cache', 'proposer_state'}
  return rows.replace(
    **{
      field.name: constrain(getattr(rows, field.name), placement, 'batch')
      for field in dataclasses.fields(rows)
      if field.name not in own
    }
  )


@functools.partial(jax.jit, static_argnames='decoder')
def init(decoder: Decoder, params: Params, requests: Requests) -> DecodeState:
  """`Decoder.init`, compiled once per decoder and batch size."""
  return decoder.init(params, requests)


@functools.partial(jax.jit, static_argnames='decoder', donate_argnames='state')
def step(
  decoder: Decoder, params: Params, state: DecodeState, sampling: Sampling
) -> tuple[DecodeState, StepInfo]:
  """`Decoder.step`, compiled; the state is donated."""
  return decoder.step(params, state, sampling)


@functools.partial(jax.jit, static_argnames='decoder', donate_argnames='state')
def finish(
  decoder: Decoder, state: DecodeState, is_done_B: Array
) -> DecodeState:
  """Ends rows from outside, as a stop string does; the state is donated."""
  state = state.replace(done_B=state.done_B | is_done_B)
  return pin_rows(state, decoder.target.placement)


@functools.partial(jax.jit, static_argnames='decoder', donate_argnames='state')
def run(
  decoder: Decoder,
  params: Params,
  state: DecodeState,
  sampling: Sampling,
  max_steps: Array,
) -> DecodeState:
  """Steps until every row is done, in one `while_loop` on the device.

  Args:
    decoder: static.
    params: {'target': ..., 'proposer': ...}.
    state: donated; do not use it again.
    sampling: the rows' settings.
    max_steps: int32 [], traced: the most steps to take.

  Returns:
    The state after the last step; the host may read it, cut rows and go on.
  """

  def more(carry):
    i, state = carry
    return (i < max_steps) & ~jnp.all(state.done_B)

  def body(carry):
    i, state = carry
    state, _ = decoder.step(params, state, sampling)
    return i + 1, state

  return jax.lax.while_loop(more, body, (jnp.int32(0), state))[1]

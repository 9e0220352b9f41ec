"""From requests to results: batches, stop strings, streams, records.

The device runs the loop; here the host fills batches, looks for stop strings
between bounded runs, cuts what came after them, and counts.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, metrics, noise, sampling
from specjax import state as states
from specjax.decode import Decoder
from specjax.detokenize import find_stop
from specjax.sampling import SamplingOptions
from specjax.shapes import Params
from specjax.state import DecodeState, StepInfo
from specjax.tokenizers import Tokenizer, pad_batch

_CHECK_EVERY = 8  # Steps between two looks for stop strings.
_UNBOUNDED = 2**31 - 1


def check_max_new_tokens(value: int) -> int:
  """Returns `value`; raises ValueError unless it is in 0..2**31 - 1.

  >>> check_max_new_tokens(-1)
  Traceback (most recent call last):
  ...
  ValueError: max_new_tokens must be a whole number in 0..2147483647, got -1.
  """
  is_whole = isinstance(value, int) and not isinstance(value, bool)
  if not is_whole or not 0 <= value <= _UNBOUNDED:
    raise ValueError(
      f'max_new_tokens must be a whole number in 0..{_UNBOUNDED}, got '
      f'{value!r}.'
    )
  return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """One prompt and how to continue it.

  Attributes:
    prompt: the text as fed, for the record.
    prompt_tokens: its ids, at least one.
    options: sampling settings.
    seed: 0..2**32 - 1.
    max_new_tokens: at least 0.
    stop: texts at which the output ends, themselves not included.
    stop_ids: ids that end the output.

  >>> Request(prompt_tokens=(), max_new_tokens=5)
  Traceback (most recent call last):
  ...
  ValueError: the prompt must have at least one token.
  """

  prompt: str = ''
  prompt_tokens: tuple[int, ...]
  options: SamplingOptions = SamplingOptions()
  seed: int = 0
  max_new_tokens: int
  stop: tuple[str, ...] = ()
  stop_ids: tuple[int, ...] = ()

  def __post_init__(self):
    if not self.prompt_tokens:
      raise ValueError('the prompt must have at least one token.')
    noise.check_seed(self.seed)
    check_max_new_tokens(self.max_new_tokens)
    if '' in self.stop:
      raise ValueError("stop must not hold an empty text, got ''.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
  """Seconds of a batch; compilation is apart."""

  compile: float
  prefill: float
  decode: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """What became of a request.

  Attributes:
    request: the request.
    tokens: emitted ids; a stop id, or the token that completed a stop string,
      is the last of them.
    text: their text, without special tokens and the stop id, ending before a
      stop string.
    finish_reason: 'stop', 'length', 'context' or 'error'.
    logprobs: nats of each token under the raw target law.
    tally: counts of its verifications, after cuts.
    timing: of the batch it was in.
  """

  request: Request
  tokens: tuple[int, ...]
  text: str
  finish_reason: str
  logprobs: tuple[float, ...]
  tally: metrics.Tally
  timing: Timing


# Called after every run of the loop with the row, the tokens that are new and
# will stay, and whether the row has ended.
OnCommit = Callable[[int, Sequence[int], bool], None]
OnStep = Callable[[StepInfo], None]


def generate(
  decoder: Decoder,
  params: Params,
  requests: Sequence[Request],
  tokenizer: Tokenizer,
  *,
  batch_size: int,
  on_commit: OnCommit | None = None,
  on_step: OnStep | None = None,
  on_batch: Callable[[int], None] | None = None,
) -> Iterator[Result]:
  """Yields the results in order, batch by batch.

  Args:
    decoder: static; compiled once for the batch size.
    params: {'target': ..., 'proposer': ...}.
    requests: any number; the last batch is filled up with empty rows.
    tokenizer: the target's.
    batch_size: B.
    on_commit: makes the loop return to the host after every step.
    on_step: likewise, and is handed each `StepInfo`.
    on_batch: called with the number of a batch before it starts.

  Raises:
    ValueError: a prompt that does not fit into `decoder.max_length`, or holds
      an id outside the vocabulary.
  """
  if batch_size < 1:
    raise ValueError(f'batch_size must be >= 1, got {batch_size}.')
  vocab_size = decoder.target.vocab_size
  for row, request in enumerate(requests):
    if len(request.prompt_tokens) > decoder.max_length:
      raise ValueError(
        f'the prompt must have at most {decoder.max_length} tokens '
        f'(max_length), got {len(request.prompt_tokens)} in row {row}.'
      )
    # Some tokenizers know ids that a text-only model has no embedding for.
    wrong = [i for i in request.prompt_tokens if not 0 <= i < vocab_size]
    if wrong:
      raise ValueError(
        f'prompt ids must be in 0..{vocab_size - 1}, got {wrong[0]} in row '
        f'{row}.'
      )
  everyones = [request.options for request in requests]
  most_stop_ids = max((len(r.stop_ids) for r in requests), default=0)
  # Rounded up: one more id compiles nothing new.
  num_stop_ids = max(-(-most_stop_ids // 8), 1) * 8
  seconds_compile = None
  for start in range(0, len(requests), batch_size):
    batch = list(requests[start : start + batch_size])
    idle = dataclasses.replace(batch[0], max_new_tokens=0, stop=())
    batch += [idle] * (batch_size - len(batch))
    settings = sampling.stack_options(
      [request.options for request in batch],
      decoder.target.vocab_size,
      among=everyones,
    )
    inputs = _device_inputs(decoder, batch, num_stop_ids)
    if seconds_compile is None:
      seconds_compile = _warm_up(
        decoder, params, inputs, settings, with_info=on_step is not None
      )
    if on_batch is not None:
      on_batch(start // batch_size)
    clock = time.perf_counter()
    state = decode.init(decoder, params, inputs)
    jax.block_until_ready(state)
    seconds_prefill = time.perf_counter() - clock
    clock = time.perf_counter()
    state, cuts = _run_to_end(
      decoder, params, state, settings, batch, tokenizer, on_commit, on_step
    )
    timing = Timing(
      compile=seconds_compile,
      prefill=seconds_prefill,
      decode=time.perf_counter() - clock,
    )
    seconds_compile = 0.0  # Counted once, with the first batch.
    rows = jax.device_get(_records(state))
    for row, request in enumerate(batch[: len(requests) - start]):
      yield _result(
        decoder, rows, row, request, cuts.get(row), tokenizer, timing
      )


def _device_inputs(
  decoder: Decoder, batch: list[Request], num_stop_ids: int
) -> states.Requests:
  tokens_BL, length_B = pad_batch(
    [request.prompt_tokens for request in batch], decoder.max_length
  )
  stop_ids_BJ = np.full((len(batch), num_stop_ids), -1, np.int32)
  for row, request in enumerate(batch):
    stop_ids_BJ[row, : len(request.stop_ids)] = request.stop_ids
  return states.Requests(
    tokens_BL=jnp.asarray(tokens_BL, jnp.int32),
    prompt_length_B=jnp.asarray(length_B, jnp.int32),
    max_new_tokens_B=jnp.asarray(
      [request.max_new_tokens for request in batch], jnp.int32
    ),
    seed_B=jnp.asarray([request.seed for request in batch], jnp.uint32),
    stop_ids_BJ=jnp.asarray(stop_ids_BJ),
  )


def _warm_up(decoder, params, inputs, settings, *, with_info) -> float:
  """Compiles by generating nothing from one-token prompts; seconds taken."""
  clock = time.perf_counter()
  inputs = inputs.replace(
    prompt_length_B=jnp.ones_like(inputs.prompt_length_B),
    max_new_tokens_B=jnp.zeros_like(inputs.max_new_tokens_B),
  )
  state = decode.init(decoder, params, inputs)
  if with_info:
    state, _ = decode.step(decoder, params, state, settings)
  else:
    state = decode.run(decoder, params, state, settings, jnp.int32(0))
  jax.block_until_ready(state)
  return time.perf_counter() - clock


def _run_to_end(
  decoder: Decoder,
  params: Params,
  state: DecodeState,
  settings: sampling.Sampling,
  batch: list[Request],
  tokenizer: Tokenizer,
  on_commit: OnCommit | None,
  on_step: OnStep | None,
) -> tuple[DecodeState, dict[int, tuple[int, str]]]:
  """Runs until every row is done.

  Returns:
    The last state, and for rows that met a stop string how many emitted
    tokens they keep and their text.
  """
  has_stops = any(request.stop for request in batch)
  max_steps = _UNBOUNDED
  if has_stops:
    max_steps = _CHECK_EVERY
  if on_commit is not None:
    max_steps = 1
  cuts: dict[int, tuple[int, str]] = {}
  num_shown = [len(request.prompt_tokens) for request in batch]
  while True:
    if on_step is not None:
      state, info = decode.step(decoder, params, state, settings)
      on_step(jax.device_get(info))
    else:
      state = decode.run(decoder, params, state, settings, jnp.int32(max_steps))
    if has_stops or on_commit is not None:
      tokens_BL, length_B, done_B = jax.device_get(
        (state.tokens_BL, state.length_B, state.done_B)
      )
      for row, request in enumerate(batch):
        begin = len(request.prompt_tokens)
        emitted = tokens_BL[row, begin : length_B[row]].tolist()
        if request.stop and row not in cuts:
          cut = find_stop(tokenizer, emitted, request.stop)
          if cut is not None:
            cuts[row] = cut
        end = begin + cuts[row][0] if row in cuts else length_B[row]
        is_done = bool(done_B[row]) or row in cuts
        if on_commit is not None and end > num_shown[row]:
          on_commit(row, tokens_BL[row, num_shown[row] : end].tolist(), is_done)
          num_shown[row] = end
      is_cut_B = np.isin(np.arange(len(batch)), list(cuts))
      if np.any(is_cut_B & ~done_B):
        state = state.replace(done_B=jnp.asarray(done_B | is_cut_B))
    if bool(jnp.all(state.done_B)):
      return state, cuts


def _records(state: DecodeState) -> dict[str, jax.Array]:
  """What the host reads after a batch."""
  return {
    'tokens': state.tokens_BL,
    'length': state.length_B,
    'reason': state.finish_reason_B,
    'step': state.step_BL,
    'source': state.source_BL,
    'num_draft': state.num_draft_BL,
    'logprob': state.logprob_BL,
    'overlap': state.overlap_BL,
  }


def _result(
  decoder: Decoder,
  rows: dict[str, np.ndarray],
  row: int,
  request: Request,
  cut: tuple[int, str] | None,
  tokenizer: Tokenizer,
  timing: Timing,
) -> Result:
  begin, end = len(request.prompt_tokens), int(rows['length'][row])
  reason = states.FINISH_REASONS[int(rows['reason'][row])]
  if cut is not None:
    end, reason = begin + cut[0], 'stop'
  emitted = slice(begin, end)
  tokens = tuple(rows['tokens'][row, emitted].tolist())
  if cut is not None:
    text = cut[1]
  else:
    # Special tokens are no text, as in a stream.
    ends = int(reason == 'stop')
    text = tokenizer.decode(tokens[: len(tokens) - ends], skip_special=True)
  return Result(
    request=request,
    tokens=tokens,
    text=text,
    finish_reason=reason,
    logprobs=tuple(rows['logprob'][row, emitted].tolist()),
    tally=metrics.tally(
      step=rows['step'][row, emitted],
      source=rows['source'][row, emitted],
      num_draft=rows['num_draft'][row, emitted],
      overlap=rows['overlap'][row, emitted],
      num_draft_tokens=decoder.proposer.num_draft_tokens,
      is_stopped=reason == 'stop',
    ),
    timing=timing,
  )

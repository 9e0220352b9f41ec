"""From requests to results: batches, stop strings, streams, records.

The device runs the loop; here the host fills batches, reads what was emitted
between bounded runs, cuts what stands behind a stop string, and counts.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Protocol

import jax
import numpy as np

from specjax import decode, metrics, sampling
from specjax import state as states
from specjax.decode import Decoder
from specjax.detokenize import StreamDecoder
from specjax.proposers import given
from specjax.requests import Request, Result, Timing
from specjax.shapes import Params
from specjax.sharding import to_host
from specjax.state import DecodeState, StepInfo
from specjax.tokenizers import Tokenizer, pad_batch
from specjax.verify.chain import Greedy

_CHECK_EVERY = 8  # Steps between two looks for stop strings.
_UNBOUNDED = 2**31 - 1

# Called with a row and the text that is now certain.
OnText = Callable[[int, str], None]
OnStep = Callable[[StepInfo], None]


class Drafter(Protocol):
  """Drafts on the host, between steps, for the proposer `Given`."""

  def begin(self, batch_size: int):
    """A batch of new rows."""
    ...

  def offer(
    self, rows: Sequence[Sequence[int]], is_done: Sequence[bool]
  ) -> given.Offer:
    """Drafts behind the committed ids of each row."""
    ...


def generate(
  decoder: Decoder,
  params: Params,
  requests: Sequence[Request],
  tokenizer: Tokenizer,
  *,
  batch_size: int,
  on_text: OnText | None = None,
  on_step: OnStep | None = None,
  on_batch: Callable[[int], None] | None = None,
  drafter: Drafter | None = None,
) -> Iterator[Result]:
  """Yields the results in order, batch by batch.

  Args:
    decoder: static; compiled once for the batch size.
    params: {'target': ..., 'proposer': ...}.
    requests: any number; the last batch is filled up with empty rows.
    tokenizer: the target's.
    batch_size: B.
    on_text: makes the loop return to the host after every step.
    on_step: likewise, and is handed each `StepInfo`, after cuts.
    on_batch: called with the number of a batch before it starts.
    drafter: drafts on the host before every step; the proposer must be `Given`.

  Raises:
    ValueError: a prompt that does not fit into `decoder.max_length`, or holds
      an id outside the vocabulary; `Greedy` with a temperature above 0.
  """
  if batch_size < 1:
    raise ValueError(f'batch_size must be >= 1, got {batch_size}.')
  decoder.check_batch(batch_size)
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
    if isinstance(decoder.verify, Greedy) and not request.options.is_greedy:
      raise ValueError(
        'verification by greedy needs temperature 0, got '
        f'{request.options.temperature} in row {row}.'
      )
  return _serve(
    decoder,
    params,
    requests,
    tokenizer,
    batch_size,
    on_text,
    on_step,
    on_batch,
    drafter,
  )


def _serve(
  decoder: Decoder,
  params: Params,
  requests: Sequence[Request],
  tokenizer: Tokenizer,
  batch_size: int,
  on_text: OnText | None,
  on_step: OnStep | None,
  on_batch: Callable[[int], None] | None,
  drafter: Drafter | None,
) -> Iterator[Result]:
  everyones = [request.options for request in requests]
  most_stop_ids = max((len(r.stop_ids) for r in requests), default=0)
  # Rounded up: one more id compiles nothing new.
  num_stop_ids = max(-(-most_stop_ids // 8), 1) * 8
  seconds_compile = None
  for start in range(0, len(requests), batch_size):
    batch = list(requests[start : start + batch_size])
    idle = dataclasses.replace(batch[0], max_new_tokens=0, stop=())
    batch += [idle] * (batch_size - len(batch))
    # On the host until a call takes them to where its parameters are.
    settings = jax.device_get(
      sampling.stack_options(
        [request.options for request in batch],
        decoder.target.vocab_size,
        among=everyones,
      )
    )
    inputs = _device_inputs(decoder, batch, num_stop_ids)
    if seconds_compile is None:
      seconds_compile = _warm_up(
        decoder, params, inputs, settings, with_info=on_step is not None
      )
    if on_batch is not None:
      on_batch(start // batch_size)
    if drafter is not None:
      drafter.begin(batch_size)
    clock = time.perf_counter()
    state = decode.init(decoder, params, inputs)
    jax.block_until_ready(state)
    seconds_prefill = time.perf_counter() - clock
    clock = time.perf_counter()
    readers = [_Reader(tokenizer, request) for request in batch]
    state = _run_to_end(
      decoder, params, state, settings, readers, on_text, on_step, drafter
    )
    timing = Timing(
      compile=seconds_compile,
      prefill=seconds_prefill,
      decode=time.perf_counter() - clock,
    )
    seconds_compile = 0.0  # Counted once, with the first batch.
    rows = to_host(_records(state))
    for row, reader in enumerate(readers[: len(requests) - start]):
      yield _result(decoder, rows, row, reader, timing)


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
    tokens_BL=np.asarray(tokens_BL, np.int32),
    prompt_length_B=np.asarray(length_B, np.int32),
    max_new_tokens_B=np.asarray(
      [request.max_new_tokens for request in batch], np.int32
    ),
    seed_B=np.asarray([request.seed for request in batch], np.uint32),
    stop_ids_BJ=stop_ids_BJ,
  )


def _warm_up(decoder, params, inputs, settings, *, with_info) -> float:
  """Compiles by generating nothing from one-token prompts; seconds taken."""
  clock = time.perf_counter()
  inputs = inputs.replace(
    prompt_length_B=np.ones_like(inputs.prompt_length_B),
    max_new_tokens_B=np.zeros_like(inputs.max_new_tokens_B),
  )
  if with_info:
    loop, rest = decode.step, (settings,)
  else:
    loop, rest = decode.run, (settings, np.int32(0))
  with futures.ThreadPoolExecutor() as pool:
    # Both programs at once, kept for the calls below; these say what is wrong
    # if one fails. On a mesh, or with parameters that were put on a device,
    # `init` must have run to know where states lie.
    leaves = jax.tree.leaves(params)
    is_put = any(getattr(leaf, 'committed', False) for leaf in leaves)
    if decoder.target.placement is None and not is_put:
      first = decode.init.lower(decoder, params, inputs)
      pool.submit(first.compile)
      state = decode.init.eval_shape(decoder, params, inputs)
      pool.submit(loop.lower(decoder, params, state, *rest).compile)
  state = decode.init(decoder, params, inputs)
  jax.block_until_ready(loop(decoder, params, state, *rest))
  return time.perf_counter() - clock


class _Reader:
  """Follows one row: its text as it grows, and where a stop string cuts it.

  Attributes:
    request: of the row.
    text: so far; without special tokens, the stop id and the stop string.
    num_kept: emitted tokens that stay.
    is_done: nothing more will come.
    is_cut: a stop string completed.
  """

  def __init__(self, tokenizer: Tokenizer, request: Request):
    self.request = request
    self.text = ''
    self.num_kept = 0
    self.is_done = False
    self._stream = StreamDecoder(tokenizer, request.stop)

  @property
  def is_cut(self) -> bool:
    return self._stream.is_stopped

  def read(self, buffer: list[int], length: int, reason: int) -> str:
    """Takes the row as it is now and returns the text that is new.

    Args:
      buffer: the row's ids, prompt included.
      length: how many of them are committed.
      reason: the device's finish reason.
    """
    if self.is_done:
      return ''
    begin = len(self.request.prompt_tokens)
    fresh = buffer[begin + self.num_kept : length]
    is_stop_id = reason == states.STOP
    text = self._stream.push(fresh[: len(fresh) - is_stop_id])
    self.num_kept = self._stream.num_tokens
    self.num_kept += is_stop_id and not self.is_cut
    self.is_done = self.is_cut or reason != states.RUNNING
    if self.is_done:
      text += self._stream.finish()
    self.text += text
    return text


def _run_to_end(
  decoder: Decoder,
  params: Params,
  state: DecodeState,
  settings: sampling.Sampling,
  readers: list[_Reader],
  on_text: OnText | None,
  on_step: OnStep | None,
  drafter: Drafter | None,
) -> DecodeState:
  """Runs until every row is done, on the device or for its reader."""
  max_steps = _UNBOUNDED
  if any(reader.request.stop for reader in readers):
    max_steps = _CHECK_EVERY
  if on_text is not None or drafter is not None:
    max_steps = 1
  texts = [reader.request.prompt_tokens for reader in readers]
  while True:
    if drafter is not None:
      is_done = [
        reader.is_done or not reader.request.max_new_tokens
        for reader in readers
      ]
      state = state.replace(proposer_state=drafter.offer(texts, is_done))
    if on_step is not None:
      state, info = decode.step(decoder, params, state, settings)
    else:
      state = decode.run(decoder, params, state, settings, np.int32(max_steps))
    tokens_BL, length_B, reason_B, done_B = to_host(
      (state.tokens_BL, state.length_B, state.finish_reason_B, state.done_B)
    )
    texts = [row[:n].tolist() for row, n in zip(tokens_BL, length_B)]
    had_B = np.array([reader.num_kept for reader in readers])
    for row, reader in enumerate(readers):
      text = reader.read(
        tokens_BL[row].tolist(), int(length_B[row]), int(reason_B[row])
      )
      if on_text is not None and text:
        on_text(row, text)
    if on_step is not None:
      on_step(_cut_info(to_host(info), readers, had_B))
    is_done_B = np.array([reader.is_done for reader in readers])
    if np.all(is_done_B):
      return state
    if np.any(is_done_B & ~done_B):
      state = decode.finish(decoder, state, is_done_B)


def _cut_info(
  info: StepInfo, readers: list[_Reader], had_B: np.ndarray
) -> StepInfo:
  """What a step did, less what stands behind a stop: as it is counted."""
  kept_B = np.array([reader.num_kept for reader in readers]) - had_B
  is_stop_B = np.array([reader.is_done for reader in readers])
  room_B = np.where(is_stop_B, kept_B, info.draft_BK.shape[1])
  return info.replace(
    num_emitted_B=np.minimum(info.num_emitted_B, kept_B),
    num_accepted_B=np.minimum(info.num_accepted_B, kept_B),
    num_draft_B=np.minimum(info.num_draft_B, room_B),
  )


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
  reader: _Reader,
  timing: Timing,
) -> Result:
  reason = states.FINISH_REASONS[int(rows['reason'][row])]
  if reader.is_cut:
    reason = states.FINISH_REASONS[states.STOP]
  begin = len(reader.request.prompt_tokens)
  emitted = slice(begin, begin + reader.num_kept)
  return Result(
    request=reader.request,
    tokens=tuple(rows['tokens'][row, emitted].tolist()),
    text=reader.text,
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

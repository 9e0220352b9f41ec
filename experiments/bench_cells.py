"""One cell of a benchmark: a decoder that is run, timed and counted."""

import dataclasses
import functools
import pathlib
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import bench_stats, step_costs
from specjax import decode, metrics
from specjax import sampling as sampling_lib
from specjax import state as states
from specjax.decode import Decoder
from specjax.models.base import LanguageModel
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.early_exit import EarlyExit
from specjax.proposers.feature_fed import FeatureFed
from specjax.proposers.medusa import Medusa
from specjax.requests import Request
from specjax.sampling import Sampling
from specjax.shapes import Array, Params
from specjax.sharding import to_host
from specjax.tokenizers import pad_batch

_UNBOUNDED = 2**31 - 1
_WARM_STEPS = 4
_CALL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
  """Rows that are decoded side by side, on the host."""

  inputs: states.Requests
  settings: Sampling

  @property
  def size(self) -> int:
    return len(self.inputs.seed_B)


def make_batches(
  requests: Sequence[Request],
  batch_size: int,
  max_length: int,
  vocab_size: int,
) -> list[Batch]:
  """The requests in order; the last batch is filled up from the first ones.

  Stop ids are left out: every row runs to its limit.
  """
  everyones = [request.options for request in requests]
  batches = []
  for start in range(0, len(requests), batch_size):
    rows = [requests[(start + i) % len(requests)] for i in range(batch_size)]
    tokens_BL, length_B = pad_batch(
      [row.prompt_tokens for row in rows], max_length
    )
    inputs = states.Requests(
      tokens_BL=np.asarray(tokens_BL, np.int32),
      prompt_length_B=np.asarray(length_B, np.int32),
      max_new_tokens_B=np.array([row.max_new_tokens for row in rows], np.int32),
      seed_B=np.array([row.seed for row in rows], np.uint32),
      stop_ids_BJ=np.full((batch_size, 1), -1, np.int32),
    )
    settings = sampling_lib.stack_options(
      [row.options for row in rows], vocab_size, among=everyones
    )
    batches.append(Batch(inputs=inputs, settings=jax.device_get(settings)))
  return batches


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Cell:
  """A proposer, a draft length and a batch size.

  Attributes:
    proposer: its name.
    num_draft_tokens: K; 0 is plain decoding.
    decoder: static.
    params: {'target', 'proposer'}.
    batches: what it decodes.
    stop_rule: by which a row drafts less than K.
  """

  proposer: str
  num_draft_tokens: int
  decoder: Decoder
  params: Params
  batches: Sequence[Batch]
  stop_rule: str = 'fixed'

  @property
  def batch_size(self) -> int:
    return self.batches[0].size

  @property
  def widths(self) -> tuple[int, ...]:
    """The widths of a target pass, ascending."""
    return self.decoder.pass_widths

  def width_of(self, num_drafts: int) -> int:
    """The rows of a pass that verifies so many drafts."""
    return next(width for width in self.widths if width > num_drafts)

  def num_passes(self, num_drafts: int) -> int:
    """Passes of the drafting model in a step that yields so many drafts.

    The first is made in any case, and is all that independent heads make; the
    target's own layers have nothing to absorb, and make none without a draft.
    """
    if isinstance(self.decoder.proposer, EarlyExit):
      return num_drafts
    if isinstance(self.decoder.proposer, Medusa):
      return 1
    return max(num_drafts, 1)

  @property
  def drafting(self) -> tuple[LanguageModel, Params, int] | None:
    """The model that drafts, its parameters, the rows of its first pass."""
    proposer = self.decoder.proposer
    if isinstance(proposer, DraftModel):
      return proposer.model, self.params['proposer'], 2
    if isinstance(proposer, EarlyExit):
      params = proposer.first_params(self.params['target'])
      return proposer.first_layers, params, 1
    if isinstance(proposer, FeatureFed):
      entries = step_costs.Entries(head=proposer.head)
      return entries, self.params, self.num_draft_tokens + 1
    if isinstance(proposer, Medusa):
      guesses = step_costs.Guesses(
        heads=proposer.heads, num_heads=self.num_draft_tokens
      )
      return guesses, self.params, 1
    return None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Run:
  """What one run over a batch took and did.

  Attributes:
    seconds: of `decode.run` alone.
    seconds_prefill: of `decode.init`.
    tokens: the emitted ids of each row.
    counts: of all rows together.
    drafts: the most drafts of any row in each step of the loop.
    loaded_bytes: memory in use before the loop.
    peak_bytes: the most in use during it; None where nothing tells.
    seconds_propose: of `Proposer.propose` alone, if it was asked for.
  """

  seconds: float
  seconds_prefill: float
  tokens: tuple[tuple[int, ...], ...]
  counts: metrics.Tally
  drafts: np.ndarray
  loaded_bytes: int | None
  peak_bytes: int | None
  seconds_propose: float | None = None


def warm_up(cell: Cell) -> float:
  """Compiles and takes a few steps; seconds of that."""
  batch = cell.batches[0]
  clock = time.perf_counter()
  state = decode.init(cell.decoder, cell.params, batch.inputs)
  state = decode.run(
    cell.decoder, cell.params, state, batch.settings, np.int32(_WARM_STEPS)
  )
  jax.block_until_ready(state)
  seconds = time.perf_counter() - clock
  _time_propose(cell, state)
  return seconds


def run(cell: Cell, batch: Batch, *, time_propose: bool = False) -> Run:
  """Decodes a batch to the end; what it held is free again afterwards.

  Args:
    cell: compiled by `warm_up`.
    batch: one of its batches.
    time_propose: time the proposer alone, too, on the texts as they end.
  """
  clock = time.perf_counter()
  state = decode.init(cell.decoder, cell.params, batch.inputs)
  jax.block_until_ready(state)
  seconds_prefill = time.perf_counter() - clock
  loaded = _start_peak()
  clock = time.perf_counter()
  state = decode.run(
    cell.decoder, cell.params, state, batch.settings, np.int32(_UNBOUNDED)
  )
  jax.block_until_ready(state)
  seconds = time.perf_counter() - clock
  peak = _peak()
  found = _count(
    cell,
    state,
    seconds=seconds,
    seconds_prefill=seconds_prefill,
    loaded_bytes=loaded,
    peak_bytes=peak,
  )
  if time_propose:
    seconds = _time_propose(cell, state)
    found = dataclasses.replace(found, seconds_propose=seconds)
  return found


def _count(cell: Cell, state: states.DecodeState, **measured) -> Run:
  records = to_host(
    {
      name: getattr(state, name)
      for name in (
        'tokens_BL',
        'length_B',
        'prompt_length_B',
        'step_BL',
        'source_BL',
        'num_draft_BL',
        'overlap_BL',
      )
    }
  )
  rows, tokens = [], []
  spans = zip(records['prompt_length_B'], records['length_B'])
  for row, (begin, end) in enumerate(spans):
    emitted = slice(int(begin), int(end))
    tokens.append(tuple(records['tokens_BL'][row, emitted].tolist()))
    rows.append(
      metrics.tally(
        step=records['step_BL'][row, emitted],
        source=records['source_BL'][row, emitted],
        num_draft=records['num_draft_BL'][row, emitted],
        overlap=records['overlap_BL'][row, emitted],
        num_draft_tokens=cell.num_draft_tokens,
        is_stopped=False,
      )
    )
  index_1L = np.arange(records['tokens_BL'].shape[1])[None]
  is_emitted_BL = (index_1L >= records['prompt_length_B'][:, None]) & (
    index_1L < records['length_B'][:, None]
  )
  drafts = bench_stats.drafts_by_step(
    records['step_BL'], records['num_draft_BL'], is_emitted_BL
  )
  total = rows[0]
  for counts in rows[1:]:
    total += counts
  return Run(
    tokens=tuple(tokens),
    counts=total,
    drafts=drafts,
    **measured,
  )


def _time_propose(cell: Cell, state: states.DecodeState) -> float:
  """Seconds of `propose` on the state, called in a loop on the device."""
  k = cell.num_draft_tokens
  if not k:
    return 0.0
  # As the texts were before their last tokens, so that there is room for K.
  length_B = jnp.maximum(state.length_B - k - 1, 1)
  state = state.replace(
    length_B=length_B,
    limit_B=length_B + k + 1,
    done_B=jnp.zeros_like(state.done_B),
  )
  tokens_BL, proposer_state = state.tokens_BL, state.proposer_state
  rest = state.replace(tokens_BL=None, proposer_state=None)

  def call(num_calls: int) -> float:
    nonlocal tokens_BL, proposer_state
    clock = time.perf_counter()
    tokens_BL, proposer_state = _propose(
      cell.decoder,
      cell.params,
      tokens_BL,
      proposer_state,
      rest,
      cell.batches[0].settings,
      jnp.int32(num_calls),
    )
    jax.block_until_ready((tokens_BL, proposer_state))
    return time.perf_counter() - clock

  call(1)
  num_calls = int(np.clip(_CALL_SECONDS / call(1), 2, 256))
  return call(num_calls) / num_calls


@functools.partial(
  jax.jit,
  static_argnames='decoder',
  donate_argnames=('tokens_BL', 'proposer_state'),
)
def _propose(
  decoder: Decoder,
  params: Params,
  tokens_BL: Array,
  proposer_state: Any,
  rest: states.DecodeState,
  settings: Sampling,
  num_calls: Array,
):
  def one(_, carry):
    tokens_BL, proposer_state = carry
    state = rest.replace(tokens_BL=tokens_BL, proposer_state=proposer_state)
    proposal, proposer_state = decoder.propose(params, state, settings)
    # The next call depends on this one, by a token behind the row's end.
    last_B = proposal.draft_BK[:, -1] + proposal.num_draft_B
    return tokens_BL.at[:, -1].set(last_B), proposer_state

  return jax.lax.fori_loop(0, num_calls, one, (tokens_BL, proposer_state))


_STATUS = pathlib.Path('/proc/self/status')
_CLEAR = pathlib.Path('/proc/self/clear_refs')


def _start_peak() -> int | None:
  """Bytes in use; on a CPU under Linux the peak is counted from here."""
  memory = jax.local_devices()[0].memory_stats()
  if memory is not None:
    return memory.get('bytes_in_use')
  try:
    _CLEAR.write_text('5')
  except OSError:
    return None
  return _status('VmRSS')


def _peak() -> int | None:
  """The most bytes in use: on an accelerator of the whole process so far."""
  memory = jax.local_devices()[0].memory_stats()
  if memory is not None:
    return memory.get('peak_bytes_in_use')
  return _status('VmHWM')


def _status(name: str) -> int | None:
  try:
    found = re.search(rf'^{name}:\s+(\d+) kB$', _STATUS.read_text(), re.M)
  except OSError:
    return None
  return int(found[1]) * 1024 if found else None

r"""Recomputes acceptance from a recorded run, without any model.

  python experiments/generate.py --target=demo:target --draft=demo:draft \
    --prompts_jsonl=prompts.jsonl --temperature=1 --record=run.npz
  python experiments/replay.py --trace=run.npz --draft_lengths=1,2,4,8 \
    --verify=rejection,block --temperatures=recorded,0.5

Every emitted token has the laws of target and draft behind the text before it,
so the text can be cut into steps again. What such a replay is worth:

  exact     greedy rows, and coupled rows of a coupled run: text and drafts are
            those of a new run with the same seeds, whatever K.
  law       rejection, block and coupled at the recorded temperature: given the
            text, a drafted token was accepted with probability
            min(1, q / (w p)), w = 1 by token and the weight of block
            verification otherwise. A new run has other texts of the same law.
  estimate  another temperature: the laws are those of the recorded texts, and
            ids that were not recorded share their tail alike.

The interval is for a new run on the same requests: resampled requests and
redrawn acceptances, on both sides. How many drafts stand behind a rejection
matters to draft_acceptance_rate alone; with --stop_rules=confidence:X it is
taken from the text that was kept.
"""

import dataclasses
import sys
from typing import Any

import numpy as np
from absl import flags

from experiments import common, lengths, replay_laws, trace_file
from specjax.proposers.base import Outcome
from specjax.proposers.stopping import Confidence, Cost, StoppingRule

FIGURES = {
  'block_efficiency': ('emitted', 'steps'),
  'alpha_tested': ('accepted', 'tested'),
  'draft_acceptance_rate': ('accepted', 'drafted'),
}
_COUNTS = ('steps', 'drafted', 'accepted', 'emitted', 'tested')
_RESAMPLES = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
  """What is to be replayed.

  Attributes:
    num_draft_tokens: K.
    verify: 'greedy', 'rejection', 'coupled' or 'block'.
    temperature: None is as recorded.
    stop_rule: as on the command line.
  """

  num_draft_tokens: int
  verify: str
  temperature: float | None = None
  stop_rule: str = 'fixed'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
  """What a cell comes to.

  Attributes:
    cell: what was replayed.
    kind: 'exact', 'law' or 'estimate'.
    figures: name to (value, low, high); low and high are None with a single
      request, whose text cannot be resampled.
    accepted_histogram: shares of steps by accepted drafts, [K + 1].
    alpha_tv: mean of sum min(p, q) over all positions, at least and at most
      (the ids that were not recorded may overlap or not); None with filters.
  """

  cell: Cell
  kind: str
  figures: dict[str, tuple[float, float | None, float | None]]
  accepted_histogram: tuple[float, ...]
  alpha_tv: tuple[float, float] | None


def replay(
  trace: trace_file.TraceFile,
  cell: Cell,
  *,
  seed: int = 0,
  samples: int = 100,
  confidence: float = 0.95,
  step_costs: tuple[float, ...] = (),
) -> Replay:
  """Replays one cell.

  Args:
    trace: a recorded run.
    cell: what to replay.
    seed: of acceptances and resampling.
    samples: redrawn acceptances per text.
    confidence: of the intervals.
    step_costs: of 0, 1, ... drafts, for --stop_rules=cost.

  Raises:
    ValueError: the trace does not have what the cell needs.
  """
  rng = np.random.default_rng(seed)
  found = replay_laws.log_ratios(
    trace, cell.verify, cell.temperature, rng, samples
  )
  rule = lengths.parse(cell.stop_rule)
  if cell.stop_rule == 'cost':
    if not step_costs:
      raise ValueError('--stop_rules=cost needs --step_costs.')
    rule = Cost(step_costs=step_costs)
  counts, histogram = simulate(
    trace,
    found.log_ratio_SP,
    cell.num_draft_tokens,
    rule,
    is_block=cell.verify == 'block' and found.kind != 'exact',
    rng=rng,
  )
  return Replay(
    cell=cell,
    kind=found.kind,
    figures={
      name: _interval(counts[top], counts[below], found.kind, confidence, rng)
      for name, (top, below) in FIGURES.items()
    },
    accepted_histogram=tuple(histogram / histogram.sum()),
    alpha_tv=replay_laws.alpha_tv(trace, cell.temperature),
  )


def simulate(
  trace: trace_file.TraceFile,
  log_ratio_SP: np.ndarray,
  num_draft_tokens: int,
  rule: StoppingRule,
  *,
  is_block: bool,
  rng: np.random.Generator,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """Cuts every text into steps, S times.

  Args:
    trace: the texts.
    log_ratio_SP: log(q / p) of the token at each position; a rule that decides
      by equality has 0 where the draft is the token and -inf where not.
    num_draft_tokens: K.
    rule: ends drafts.
    is_block: whether drafts are judged together.
    rng: of the acceptances.

  Returns:
    Counts [S, R] by name, and steps by accepted drafts [K + 1].
  """
  num_samples, num_requests = len(log_ratio_SP), trace.num_requests
  k = num_draft_tokens
  each = lambda values: np.tile(values, num_samples)  # Rows: sample, request.
  begin_B, size_B = each(trace.begin), each(trace['num_tokens'])
  is_stopped_B = each(trace['is_stopped'])
  limit_B = np.where(is_stopped_B, each(trace['max_new_tokens']), size_B)
  sample_B = np.repeat(np.arange(num_samples), num_requests)
  best_q = np.exp(trace['law_q'].max(axis=1, initial=-np.inf))
  place_B = np.zeros_like(size_B)
  counts = {name: np.zeros(len(size_B), np.int64) for name in _COUNTS}
  histogram = np.zeros(k + 1, np.int64)
  state = rule.init(len(size_B))
  while np.any(place_B < size_B):
    is_live_B = place_B < size_B
    most_B = np.broadcast_to(np.asarray(rule.most(state, k)), place_B.shape)
    most_B = np.minimum(most_B, np.maximum(limit_B - place_B - 1, 0))
    drafted_B = np.zeros_like(place_B)
    accepted_B = np.zeros_like(place_B)
    is_drafting_B, is_kept_B = is_live_B.copy(), is_live_B.copy()
    log_w_B = np.zeros(len(place_B))
    for i in range(k):
      at_B = place_B + i
      is_there_B = at_B < size_B
      index_B = np.where(is_there_B, begin_B + at_B, 0)
      is_drafting_B &= i < most_B
      if isinstance(rule, Confidence):
        is_drafting_B &= ~is_there_B | (best_q[index_B] >= rule.least)
      drafted_B += is_drafting_B
      # Behind a stop nothing is known, and nothing counts.
      is_kept_B &= is_drafting_B & is_there_B
      log_ratio_B = log_ratio_SP[sample_B, index_B]
      log_u_B = np.log(1 - rng.random(len(place_B)))  # Of (0, 1].
      is_kept_B &= log_u_B <= log_ratio_B - log_w_B
      accepted_B += is_kept_B
      if is_block:
        log_w_B = np.where(
          is_kept_B, np.minimum(0.0, log_w_B - log_ratio_B), log_w_B
        )
    emitted_B = np.minimum(accepted_B + 1, size_B - place_B) * is_live_B
    is_cut_B = is_stopped_B & (place_B + emitted_B == size_B)
    drafted_B = np.where(is_cut_B, np.minimum(drafted_B, emitted_B), drafted_B)
    accepted_B = np.minimum(accepted_B, emitted_B)
    counts['steps'] += is_live_B
    counts['drafted'] += drafted_B
    counts['accepted'] += accepted_B
    counts['emitted'] += emitted_B
    counts['tested'] += accepted_B + (accepted_B < drafted_B)
    histogram += np.bincount(accepted_B[is_live_B], minlength=k + 1)
    state = rule.observe(state, _outcome(accepted_B, drafted_B, emitted_B))
    place_B = place_B + emitted_B
  shape = (num_samples, num_requests)
  return {name: x.reshape(shape) for name, x in counts.items()}, histogram


def _outcome(accepted_B, drafted_B, emitted_B) -> Outcome:
  """As much of an outcome as rules look at."""
  nothing = dict.fromkeys(Outcome._fields)
  return Outcome(
    **{
      **nothing,
      'num_accepted_B': accepted_B,
      'num_draft_B': drafted_B,
      'num_emitted_B': emitted_B,
    }
  )


def _interval(
  top_SR: np.ndarray,
  below_SR: np.ndarray,
  kind: str,
  confidence: float,
  rng: np.random.Generator,
) -> tuple[float, float | None, float | None]:
  """A ratio of sums, and where that of a new run lies."""
  ratio = lambda a, b: np.sum(a, -1) / np.maximum(np.sum(b, -1), 1)
  value = float(ratio(top_SR.ravel(), below_SR.ravel()))
  if kind == 'exact':
    return value, value, value
  num_samples, num_requests = top_SR.shape
  if num_requests < 2:
    return value, None, None
  draw = lambda most: rng.integers(most, size=(_RESAMPLES, num_requests))
  request, sample = draw(num_requests), draw(num_samples)
  new = ratio(top_SR[sample, request], below_SR[sample, request])
  request = draw(num_requests)
  ours = ratio(top_SR.mean(0)[request], below_SR.mean(0)[request])
  edge = 50 * (1 - confidence)
  low, high = np.percentile(value + new - ours, [edge, 100 - edge])
  return value, float(low), float(high)


def define_flags(values: flags.FlagValues):
  string = lambda name, default, text: flags.DEFINE_string(
    name, default, text, flag_values=values
  )
  many = lambda name, default, text: flags.DEFINE_list(
    name, default, text, flag_values=values
  )
  string('trace', None, 'The file that --record of generate.py wrote.')
  many('draft_lengths', '1,2,4,8', 'Drafts per step, each 1..64.')
  many('verify', 'rejection,block', 'Of greedy, rejection, coupled, block.')
  many('temperatures', 'recorded', 'Numbers, or recorded.')
  many('stop_rules', 'fixed', 'As --stop_rule of generate.py.')
  many('step_costs', '', 'Of a step with 0, 1, ... drafts, for cost.')
  flags.DEFINE_integer(
    'samples', 100, 'Redrawn acceptances per text.', flag_values=values
  )
  flags.DEFINE_float(
    'confidence', 0.95, 'Of the intervals.', flag_values=values
  )
  flags.DEFINE_integer('seed', 0, 'Of what is redrawn.', flag_values=values)
  string('json_out', None, 'Write the replays to this file.')


FLAG_GROUPS = (('Replay', define_flags),)


def cells_from_flags(values: flags.FlagValues) -> list[Cell]:
  """Every combination that the flags name, checked."""
  found = []
  for rule in values.stop_rules:
    lengths.parse(rule)
  for verify in values.verify:
    if verify not in replay_laws.RULES:
      raise ValueError(
        f'--verify must be some of {", ".join(replay_laws.RULES)}, got '
        f'{verify!r}.'
      )
  sizes = []
  for text in values.draft_lengths:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 64:
      raise ValueError(
        f'--draft_lengths must be numbers in 1..64, got {text!r}.'
      )
    sizes.append(int(text))
  for temperature in values.temperatures:
    value = None if temperature == 'recorded' else _number(temperature)
    for verify in values.verify:
      for rule in values.stop_rules:
        for k in sizes:
          found.append(
            Cell(
              num_draft_tokens=k,
              verify=verify,
              temperature=value,
              stop_rule=rule,
            )
          )
  if not found:
    raise ValueError(
      '--draft_lengths, --verify, --temperatures, --stop_rules must have one '
      'entry or more each, got none in one of them.'
    )
  return found


def _number(text: str, name: str = '--temperatures') -> float:
  try:
    value = float(text)
  except ValueError:
    value = np.nan
  if not 0 <= value <= 1e6:
    raise ValueError(f'{name} must be numbers in [0, 1e6], got {text!r}.')
  return value


def table(replays: list[Replay]) -> str:
  """The replays as lines of text."""
  lines = [
    'temperature verify    stop       K  tokens/step'
    '              alpha                    worth'
  ]
  for one in replays:
    cell = one.cell
    shown = [
      f'{value:.3f}' + (f' [{low:.3f}, {high:.3f}]' if low is not None else '')
      for value, low, high in (
        one.figures['block_efficiency'],
        one.figures['alpha_tested'],
      )
    ]
    heat = 'recorded' if cell.temperature is None else f'{cell.temperature:g}'
    lines.append(
      f'{heat:<11} {cell.verify:<9} {cell.stop_rule:<9} '
      f'{cell.num_draft_tokens:>2}  {shown[0]:<23}  {shown[1]:<23}  {one.kind}'
    )
  return '\n'.join(lines)


def main(values: flags.FlagValues):
  if values.trace is None:
    raise ValueError('--trace must name a file that --record wrote.')
  if values.samples < 1:
    raise ValueError(f'--samples must be >= 1, got {values.samples}.')
  if not 0 < values.confidence < 1:
    raise ValueError(
      f'--confidence must be above 0 and below 1, got {values.confidence}.'
    )
  if values.json_out is not None:
    common.check_writable(values.json_out)
  cells = cells_from_flags(values)
  costs = tuple(
    _number(text, '--step_costs') for text in values.step_costs if text
  )
  trace = trace_file.load(values.trace)
  replays = []
  with common.Progress('replaying') as progress:
    for i, cell in enumerate(cells, 1):
      progress.update(f'{i} of {len(cells)}')
      replays.append(
        replay(
          trace,
          cell,
          seed=values.seed,
          samples=values.samples,
          confidence=values.confidence,
          step_costs=costs,
        )
      )
  print(table(replays))
  if values.json_out is not None:
    common.write_json(values.json_out, report(values, trace, replays))


def report(
  values: flags.FlagValues,
  trace: trace_file.TraceFile,
  replays: list[Replay],
) -> dict[str, Any]:
  """The contents of --json_out."""
  return {
    'config': {name: values[name].value for name in values},
    'environment': common.environment(),
    'recorded': {
      name: trace.about[name] for name in ('config', 'environment', 'verify')
    },
    'rows': replays,
  }


if __name__ == '__main__':
  sys.exit(common.run_main(main, FLAG_GROUPS))

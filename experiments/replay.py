r"""Recomputes acceptance from a recorded run, without any model.

  python experiments/generate.py --target=demo:target --draft=demo:draft \
    --prompts_jsonl=prompts.jsonl --temperature=1 --record=run.npz
  python experiments/replay.py --trace=run.npz --draft_lengths=1,2,4,8 \
    --verify=rejection,block --temperatures=recorded,0.5

Every emitted token has the laws of target and draft behind the text before it,
so the text can be cut into steps again. What such a replay is worth:

  exact     greedy rows, and coupled rows of a coupled run that recorded enough
            ids (--record_top): text and drafts are those of a new run with the
            same seeds, whatever K.
  law       rejection, block and coupled at a temperature that was recorded:
            given the text, a drafted token was accepted with probability
            min(1, q / (w p)), w = 1 by token and the weight of block
            verification otherwise. A new run has other texts of the same law.
  estimate  another temperature, whose texts are other texts: those that were
            recorded count by how likely they are there (replay_weights.py says
            how); ids that were not recorded share their tail alike. Coupled
            rows as well, where the draft may have drawn more than one id in a
            hundred that was not recorded; these have no interval.

A trace may hold requests of several temperatures; those that were recorded at
the one asked for are used alone. What prompt lookup drafts is looked up again.

The interval is for a new run on the same requests: resampled requests and
redrawn acceptances, on both sides; that of an estimate is wider by how far the
weights have moved the figure. There is none for a single request, nor where too
few of the texts are like those of the other temperature, nor for a temperature
above the recorded ones: record at the highest that will be asked for.

How many drafts stand behind a rejection matters to draft_acceptance_rate alone;
with --stop_rules=confidence:X it is taken from the text that was kept, and the
rate has no interval.
"""

import dataclasses
import sys
from typing import Any

import numpy as np
from absl import flags

from experiments import (
  lengths,
  replay_laws,
  replay_steps,
  replay_weights,
  script,
  surroundings,
  text_files,
  trace_file,
)
from experiments.progress import Progress
from specjax.proposers.stopping import Cost

FIGURES = {
  'block_efficiency': ('emitted', 'steps'),
  'alpha_tested': ('accepted', 'tested'),
  'draft_acceptance_rate': ('accepted', 'drafted'),
}
_FIRST = 'block_efficiency'
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
    figures: name to (value, low, high); low and high are None where there is
      no interval.
    accepted_histogram: shares of steps by accepted drafts, [K + 1].
    alpha_tv: mean of sum min(p, q) over all positions, at least and at most
      (the ids that were not recorded may overlap or not); None with filters,
      and for drafts without laws.
    num_requests: how many tell of the temperature.
    num_texts: as many of them as count; below num_requests in an estimate.
    window: tokens by which an estimate weighs texts, else 0.
  """

  cell: Cell
  kind: str
  figures: dict[str, tuple[float, float | None, float | None]]
  accepted_histogram: tuple[float, ...]
  alpha_tv: tuple[float, float] | None
  num_requests: int
  num_texts: float
  window: int


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
  found = replay_laws.acceptance(
    trace, cell.verify, cell.temperature, cell.num_draft_tokens
  )
  rule = lengths.parse(cell.stop_rule)
  lengths.check(cell.stop_rule, trace.about['config'].get('proposer', 'draft'))
  if cell.stop_rule == 'cost':
    if not step_costs:
      raise ValueError('--stop_rules=cost needs --step_costs.')
    rule = Cost(step_costs=step_costs)
  if not found.is_recorded:
    weights = replay_weights.tilted(
      found.trace, found.log_tilt_P, cell.temperature
    )
  else:
    weights = replay_weights.plain(found.trace)
  counts, histogram = replay_steps.simulate(
    found.trace,
    found.drafts,
    cell.num_draft_tokens,
    rule,
    is_block=cell.verify == 'block',
    samples=1 if found.kind == 'exact' else samples,
    weight_WP=weights.weight_WP,
    rng=rng,
  )
  # What a token of each text weighs on average.
  share_R = counts['emitted'][-1, 0] / np.maximum(found.trace['num_tokens'], 1)
  most = {_FIRST: (1.0, cell.num_draft_tokens + 1.0)}
  figures = {}
  for name, (top, below) in FIGURES.items():
    value, low, high = _interval(
      counts[top], counts[below], share_R, confidence, rng
    )
    if found.kind == 'exact':
      low = high = value
    bounds = most.get(name, (0.0, 1.0))
    figures[name] = (value, None, None)
    # Ids that the draft may have drawn are missing, or drafts behind the text.
    is_guessed = (found.is_recorded and found.kind == 'estimate') or (
      rule.reads_logits and name == 'draft_acceptance_rate'
    )
    if weights.is_enough and not is_guessed:
      figures[name] = (value, max(low, bounds[0]), min(high, bounds[1]))
  return Replay(
    cell=cell,
    kind=found.kind,
    figures=figures,
    accepted_histogram=tuple(histogram[-1] / histogram[-1].sum()),
    alpha_tv=replay_laws.alpha_tv(found.trace, cell.temperature),
    num_requests=found.trace.num_requests,
    num_texts=weights.num_texts,
    window=weights.window,
  )


def _interval(
  top_WSR: np.ndarray,
  below_WSR: np.ndarray,
  share_R: np.ndarray,
  confidence: float,
  rng: np.random.Generator,
) -> tuple[float, float, float]:
  """A ratio of sums, and where that of a new run lies.

  Args:
    top_WSR, below_WSR: weighted counts; the last of W is what is asked for.
    share_R: how often each text is one of a new run, up to a factor.
    confidence: of the interval.
    rng: of the resampling.
  """
  ratio = lambda a, b: np.sum(a, -1) / np.maximum(np.sum(b, -1), 1e-300)
  values = [ratio(a.ravel(), b.ravel()) for a, b in zip(top_WSR, below_WSR)]
  top_SR, below_SR = top_WSR[-1], below_WSR[-1]
  num_samples, num_requests = top_SR.shape
  shape = (_RESAMPLES, num_requests)
  ours = rng.integers(num_requests, size=shape)
  new = rng.choice(num_requests, p=share_R / share_R.sum(), size=shape)
  sample = rng.integers(num_samples, size=shape)
  per_text = np.where(share_R > 0, 1 / np.maximum(share_R, 1e-300), 0)
  gap = ratio(
    top_SR[sample, new] * per_text[new], below_SR[sample, new] * per_text[new]
  ) - ratio(top_SR.mean(0)[ours], below_SR.mean(0)[ours])
  edge = 50 * (1 - confidence)
  low, high = np.percentile(gap, [edge, 100 - edge])
  value = float(values[-1])
  drift = float(np.max(np.abs(np.array(values) - value)))
  return value, float(value + low - drift), float(value + high + drift)


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
      f'{value:.3f}'
      + (f' [{low:.3f}, {high:.3f}]' if low is not None else ' -')
      for value, low, high in (
        one.figures[_FIRST],
        one.figures['alpha_tested'],
      )
    ]
    heat = 'recorded' if cell.temperature is None else f'{cell.temperature:g}'
    lines.append(
      f'{heat:<11} {cell.verify:<9} {cell.stop_rule:<9} '
      f'{cell.num_draft_tokens:>2}  {shown[0]:<23}  {shown[1]:<23}  '
      f'{worth(one)}'
    )
  return '\n'.join(lines)


def worth(one: Replay) -> str:
  """The kind of a replay, and what an estimate rests on."""
  if one.kind != 'estimate':
    return one.kind
  if not one.window:
    return 'estimate: ids that the draft may have drawn were not recorded'
  text = f'estimate: {one.num_texts:.1f} of {one.num_requests} texts count'
  if one.figures[_FIRST][1] is None:
    return f'{text}, too few or too cold for an interval'
  return f'{text}, window {one.window}'


def main(values: flags.FlagValues):
  if values.trace is None:
    raise ValueError('--trace must name a file that --record wrote.')
  if values.seed < 0:
    raise ValueError(f'--seed must be >= 0, got {values.seed}.')
  if values.samples < 1:
    raise ValueError(f'--samples must be >= 1, got {values.samples}.')
  if not 0 < values.confidence < 1:
    raise ValueError(
      f'--confidence must be above 0 and below 1, got {values.confidence}.'
    )
  if values.json_out is not None:
    text_files.check_writable(values.json_out)
  cells = cells_from_flags(values)
  if any(values.step_costs) and 'cost' not in values.stop_rules:
    raise ValueError(
      '--step_costs are for --stop_rules=cost, got --stop_rules='
      f'{",".join(values.stop_rules)}.'
    )
  costs = tuple(
    _number(text, '--step_costs') for text in values.step_costs if text
  )
  trace = trace_file.load(values.trace)
  replays = []
  with Progress('replaying') as progress:
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
    text_files.write_json(values.json_out, report(values, trace, replays))


def report(
  values: flags.FlagValues,
  trace: trace_file.TraceFile,
  replays: list[Replay],
) -> dict[str, Any]:
  """The contents of --json_out."""
  return {
    'config': {name: values[name].value for name in values},
    'environment': surroundings.environment(),
    'recorded': {
      name: trace.about[name] for name in ('config', 'environment', 'verify')
    },
    'rows': replays,
  }


if __name__ == '__main__':
  sys.exit(script.run_main(main, FLAG_GROUPS))

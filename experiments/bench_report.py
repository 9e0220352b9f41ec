"""What a benchmark found: rows of numbers, and a table for people."""

from typing import Any

import numpy as np

from experiments import bench_stats
from experiments.bench_cells import Cell, Run
from experiments.bench_run import Bench, CostKey, Rounds
from specjax import metrics

_COLUMNS = {
  'proposer': 'proposer',
  'K': 'K',
  'batch': 'B',
  'width': 'rows',
  'weights': 'weights',
  'tokens_per_second': 'tokens/s',
  'range': 'least..most',
  'speedup': 'speed-up',
  'interval': '95 %',
  'predicted_speedup': 'predicted',
  'efficiency': 'efficiency',
  'loop_overhead': 'overhead',
  'block_efficiency': 'tokens/step',
  'same_text': 'same text',
  'plain_ms': 'plain ms',
  'verify_ms': 'verify ms',
  'draft_ms': 'draft ms',
  'propose_ms': 'propose ms',
  'step_ms': 'step ms',
  'peak_gib': 'peak GiB',
  'growth_mib': 'growth MiB',
}
_PEER_COLUMNS = {
  'mode': 'mode',
  'K': 'K',
  'tokens_per_second': 'tokens/s',
  'range': 'least..most',
  'over_best': 'our best',
  'best_speedup': 'over this mode',
  'interval': '95 %',
}


def rows(bench: Bench, rounds: Rounds) -> list[dict[str, Any]]:
  """A row for every cell; see `_row`."""
  return [_row(bench, rounds, cell) for cell in bench.cells]


def _timings(runs: list[list[Run]]) -> tuple[np.ndarray, np.ndarray]:
  emitted_P = np.array([run.counts.num_emitted for run in runs[0]])
  return emitted_P, np.array([[run.seconds for run in row] for row in runs])


def _row(bench: Bench, rounds: Rounds, cell: Cell) -> dict[str, Any]:
  runs = rounds.runs[cell]
  base = bench.baselines[cell.batch_size]
  emitted_P, seconds_RP = _timings(runs)
  found = bench_stats.rates(emitted_P, seconds_RP)
  speedup = bench_stats.ratio(
    emitted_P, seconds_RP, *_timings(rounds.runs[base])
  )
  total = runs[0][0].counts
  for run in runs[0][1:]:
    total += run.counts
  drafts = np.concatenate([run.drafts for run in runs[0]])
  num_steps = len(drafts)
  tokens_per_step = total.num_emitted / (num_steps * cell.batch_size)
  num_passes = float(np.mean([cell.num_passes(n) for n in drafts]))
  costs = _costs(bench, rounds, cell, drafts)
  step = float(np.median(np.sum(seconds_RP, axis=1))) / num_steps
  predicted_step = bench_stats.step_seconds(costs, num_passes)
  predicted = bench_stats.predicted_speedup(costs, num_passes, tokens_per_step)
  everything = [run for row in runs for run in row]
  peaks = [run.peak_bytes for run in everything if run.peak_bytes is not None]
  growth = [
    run.peak_bytes - run.loaded_bytes
    for run in everything
    if None not in (run.peak_bytes, run.loaded_bytes)
  ]
  target, draft = cell.decoder.target, cell.drafting
  setting = lambda model, name: getattr(model, name, None)
  return {
    'proposer': cell.proposer,
    'K': cell.num_draft_tokens,
    'batch': cell.batch_size,
    'stop_rule': cell.stop_rule,
    'width': cell.decoder.num_rows,
    'widths': {str(w): share for w, share in _shares(cell, drafts).items()},
    'is_baseline': cell is base,
    'dtype': setting(target, 'dtype') or 'float32',
    'quantize': setting(target, 'quantize') or 'none',
    'draft_dtype': draft and (setting(draft[0], 'dtype') or 'float32'),
    'draft_quantize': draft and (setting(draft[0], 'quantize') or 'none'),
    'tokens_per_second': float(np.median(found)),
    'tokens_per_second_least': float(np.min(found)),
    'tokens_per_second_most': float(np.max(found)),
    'speedup': speedup.value,
    'speedup_low': speedup.low,
    'speedup_high': speedup.high,
    'predicted_speedup': predicted,
    'efficiency': speedup.value / predicted,
    'loop_overhead': 1 - predicted_step / step,
    'tokens_per_loop_step': tokens_per_step,
    'draft_passes_per_step': num_passes,
    'seconds_step': step,
    'seconds_predicted_step': predicted_step,
    'seconds_plain_step': costs.plain,
    'seconds_verify': costs.verify,
    'seconds_draft_step': costs.draft,
    'seconds_absorb': costs.absorb,
    'seconds_propose': costs.propose,
    'seconds_compile': bench.seconds_compile[cell],
    'seconds_prefill': float(
      np.median([sum(run.seconds_prefill for run in row) for row in runs])
    ),
    'peak_memory': max(peaks, default=None),
    'memory_growth': max(growth, default=None),
    'equal_to_plain': _is_equal(bench, rounds, cell),
    **metrics.summarise(total),
    'seconds': seconds_RP,
    'emitted': emitted_P,
  }


def _costs(
  bench: Bench, rounds: Rounds, cell: Cell, drafts: np.ndarray
) -> bench_stats.Costs:
  def seconds(key: CostKey) -> float:
    return float(np.median(rounds.costs[key])) / 1e3

  keys = bench.draft_keys(cell)
  draft, absorb = (None, None) if keys is None else map(seconds, keys)
  base = bench.baselines[cell.batch_size]
  return bench_stats.Costs(
    plain=seconds(bench.target_key(base, base.decoder.num_rows)),
    verify=sum(
      seconds(bench.target_key(cell, width)) * share
      for width, share in _shares(cell, drafts).items()
    ),
    draft=draft,
    absorb=absorb,
    propose=float(
      np.median([row[0].seconds_propose for row in rounds.runs[cell]])
    ),
  )


def _shares(cell: Cell, drafts: np.ndarray) -> dict[int, float]:
  """By width of the target's pass, the share of the steps."""
  widths = [cell.width_of(n) for n in drafts]
  return {width: widths.count(width) / len(widths) for width in set(widths)}


def _is_equal(bench: Bench, rounds: Rounds, cell: Cell) -> bool | None:
  """Whether the texts are those of plain decoding at the same width.

  None for plain decoding itself, and where none has that width.
  """
  if cell.proposer == 'none':
    return None
  for other in bench.cells:
    shape = other.proposer, other.batch_size, other.decoder.num_rows
    if shape == ('none', cell.batch_size, cell.decoder.num_rows):
      texts = lambda c: [run.tokens for row in rounds.runs[c] for run in row]
      return texts(cell) == texts(other)
  return None


def step_costs(rounds: Rounds) -> list[dict[str, Any]]:
  """Every pass that was timed, in seconds."""
  return [
    {
      'who': key.who,
      'batch': key.batch_size,
      'rows': key.num_rows,
      'slots': key.num_slots,
      'seconds': float(np.median(found)) / 1e3,
      'seconds_least': min(found) / 1e3,
      'seconds_most': max(found) / 1e3,
    }
    for key, found in rounds.costs.items()
  ]


def peer_rows(
  bench: Bench, rounds: Rounds, own: list[dict[str, Any]]
) -> dict[str, Any] | None:
  """The peer's modes, and our fastest cell of one row over each of them."""
  if not rounds.peer:
    return None
  # A peer decodes n tokens less the first one, whose time is taken off.
  emitted_P = np.array([row.max_new_tokens - 1 for row in bench.requests])
  single = [row for row in own if row['batch'] == 1]
  best = max(single, key=lambda row: row['tokens_per_second'], default=None)
  found = []
  for index, mode in enumerate(rounds.peer[0]['modes']):
    seconds_RP = np.array(
      [answer['modes'][index]['seconds'] for answer in rounds.peer]
    )
    rates = bench_stats.rates(emitted_P, seconds_RP)
    row = {
      'mode': mode['mode'],
      'K': mode['num_draft_tokens'],
      'tokens_per_second': float(np.median(rates)),
      'tokens_per_second_least': float(np.min(rates)),
      'tokens_per_second_most': float(np.max(rates)),
      'our_best': best and f'{best["proposer"]} K={best["K"]}',
      'best_speedup': None,
      'best_speedup_low': None,
      'best_speedup_high': None,
      'seconds': seconds_RP,
    }
    if best is not None:
      over = bench_stats.ratio(
        best['emitted'], best['seconds'], emitted_P, seconds_RP
      )
      row['best_speedup'] = over.value
      row['best_speedup_low'] = over.low
      row['best_speedup_high'] = over.high
    found.append(row)
  fastest = max(found, key=lambda row: row['tokens_per_second'])
  return {
    'rows': found,
    'fastest_mode': fastest['mode'],
    'about': rounds.peer[0]['about'],
  }


def markdown(report: dict[str, Any]) -> str:
  """The tables for people."""
  config, where = report['config'], report['environment']
  lines = [
    f'# Benchmark on {where["device_kind"]}',
    '',
    f'{config["target"]}'
    + (f' with {config["draft"]}' if config['draft'] else '')
    + f', {config["num_prompts"]} prompts, {config["max_new_tokens"]} new '
    f'tokens, {config["repeats_done"]} repeats, decoding alone, '
    f'{config["num_threads"]} threads. Speed-up: over the fastest plain '
    'decoding of this run.'
    + (f' Forced: {config["verify"]}.' if config['accept'] is not None else ''),
    '',
    *_table(_COLUMNS, [_shown(row) for row in report['rows']]),
  ]
  if report['peers'] is not None:
    about = report['peers']['about']
    lines += [
      '',
      '## Peer: ' + ', '.join(f'{k} {v}' for k, v in about['versions'].items()),
      '',
      about['note'],
      '',
      *_table(_PEER_COLUMNS, [_shown_peer(r) for r in report['peers']['rows']]),
    ]
  return '\n'.join(lines)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
  scaled = lambda name, scale: None if row[name] is None else row[name] * scale
  weights = row['dtype'] if row['quantize'] == 'none' else row['quantize']
  if row['draft_dtype']:
    own = row['draft_quantize']
    weights += f', {row["draft_dtype"] if own == "none" else own}'
  return {
    **row,
    'proposer': row['proposer']
    + ' (baseline)' * row['is_baseline']
    + (f', {row["stop_rule"]}' if row['stop_rule'] != 'fixed' else ''),
    'weights': weights,
    'same_text': {None: None, True: 'yes', False: 'NO'}[row['equal_to_plain']],
    'range': _range(row, 'tokens_per_second_least', 'tokens_per_second_most'),
    'interval': _range(row, 'speedup_low', 'speedup_high'),
    'loop_overhead': f'{100 * row["loop_overhead"]:.1f} %',
    'plain_ms': scaled('seconds_plain_step', 1e3),
    'verify_ms': scaled('seconds_verify', 1e3),
    'draft_ms': scaled('seconds_draft_step', 1e3),
    'propose_ms': scaled('seconds_propose', 1e3),
    'step_ms': scaled('seconds_step', 1e3),
    'peak_gib': scaled('peak_memory', 2**-30),
    'growth_mib': scaled('memory_growth', 2**-20),
  }


def _shown_peer(row: dict[str, Any]) -> dict[str, Any]:
  return {
    **row,
    'range': _range(row, 'tokens_per_second_least', 'tokens_per_second_most'),
    'over_best': row['our_best'],
    'interval': _range(row, 'best_speedup_low', 'best_speedup_high'),
  }


def _range(row: dict[str, Any], low: str, high: str) -> str | None:
  if row[low] is None:
    return None
  return f'{row[low]:.3g}..{row[high]:.3g}'


def _table(columns: dict[str, str], shown: list[dict[str, Any]]) -> list[str]:
  return [
    f'| {" | ".join(columns.values())} |',
    '|---' * len(columns) + '|',
    *(
      f'| {" | ".join(_cell(row[name]) for name in columns)} |' for row in shown
    ),
  ]


def _cell(value: Any) -> str:
  if value is None:
    return '-'
  return f'{value:.3g}' if isinstance(value, float) else str(value)

"""Figures of a benchmark, from the report of `benchmark.py`."""

import pathlib
from typing import Any

from experiments import draw
from specjax.pictures import style

Report = dict[str, Any]


def _series(report: Report) -> dict[tuple[str, int], list[dict[str, Any]]]:
  """Speculative rows by proposer and batch size, by K."""
  found: dict[tuple[str, int], list] = {}
  for row in sorted(report['rows'], key=lambda row: row['K']):
    name = row['proposer']
    if row['stop_rule'] != 'fixed':
      name += f' {row["stop_rule"]}'
    if row['K']:
      found.setdefault((name, row['batch']), []).append(row)
  return found


def _label(name: str, batch: int, report: Report) -> str:
  is_one = len(report['config']['batch_sizes']) == 1
  return name if is_one else f'{name}, batch {batch}'


def tokens_per_second(report: Report) -> style.Figure:
  """Speed against K; the plain baseline is a level line."""
  figure, axes = style.figure('Decoding speed', 'drafts per step K', 'tokens/s')
  styles = iter(style.STYLES * 8)
  for row in report['rows']:
    if row['is_baseline']:
      axes.axhline(
        row['tokens_per_second'],
        color='0.35',
        linestyle=next(styles)['linestyle'],
        label=_label('plain', row['batch'], report),
      )
  styles = iter(style.STYLES * 8)
  for (name, batch), rows in _series(report).items():
    middle = [row['tokens_per_second'] for row in rows]
    axes.errorbar(
      [row['K'] for row in rows],
      middle,
      yerr=[
        [m - row['tokens_per_second_least'] for m, row in zip(middle, rows)],
        [row['tokens_per_second_most'] - m for m, row in zip(middle, rows)],
      ],
      capsize=3,
      label=_label(name, batch, report),
      **next(styles),
    )
  axes.set_xticks(sorted({row['K'] for row in report['rows'] if row['K']}))
  axes.set_ylim(bottom=0)
  style.legend(axes)
  return figure


def acceptance(report: Report) -> style.Figure:
  """How often the draft at each position is accepted, at the largest K."""
  figure, axes = style.figure(
    'Acceptance', 'position of the draft', 'share of drafting steps'
  )
  styles = iter(style.STYLES * 8)
  for (name, batch), rows in _series(report).items():
    shares = rows[-1]['acceptance_per_position']
    known = [(i, x) for i, x in enumerate(shares, 1) if x is not None]
    axes.plot(
      [i for i, _ in known],
      [x for _, x in known],
      label=f'{_label(name, batch, report)}, K = {rows[-1]["K"]}',
      **next(styles),
    )
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.set_ylim(0, 1)
  style.legend(axes)
  return figure


def step_cost(report: Report) -> style.Figure:
  """What a pass costs by the number of rows it takes."""
  figure, axes = style.figure('Cost of a pass', 'rows', 'milliseconds')
  styles = iter(style.STYLES * 8)
  found: dict[tuple[str, int], list[dict[str, Any]]] = {}
  for cost in report['step_costs']:
    found.setdefault((cost['who'], cost['batch']), []).append(cost)
  for (who, batch), costs in found.items():
    costs = sorted(costs, key=lambda cost: cost['rows'])
    axes.plot(
      [cost['rows'] for cost in costs],
      [1e3 * cost['seconds'] for cost in costs],
      label=_label(who, batch, report),
      **next(styles),
    )
  axes.set_ylim(bottom=0)
  style.legend(axes)
  return figure


def predicted_measured(report: Report) -> style.Figure:
  """Measured speed-up against the predicted one; the diagonal is agreement."""
  figure, axes = style.figure(
    'Speed-up over plain decoding', 'predicted from step costs', 'measured'
  )
  styles = iter(style.STYLES * 8)
  largest = 1.0
  for (name, batch), rows in _series(report).items():
    x = [row['predicted_speedup'] for row in rows]
    y = [row['speedup'] for row in rows]
    largest = max(largest, *x, *y)
    look = {**next(styles), 'linestyle': 'none'}
    axes.plot(x, y, label=_label(name, batch, report), **look)
    for row, at in zip(rows, zip(x, y)):
      axes.annotate(
        f'K={row["K"]}',
        at,
        textcoords='offset points',
        xytext=(5, -9),
        fontsize='x-small',
      )
  end = 1.08 * largest
  axes.plot([0, end], [0, end], color='0.35', linewidth=0.8, label='agreement')
  axes.set(xlim=(0, end), ylim=(0, end))
  style.legend(axes)
  return figure


FIGURES = {
  'tokens_per_second': tokens_per_second,
  'acceptance': acceptance,
  'step_cost': step_cost,
  'predicted_measured': predicted_measured,
}


def write(report: Report, folder: str) -> list[pathlib.Path]:
  """Writes every figure as PNG; a failure leaves old ones as they were."""
  paths = []
  for name, make in FIGURES.items():
    path = pathlib.Path(folder) / f'{name}.png'
    draw.save(make(report), path)
    paths.append(path)
  return paths

"""Pictures of a benchmark; readable in print and without colours.

Every line has a marker and a dash pattern of its own. The functions take the
report of `benchmark.py` and return figures; matplotlib is imported here alone.
"""

import importlib.util
import os
import pathlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from matplotlib.figure import Figure

Report = dict[str, Any]

# Okabe and Ito's colours, which differ for every kind of colour vision.
_STYLES = tuple(
  {'color': color, 'marker': marker, 'linestyle': line}
  for color, marker, line in (
    ('#0072B2', 'o', '-'),
    ('#D55E00', 's', '--'),
    ('#009E73', '^', '-.'),
    ('#CC79A7', 'D', ':'),
    ('#000000', 'v', (0, (5, 1, 1, 1, 1, 1))),
    ('#E69F00', 'P', (0, (1, 1))),
    ('#56B4E9', 'X', (0, (8, 2))),
  )
)


def check(folder: str):
  """Raises ValueError unless pictures can be written there later."""
  if importlib.util.find_spec('matplotlib') is None:
    raise ValueError(
      "--plots needs the package matplotlib: pip install 'specjax[plots]'."
    )
  path = pathlib.Path(folder)
  if not path.is_dir():
    raise ValueError(f'--plots must be an existing folder, got {folder!r}.')
  if not os.access(path, os.W_OK | os.X_OK):
    raise ValueError(f'--plots: the folder {folder!r} is read-only.')


def _figure(title: str, x: str, y: str):
  from matplotlib.figure import Figure

  # Not through pyplot: no window, nothing global, nothing to close.
  figure = Figure(figsize=(6.4, 4.2), layout='constrained')
  axes = figure.add_subplot()
  axes.set(title=title, xlabel=x, ylabel=y)
  axes.grid(color='0.85', linewidth=0.6)
  axes.set_axisbelow(True)
  return figure, axes


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


def _legend(axes):
  if axes.get_legend_handles_labels()[0]:
    axes.legend(fontsize='small')


def tokens_per_second(report: Report) -> 'Figure':
  """Speed against K; the plain baseline is a level line."""
  figure, axes = _figure('Decoding speed', 'drafts per step K', 'tokens/s')
  styles = iter(_STYLES * 8)
  for row in report['rows']:
    if row['is_baseline']:
      axes.axhline(
        row['tokens_per_second'],
        color='0.35',
        linestyle=next(styles)['linestyle'],
        label=_label('plain', row['batch'], report),
      )
  styles = iter(_STYLES * 8)
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
  _legend(axes)
  return figure


def acceptance(report: Report) -> 'Figure':
  """How often the draft at each position is accepted, at the largest K."""
  figure, axes = _figure(
    'Acceptance', 'position of the draft', 'share of drafting steps'
  )
  styles = iter(_STYLES * 8)
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
  _legend(axes)
  return figure


def step_cost(report: Report) -> 'Figure':
  """What a pass costs by the number of rows it takes."""
  figure, axes = _figure('Cost of a pass', 'rows', 'milliseconds')
  styles = iter(_STYLES * 8)
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
  _legend(axes)
  return figure


def predicted_measured(report: Report) -> 'Figure':
  """Measured speed-up against the predicted one; the diagonal is agreement."""
  figure, axes = _figure(
    'Speed-up over plain decoding', 'predicted from step costs', 'measured'
  )
  styles = iter(_STYLES * 8)
  largest = 1.0
  for (name, batch), rows in _series(report).items():
    x = [row['predicted_speedup'] for row in rows]
    y = [row['speedup'] for row in rows]
    largest = max(largest, *x, *y)
    style = {**next(styles), 'linestyle': 'none'}
    axes.plot(x, y, label=_label(name, batch, report), **style)
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
  _legend(axes)
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
  for name, draw in FIGURES.items():
    path = pathlib.Path(folder) / f'{name}.png'
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    try:
      draw(report).savefig(temporary, format='png', dpi=160)
      os.replace(temporary, path)
    finally:
      temporary.unlink(missing_ok=True)
    paths.append(path)
  return paths

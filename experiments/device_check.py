"""Checks a device: the certificate, exactness, step costs, tokens per second.

  python experiments/device_check.py --minutes=4 --json_out=device.json

Needs no files: the target is a published shape (or a tiny one) with random
weights. The draft is its first quarter of layers, and the target's other layers
are damped, so that the draft is often right and costs less, as real pairs do.
What a time limit leaves no room for is listed as left out. Exit code 1 if text
that must be equal differs, the certificate fails, or a part breaks down; no
measured time is judged.
"""

import dataclasses
import functools
import itertools
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import (
  device_parts,
  random_pair,
  script,
  surroundings,
  text_files,
)
from experiments.progress import Progress

ROWS = (1, 2, 4, 6, 8, 16)  # Of a pass of the target.
PARTS = ('certify', 'exactness', 'steps', 'generate')
# Passes whose costs predict a speed-up: plain, verification, draft.
_NEEDED = (('target', 1), ('target', device_parts.WIDTH), ('draft', 1))
_STEPS_PER_GENERATION = 15  # In time, compilation included: a first guess.


def define_flags(values: flags.FlagValues):
  flags.DEFINE_string(
    'target',
    None,
    "A preset's name, or tiny. If not given: llama-3.2-1b on an accelerator, "
    'tiny on a CPU.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'minutes',
    4.0,
    'Nothing is begun that is not expected to end by then.',
    flag_values=values,
  )
  flags.DEFINE_list(
    'parts', list(PARTS), f'Of {", ".join(PARTS)}.', flag_values=values
  )
  flags.DEFINE_bool(
    'smallest',
    False,
    'Greedy decoding in one dtype and batch size, few rows, and one program '
    'of the certificate.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'json_out', None, 'File for all results, as JSON.', flag_values=values
  )


FLAG_GROUPS = (('Check', define_flags),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckConfig:
  """What is checked; the flags of the same names."""

  target: str
  minutes: float = 4.0
  parts: tuple[str, ...] = PARTS
  smallest: bool = False
  json_out: str | None = None

  def __post_init__(self):
    if not 0 < self.minutes < math.inf:
      raise ValueError(f'minutes must be > 0, got {self.minutes}.')
    unknown = [part for part in self.parts if part not in PARTS]
    if unknown or not self.parts:
      raise ValueError(
        f'parts must be some of {", ".join(PARTS)}, got {list(self.parts)}.'
      )
    random_pair.make_target(self.target, 'float32')
    if self.json_out is not None:
      text_files.check_writable(self.json_out)

  @property
  def dtypes(self) -> tuple[str, ...]:
    return ('float32',) if self.smallest else ('bfloat16', 'float32')

  @property
  def batch_sizes(self) -> tuple[int, ...]:
    return (4,) if self.smallest else (1, 8)

  @property
  def rows(self) -> tuple[int, ...]:
    return (1, device_parts.WIDTH) if self.smallest else ROWS


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
  """A piece of a part; its rows go into the part's table."""

  part: str
  label: str
  run: Callable[[], list[dict[str, Any]]]


def tasks(config: CheckConfig, steps: list[dict[str, Any]]) -> Iterator[Task]:
  """The most important first; `steps` holds the costs measured so far."""

  @functools.lru_cache(maxsize=1)
  def pair(dtype: str, num_layers: int | None = None) -> random_pair.Pair:
    target = random_pair.make_target(config.target, dtype)
    if num_layers is not None:
      target = random_pair.first_layers(target, num_layers)
    return random_pair.make_pair(target, jax.random.key(0))

  def step(dtype: str, batch: int, name: str, t: int) -> Task:
    return Task(
      'steps',
      f'{name}, {dtype}, batch {batch}, rows {t}',
      lambda: device_parts.measure_step(pair(dtype), name, batch, t),
    )

  def speed(dtype: str, batch: int) -> Iterator[Task]:
    """Tokens per second, and the step costs that predict them."""
    for name, t in _NEEDED:
      yield step(dtype, batch, name, t)
    yield Task(
      'generate',
      f'{dtype}, batch {batch}',
      lambda: device_parts.time_generation(
        pair(dtype), batch, config.smallest, steps
      ),
    )

  cells = list(itertools.product(config.dtypes, config.batch_sizes))
  # A first look at the speed takes seconds, the certificate minutes.
  yield from speed(*cells[0])
  yield Task('certify', 'quick', lambda: device_parts.certify(config.smallest))
  for dtype in config.dtypes:
    # Full widths, for these choose the kernels; few layers compile sooner.
    yield Task(
      'exactness',
      dtype,
      lambda dtype=dtype: device_parts.check_exactness(
        pair(dtype, 4), config.smallest
      ),
    )
  for cell in cells:
    if cell != cells[0]:
      yield from speed(*cell)
    for t in config.rows:
      if ('target', t) not in _NEEDED:
        yield step(*cell, 'target', t)


def check(config: CheckConfig) -> dict[str, Any]:
  """Runs all that fits and returns what --json_out holds."""
  clock = time.perf_counter()
  parts = {
    name: {'rows': [], 'seconds': 0.0, 'left_out': [], 'errors': []}
    for name in PARTS
  }
  report = {
    'config': {**dataclasses.asdict(config), 'damping': random_pair.DAMPING},
    'environment': environment(),
    'parts': parts,
    'passed': None,
    'seconds': 0.0,
  }
  longest = dict.fromkeys(PARTS, 0.0)
  for task in tasks(config, parts['steps']['rows']):
    part = parts[task.part]
    if task.part not in config.parts:
      part['left_out'].append(f'{task.label} (not asked for)')
      continue
    start = time.perf_counter()
    expected = longest[task.part]
    if task.part == 'generate' and not expected:
      expected = _STEPS_PER_GENERATION * longest['steps']
    if start - clock + expected > 60 * config.minutes:
      part['left_out'].append(f'{task.label} (no time)')
      continue
    try:
      with Progress(f'{task.part}: {task.label}'):
        part['rows'] += task.run()
    except Exception as error:  # It must not lose what the others find.
      traceback.print_exc()
      part['errors'].append(
        f'{task.label}: {type(error).__name__}: {script.sentence(error)}'
      )
    seconds = time.perf_counter() - start
    longest[task.part] = max(longest[task.part], seconds)
    part['seconds'] += seconds
    report['passed'] = is_passed(parts)
    report['seconds'] = time.perf_counter() - clock
    report['environment']['devices'] = devices()  # With the peak of memory.
    if config.json_out is not None:  # Whatever happens later, this is kept.
      text_files.write_json(config.json_out, report)
  return report


def is_passed(parts: dict[str, Any]) -> bool | None:
  """Whether nothing was wrong; None if nothing was checked."""
  if any(part['errors'] for part in parts.values()):
    return False
  verdicts = [row['passed'] for row in parts['certify']['rows']]
  verdicts += [
    row['equal'] for row in parts['exactness']['rows'] if row['same_width']
  ]
  return all(verdicts) if verdicts else None


def environment() -> dict[str, Any]:
  return {
    **surroundings.environment(),
    'default_matmul_precision': jax.config.jax_default_matmul_precision,
    'host_memory_gib': os.sysconf('SC_PAGE_SIZE')
    * os.sysconf('SC_PHYS_PAGES')
    / 2**30,
    'devices': devices(),
  }


def devices() -> list[dict[str, Any]]:
  """Every device of this process; memory where the backend tells."""
  found = []
  for device in jax.local_devices():
    memory = device.memory_stats() or {}
    row = {'id': device.id, 'kind': device.device_kind}
    for name in ('bytes_limit', 'peak_bytes_in_use'):
      row[name] = memory.get(name)
    found.append(row)
  return found


def markdown(report: dict[str, Any]) -> str:
  """The report for people."""
  config = report['config']
  lines = [
    '# Device check',
    '',
    f'Target {config["target"]} with random weights; the draft is its first '
    f'quarter of layers, the others add {config["damping"]:g} of what they '
    f'would. {device_parts.NUM_DRAFT_TOKENS} drafts per step. Milliseconds '
    '(T: rows of a pass) and tokens per second are medians.',
    '',
  ]
  found = dict(report['environment'])
  for device in found.pop('devices'):
    lines.append('- ' + ', '.join(f'{k} {_cell(v)}' for k, v in device.items()))
  lines.append('- ' + ', '.join(f'{k} {_cell(v)}' for k, v in found.items()))
  for name, part in report['parts'].items():
    lines += ['', f'## {name} ({part["seconds"]:.0f} s)', '']
    rows = _pivot(part['rows']) if name == 'steps' else part['rows']
    lines += _table(rows)
    lines += [f'- FAILED: {error}' for error in part['errors']]
    if part['left_out']:
      lines.append(f'- left out: {"; ".join(part["left_out"])}')
  word = {True: 'PASSED', False: 'FAILED', None: 'Nothing was checked'}
  num_left_out = sum(len(part['left_out']) for part in report['parts'].values())
  lines += [
    '',
    f'{word[report["passed"]]} in {report["seconds"]:.0f} s; {num_left_out} '
    'pieces left out.',
  ]
  return '\n'.join(lines)


def _pivot(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Milliseconds, a column for each number of rows."""
  found = {}
  for row in rows:
    key = {name: row[name] for name in ('model', 'dtype', 'batch')}
    line = found.setdefault(tuple(key.values()), (key, {}))[1]
    line[row['rows']] = row['median']
  columns = sorted({row['rows'] for row in rows})
  return [
    {**key, **{f'T={t}': line.get(t) for t in columns}}
    for key, line in found.values()
  ]


def _table(rows: list[dict[str, Any]]) -> list[str]:
  if not rows:
    return ['(nothing)']
  return [
    f'| {" | ".join(rows[0])} |',
    '|---' * len(rows[0]) + '|',
    *(f'| {" | ".join(map(_cell, row.values()))} |' for row in rows),
  ]


def _cell(value: Any) -> str:
  if value is None:
    return '-'
  if isinstance(value, (bool, np.bool_)):
    return 'yes' if value else 'NO'
  return f'{value:.4g}' if isinstance(value, float) else str(value)


def main(values: flags.FlagValues) -> int:
  target = values.target
  if target is None:
    is_cpu = jax.default_backend() == 'cpu'
    target = 'tiny' if is_cpu else 'llama-3.2-1b'
  config = CheckConfig(
    target=target,
    minutes=values.minutes,
    parts=tuple(values.parts),
    smallest=values.smallest,
    json_out=values.json_out,
  )
  report = check(config)
  if config.json_out is not None:
    text_files.write_json(config.json_out, report)
  print(markdown(report))
  return 1 if report['passed'] is False else 0


if __name__ == '__main__':
  sys.exit(script.run_main(main, FLAG_GROUPS))

r"""Writes experiments/README.md from the stored results of all reproductions.

  python experiments/reproduce/leviathan.py \
    --json_out=experiments/reproduce/stored/leviathan.json
  python experiments/reproduce/table.py

A measured one needs --models=DIR --prompts=DIR as well, but for
trained_drafts.py, which trains its own.
"""

import importlib
import json
import pathlib
import sys
from typing import Any

from experiments import script
from experiments.reproduce import record

README = pathlib.Path(__file__).parents[1] / 'README.md'
# In the order of the table.
NAMES = (
  'leviathan',
  'chen',
  'stern',
  'block_verification',
  'coupling',
  'lookahead',
  'adaptive_length',
  'gloeckle',
  'deepseek_mtp',
  'ssd',
)
# On models; a full run takes minutes, and weights and prompts from elsewhere.
MEASURED = (
  'acceptance',
  'prompt_lookup',
  'early_exit',
  'other_vocabulary',
  'trained_drafts',
  'predicted_time',
)
_HEAD = """# Experiments

Scripts; `--help` lists the flags of each. The results below are stored in
`reproduce/stored/`, and this file is written from them by
`python experiments/reproduce/table.py`; do not edit it.

## Reproduced papers

One file per paper in `reproduce/`; its docstring is the record: what is
claimed, in whose letters, what was expected and got, and what differs. Level
*exact*: what follows from printed numbers, from a formula, or for a toy whose
law can be listed is asserted, and a run fails where it does not hold; a printed
number that does not follow from what is printed is shown beside ours in the
result file. Level *measured*: runs of published models on prompts, too few of
them for more than the direction of an effect; `--models` names a folder with
the GGUF files, `--prompts` one with `humaneval.jsonl`, `gsm8k.jsonl` and
`spec_bench.jsonl`. With `--quick` each takes seconds (a measured one then runs
the demo pair).

| paper | command | expected | got | level | last good commit |
| --- | --- | --- | --- | --- | --- |
"""
_MEASURED_HEAD = """
## What was measured

Every definition of acceptance side by side; in brackets where 95 % of resampled
prompts lie. `tokens_per_step` counts correction and bonus; `alpha_tested` is
accepted over tested drafts, `draft_acceptance_rate` over all of them;
`expected_acceptance` is the mean of sum min(p, q) at tested drafts, `alpha_tv`
at every token (prompt lookup has no laws, and neither); `alpha_of_tau` would
yield as many tokens a step if drafts were accepted independently.
"""


def load_result(name: str) -> dict[str, Any]:
  """The stored result of a reproduction."""
  return json.loads((record.STORED / f'{name}.json').read_text())


def has_result(name: str) -> bool:
  """Whether a full run is stored; a measured one may wait for it."""
  return (record.STORED / f'{name}.json').exists()


def row(name: str, result: dict[str, Any] | None) -> str:
  """A line of the table."""
  doc = importlib.import_module(f'experiments.reproduce.{name}').__doc__
  title = ' '.join(doc.split('\n\n')[0].split())
  title = title.removeprefix('Reproduces ').rstrip('.')
  if result is None:
    found = record.paragraph(doc, 'Got'), 'measured', '-'
  else:
    environment = result['environment']
    commit = (environment['git_revision'] or 'none')[:10]
    if not environment['git_clean']:
      commit += ' (changed)'
    when = f'{commit}, {environment["date"][:10]}, {environment["device_kind"]}'
    found = record.got_text(result), result['level'], when
  cells = (
    title,
    f'`python experiments/reproduce/{name}.py`',
    record.paragraph(doc, 'Expected'),
    *found,
  )
  return '| ' + ' | '.join(cell.replace('|', '/') for cell in cells) + ' |\n'


def text() -> str:
  """The whole file."""
  results = {
    name: load_result(name) if has_result(name) else None
    for name in (*NAMES, *MEASURED)
  }
  lines = [row(name, result) for name, result in results.items()]
  tables = [
    f'\n### {name}\n\n{markdown(results[name]["rows"])}'
    for name in MEASURED
    if results[name] is not None
  ]
  head = [_MEASURED_HEAD] if tables else []
  return ''.join([_HEAD, *lines, *head, *tables])


def markdown(rows: list[dict[str, Any]]) -> str:
  """Rows of a measured result; an interval stands behind its value."""

  def cell(value: Any) -> str:
    if isinstance(value, list):
      value, low, high = (f'{x:.3f}' for x in value)
      return f'{value} ({low} to {high})'
    return record.number(value)

  names = list(rows[0])
  lines = [names, ['---'] * len(names)]
  lines += [[cell(row[name]) for name in names] for row in rows]
  return ''.join('| ' + ' | '.join(line) + ' |\n' for line in lines)


def main(values) -> None:
  del values
  README.write_text(text(), encoding='utf-8')


if __name__ == '__main__':
  sys.exit(script.run_main(main, ()))

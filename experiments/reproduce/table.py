r"""Writes experiments/README.md from the stored results of all reproductions.

  python experiments/reproduce/leviathan.py \
    --json_out=experiments/reproduce/stored/leviathan.json
  python experiments/reproduce/table.py
"""

import importlib
import json
import pathlib
import sys
from typing import Any

from experiments import common
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
result file. With `--quick` each takes seconds.

| paper | command | expected | got | level | last good commit |
| --- | --- | --- | --- | --- | --- |
"""


def load_result(name: str) -> dict[str, Any]:
  """The stored result of a reproduction."""
  return json.loads((record.STORED / f'{name}.json').read_text())


def row(name: str, result: dict[str, Any]) -> str:
  """A line of the table."""
  doc = importlib.import_module(f'experiments.reproduce.{name}').__doc__
  title = ' '.join(doc.split('\n\n')[0].split())
  title = title.removeprefix('Reproduces ').rstrip('.')
  environment = result['environment']
  commit = (environment['git_revision'] or 'none')[:10]
  if not environment['git_clean']:
    commit += ' (changed)'
  cells = (
    title,
    f'`python experiments/reproduce/{name}.py`',
    record.paragraph(doc, 'Expected'),
    record.got_text(result),
    result['level'],
    f'{commit}, {environment["date"][:10]}, {environment["device_kind"]}',
  )
  return '| ' + ' | '.join(cell.replace('|', '/') for cell in cells) + ' |\n'


def text() -> str:
  """The whole file."""
  return _HEAD + ''.join(row(name, load_result(name)) for name in NAMES)


def main(values) -> None:
  del values
  README.write_text(text(), encoding='utf-8')


if __name__ == '__main__':
  sys.exit(common.run_main(main, ()))

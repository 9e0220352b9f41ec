"""What measured reproductions share: pairs of models, prompts, and runs.

A full run needs published weights and prompts, `--models` and `--prompts`; with
`--quick` the demo pair and its own prompts take their place, which shows that
the script works, not what it would find.
"""

import dataclasses
import io
import json
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from absl import flags

from experiments import generate, surroundings, text_files, trace_file
from experiments.reproduce import record
from experiments.run_config import RunConfig

QWEN = 'qwen2.5-coder-1.5b-instruct-q4_k_m.gguf'
QWEN_DRAFT = 'qwen2.5-coder-0.5b-instruct-q4_k_m.gguf'
SMOLLM2 = 'smollm2-135m-instruct-q4_1.gguf'
_DEMO_PROMPTS = surroundings.ROOT / 'specjax/models/demo/prompts.jsonl'
# A CPU reads longer ones for minutes.
_MOST_CHARACTERS = 2000
# Categories of Spec-Bench that are chats of several turns.
CHAT = (
  'writing',
  'roleplay',
  'reasoning',
  'math',
  'coding',
  'extraction',
  'stem',
  'humanities',
)


def define_flags(values: flags.FlagValues):
  flags.DEFINE_string(
    'models',
    None,
    'A folder with the GGUF files that the record names.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'prompts',
    None,
    'A folder with humaneval.jsonl, gsm8k.jsonl and spec_bench.jsonl.',
    flag_values=values,
  )


FLAG_GROUPS = (*record.FLAG_GROUPS, ('Measured', define_flags))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """Where models and prompts are; both None is `--quick`."""

  models: str | None = None
  prompts: str | None = None

  @property
  def is_quick(self) -> bool:
    return self.models is None

  def model(self, name: str) -> str:
    return str(pathlib.Path(self.models, name))


def place_of(values: flags.FlagValues) -> Place:
  """What the flags say, checked.

  Raises:
    ValueError: neither --quick nor both folders.
  """
  if values.quick:
    return Place()
  for name in ('models', 'prompts'):
    folder = values[name].value
    if folder is None or not pathlib.Path(folder).is_dir():
      raise ValueError(
        f'--{name} must be an existing folder, or --quick given, got '
        f'{folder!r}.'
      )
  return Place(models=values.models, prompts=values.prompts)


def rows(place: Place, task: str, num: int) -> list[dict[str, Any]]:
  """The first prompts of a task, one turn each.

  Those of Spec-Bench that are longer than 2000 characters are left out.

  Args:
    place: where they are.
    task: humaneval, gsm8k, chat, or a category of Spec-Bench. The demo prompts
      stand in for all of them.
    num: how many.

  Raises:
    ValueError: there are fewer.
  """
  if place.is_quick:
    return _first(_read(_DEMO_PROMPTS), num, _DEMO_PROMPTS)
  folder = pathlib.Path(place.prompts)
  if task in ('humaneval', 'gsm8k'):
    found = _read(folder / f'{task}.jsonl')
  else:
    wanted = CHAT if task == 'chat' else (task,)
    found = [
      {'prompt': row['turns'][0], 'category': row['category']}
      for row in _read(folder / 'spec_bench.jsonl', ('category', 'turns'))
      if row['category'] in wanted and len(row['turns'][0]) <= _MOST_CHARACTERS
    ]
  if task == 'chat':
    # One of each kind, then the second of each.
    found = sorted(found, key=lambda row: _nth(found, row))
  return _first(found, num, f'{task} in {folder}')


def _first(
  found: list[dict[str, Any]], num: int, where: Any
) -> list[dict[str, Any]]:
  if len(found) < num:
    raise ValueError(
      f'{num} prompts are needed, got {len(found)} of {where} (of Spec-Bench '
      f'up to {_MOST_CHARACTERS} characters).'
    )
  return found[:num]


def _nth(all_rows: list[dict[str, Any]], row: dict[str, Any]) -> int:
  """How many of its category stand before a row."""
  same = [r for r in all_rows if r['category'] == row['category']]
  return same.index(row)


def _read(
  path: pathlib.Path, names: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
  # Not splitlines(): texts may hold other characters that end a line.
  lines = text_files.read_text(path).split('\n')
  found = [json.loads(line) for line in lines if line.strip()]
  for number, row in enumerate(found, 1):
    if not isinstance(row, dict) or not all(row.get(name) for name in names):
      more = f' with {" and ".join(names)}' if names else ''
      raise ValueError(f'{path}, row {number}, must be an object{more}.')
  return found


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Run:
  """A run and its trace; requests are in the order of the rows."""

  report: dict[str, Any]
  trace: trace_file.TraceFile | None

  @property
  def tokens(self) -> list[list[int]]:
    return [request['tokens'] for request in self.report['requests']]


def run(
  prompt_rows: Sequence[dict[str, Any]], *, records: bool = True, **settings
) -> Run:
  """Generates for rows, as generate.py does.

  Args:
    prompt_rows: with settings of their own where they have some.
    records: whether laws are wanted.
    settings: of `RunConfig`.
  """
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, 'rows.jsonl')
    path.write_text(''.join(json.dumps(row) + '\n' for row in prompt_rows))
    recorded = f'{folder}/run.npz' if records else None
    config = RunConfig(prompts_jsonl=str(path), record=recorded, **settings)
    report = generate.generate(config, io.StringIO())
    trace = trace_file.load(recorded) if records else None
  return Run(report=report, trace=trace)

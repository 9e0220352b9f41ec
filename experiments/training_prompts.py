r"""Prompts to train a head on, and prompts kept to measure it on.

  python experiments/training_prompts.py --prompts_jsonl=a.jsonl \
    --prompts_jsonl=b.jsonl --out=prompts

writes prompts/train.jsonl, for --prompts_jsonl of generate.py, and of every
file some evenly spaced rows that are not in it: prompts/a.jsonl, .... To those
that are trained on it adds prompts on functions of Python's standard library,
which lies on every machine. Each is asked several times, at --temperatures and
under seeds of its own: a head is to meet the target's law, not one text of it.
"""

import ast
import collections
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any

from absl import flags

from experiments import prompts, script, stdlib_text
from specjax.sampling import SamplingOptions

# In turn, so that no form has functions of one module alone.
_FORMS = (
  'Explain what this Python code does.\n\n{source}',
  'Write a Python function {signature}.\n\n{doc}',
  '{head}',
)
_DOC_CHARACTERS = range(60, 600)
_SOURCE_CHARACTERS = 1200


def define_flags(values: flags.FlagValues):
  flags.DEFINE_multi_string(
    'prompts_jsonl', [], 'Rows as for generate.py.', flag_values=values
  )
  whole = lambda name, default, text: flags.DEFINE_integer(
    name, default, text, flag_values=values
  )
  whole('num_held_out', 20, 'Rows of each file that are kept.')
  whole('num_functions', 900, 'Prompts on functions of the standard library.')
  whole('long', 1500, 'Prompts of more characters are asked only once.')
  flags.DEFINE_list(
    'temperatures',
    ['0', '0.7', '1', '1'],
    'One continuation per prompt at each.',
    flag_values=values,
  )
  flags.DEFINE_string('out', None, 'Folder to write.', flag_values=values)


def functions() -> Iterator[str]:
  """Prompts on the functions of the library that have a docstring."""
  form = 0
  for path in stdlib_text.training_files():
    text = path.read_text(encoding='utf-8', errors='replace')
    try:
      tree = ast.parse(text)
    except SyntaxError:
      continue  # Templates among the library's files.
    lines = text.split('\n')  # As the parser counts them.
    for node in ast.walk(tree):
      if not isinstance(node, ast.FunctionDef):
        continue
      doc = ast.get_docstring(node)
      if doc is None or len(doc) not in _DOC_CHARACTERS:
        continue
      first, last = node.lineno - 1, node.body[0].end_lineno
      source = _outdent(lines[first : node.end_lineno])
      if len(source) > _SOURCE_CHARACTERS:
        continue
      yield _FORMS[form % len(_FORMS)].format(
        source=source,
        signature=f'{node.name}({ast.unparse(node.args)})',
        doc=doc,
        head=_outdent(lines[first:last]),
      )
      form += 1


def _outdent(lines: list[str]) -> str:
  """The lines as far left as the first one allows."""
  indent = len(lines[0]) - len(lines[0].lstrip())
  return '\n'.join(line[indent:] for line in lines) + '\n'


def spaced(items: list[Any], num: int) -> list[int]:
  """The places of `num` items, evenly spaced.

  >>> spaced(list('abcdefgh'), 3)
  [1, 4, 6]
  """
  num = min(num, len(items))
  return [(2 * i + 1) * len(items) // (2 * num) for i in range(num)]


def asked(
  rows: list[dict[str, Any]], temperatures: list[float], long: int
) -> list[dict[str, Any]]:
  """Every prompt at every temperature, a seed for each; short ones first.

  Rows of like length share a batch, and few of its places stay empty.
  """
  length = lambda row: sum(map(len, row['turns']))
  found = []
  for row in sorted(rows, key=length):
    times = temperatures if length(row) <= long else temperatures[1:2]
    for temperature in times or temperatures:
      found.append({**row, 'temperature': temperature, 'seed': len(found)})
  return found


def main(values: flags.FlagValues):
  if values.out is None:
    raise ValueError('--out must be given.')
  if not values.prompts_jsonl:
    raise ValueError('--prompts_jsonl must be given.')
  for name in ('num_held_out', 'num_functions'):
    if values[name].value < 0:
      raise ValueError(f'{name} must be >= 0, got {values[name].value}.')
  temperatures = [_temperature(text) for text in values.temperatures]
  if not temperatures:
    raise ValueError('--temperatures must have one number or more, got none.')
  out = pathlib.Path(values.out)
  if out.exists():
    raise ValueError(f'--out must not exist yet, {out} does.')
  stems = collections.Counter(
    pathlib.Path(p).stem for p in values.prompts_jsonl
  )
  stems['train'] += 1
  if max(stems.values()) > 1:
    raise ValueError(
      'files must have different names, none of them train, got '
      f'{stems.most_common(1)[0][0]} twice.'
    )
  kept, rest = {}, []
  for path in values.prompts_jsonl:
    rows = [{'turns': list(row.turns)} for row in _read(path)]
    places = set(spaced(rows, values.num_held_out))
    kept[pathlib.Path(path).stem] = [rows[i] for i in sorted(places)]
    rest += [row for i, row in enumerate(rows) if i not in places]
  # One set may have taken questions of another.
  unseen = {row['turns'][0] for rows in kept.values() for row in rows}
  rest = [row for row in rest if row['turns'][0] not in unseen]
  made = list(functions())
  made = [made[i] for i in spaced(made, values.num_functions)]
  rest += [{'turns': [text]} for text in made if text not in unseen]
  files = {**kept, 'train': asked(rest, temperatures, values.long)}
  _write(out, files)
  for stem, rows in files.items():
    print(f'{out / stem}.jsonl: {len(rows)} rows', file=sys.stderr)


def _temperature(text: str) -> float:
  try:
    return SamplingOptions(temperature=float(text)).temperature
  except ValueError:
    raise ValueError(
      f'temperatures must be numbers >= 0, got {text!r}.'
    ) from None


def _read(path: str) -> list[prompts.Conversation]:
  defaults = prompts.Conversation(
    turns=(), options=SamplingOptions(), seed=0, stop=(), max_new_tokens=1
  )
  return prompts.read(
    prompt=None,
    prompt_file=None,
    prompts_jsonl=path,
    limit=None,
    defaults=defaults,
  )


def _write(out: pathlib.Path, files: dict[str, list[dict[str, Any]]]):
  unfinished = out.with_name(f'.{out.name}.{os.getpid()}.unfinished')
  unfinished.mkdir(parents=True)
  try:
    for stem, rows in files.items():
      text = ''.join(json.dumps(row) + '\n' for row in rows)
      (unfinished / f'{stem}.jsonl').write_text(text, encoding='utf-8')
    os.replace(unfinished, out)
  except BaseException:
    shutil.rmtree(unfinished, ignore_errors=True)
    raise


if __name__ == '__main__':
  sys.exit(script.run_main(main, (('Prompts', define_flags),)))

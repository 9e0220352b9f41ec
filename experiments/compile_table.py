"""Compiles the pairs of the README's table and prints it.

  compile_table.py --only=qwen3

Each row is what `compile_for.py` finds with the flags in ROWS; a row is
printed when it is done, and takes minutes. Exit code 1 if a row has a problem
other than not to fit.
"""

import re
import sys
from typing import Any

import jax
from absl import flags

from experiments import compile_for, forecast_report, script, text_files
from experiments.compile_for import Options


def _rows() -> tuple[Options, ...]:
  """The table's rows: shapes, slices, batches and K."""
  rows = []

  def add(target: str, draft: str | int, topology: str, mesh: str, **more):
    name = 'head' if isinstance(draft, int) else 'draft'
    rows.append(
      Options(
        target=target, topology=topology, mesh=mesh, **{name: draft}, **more
      )
    )

  large, small = 'llama-3.1-70b', 'llama-3.1-8b'
  one = dict(batch_size=1, num_draft_tokens=4)
  many = dict(batch_size=64, num_draft_tokens=8)
  # What does not fit a slice in bfloat16 comes again in int8.
  add(large, small, 'v5e:2x4', 'model:8', **one)
  add(large, small, 'v5e:2x4', 'model:8', quantize='int8', **one)
  add(large, small, 'v5e:2x4', 'model:8', quantize='int8', **many)
  add(large, small, 'v5e:8x8', 'model:64', **one)
  add(large, small, 'v5e:8x8', 'data:4,model:16', **many)
  add(large, small, 'v5p:4x4x4', 'model:64', **one)
  add(large, small, 'v5p:4x4x4', 'data:8,model:8', **many)
  add(large, small, 'v6e:8x8', 'model:64', **one)
  add(large, small, 'v6e:8x8', 'data:8,model:8', **many)
  add(large, 1, 'v5e:8x8', 'model:64', **one)
  add(large, 1, 'v5e:8x8', 'data:4,model:16', **many)
  add('qwen3-32b', 'qwen3-0.6b', 'v5e:2x4', 'model:8', **one)
  add('qwen3-32b', 'qwen3-0.6b', 'v6e:8x8', 'data:8,model:8', **many)
  large, small = 'llama-3.2-3b', 'llama-3.2-1b'
  add(large, small, 'v5e:2x4', 'model:8', **one)
  add(large, small, 'v5e:2x4', 'model:8', draft_mesh='model:1', **one)
  add(large, small, 'v5e:2x4', 'data:2,model:4', **many)
  return tuple(rows)


ROWS = _rows()


def define_flags(values: flags.FlagValues):
  flags.DEFINE_string(
    'only',
    '',
    'Rows whose words match this regular expression, as in qwen.*v5e.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'json_out', None, 'File for all results, as JSON.', flag_values=values
  )


FLAG_GROUPS = (('Table', define_flags),)


def words(options: Options) -> str:
  """What --only is matched with."""
  draft = options.draft or f'head:{options.head}'
  draft_mesh = options.draft_mesh or options.mesh
  return (
    f'{options.target} {draft} {options.topology} {options.mesh} {draft_mesh} '
    f'{options.quantize} B={options.batch_size} K={options.num_draft_tokens}'
  )


def chosen(pattern: str) -> list[Options]:
  """The rows that match.

  Raises:
    ValueError: none does, or it is no regular expression.
  """
  try:
    rows = [row for row in ROWS if re.search(pattern, words(row))]
  except re.error as error:
    raise ValueError(
      f'--only must be a regular expression, got {pattern!r}: {error}.'
    ) from None
  if not rows:
    raise ValueError(
      f'--only must match one of {"; ".join(map(words, ROWS))}, got '
      f'{pattern!r}.'
    )
  return rows


def main(values: flags.FlagValues) -> int:
  rows = chosen(values.only)
  if values.json_out is not None:
    text_files.check_writable(values.json_out)
  environment = compile_for.environment()
  print(
    f'{environment["date"][:10]}, jax {environment["jax"]}, libtpu '
    f'{environment["libtpu"]}; GiB per device; context {rows[0].context}, '
    f'acceptance {rows[0].acceptance:g}\n'
  )
  _print_row(forecast_report.COLUMNS)
  _print_row(('---',) * len(forecast_report.COLUMNS))
  results: list[dict[str, Any]] = []
  has_failed = False
  for options in rows:
    result = compile_for.forecast_for(options)
    results.append({'config': options, 'result': result})
    _print_row(forecast_report.row(options, result))
    for problem in result['problems']:
      if 'fit' not in problem:
        has_failed = True
        print(f'{words(options)}: {problem}', file=sys.stderr)
    if values.json_out is not None:
      text_files.write_json(
        values.json_out, {'environment': environment, 'results': results}
      )
  return int(has_failed)


def _print_row(cells: tuple[str, ...]):
  print(f'| {" | ".join(cells)} |', flush=True)


if __name__ == '__main__':
  jax.config.update('jax_platforms', 'cpu')
  sys.exit(script.run_main(main, FLAG_GROUPS, keeps_compiled=False))

"""Compares result files of generate.py with the first of them.

  compare.py --results=plain.json,draft.json,ngram.json

Prints a Markdown table: what ran, how fast, and how many requests have exactly
the tokens that they have in the first file. Exit code 1 if any differs.
"""

import json
import pathlib
import sys
from typing import Any

from absl import flags

from experiments import script


def define_flags(values: flags.FlagValues):
  flags.DEFINE_list(
    'results', [], 'Files of --json_out, joined by commas.', flag_values=values
  )


FLAG_GROUPS = (('Input', define_flags),)

_HEADER = (
  '| proposer | rule | dtype | exact | block efficiency | tokens/s | equal |\n'
  '|---|---|---|---|---|---|---|'
)


def row(report: dict[str, Any], baseline: dict[str, Any]) -> tuple[str, bool]:
  """A line of the table, and whether every request has the same tokens.

  Raises:
    ValueError: the two runs did not have the same prompts and seeds.
  """
  config, total = report['config'], report['aggregate']
  pairs = list(zip(report['requests'], baseline['requests']))
  asked = lambda request: (request['prompt_tokens'], request['seed'])
  if len(report['requests']) != len(baseline['requests']) or any(
    asked(a) != asked(b) for a, b in pairs
  ):
    raise ValueError('the results must have the same prompts and seeds.')
  num_equal = sum(a['tokens'] == b['tokens'] for a, b in pairs)
  cells = (
    config['proposer'],
    config['verify'],
    config['dtype'] + _weights(config),
    'yes' if config['exact'] else 'no',
    f'{total["block_efficiency"] or 0:.2f}',
    f'{total["tokens_per_second"] or 0:.2f}',
    f'{num_equal} of {len(pairs)}',
  )
  return f'| {" | ".join(cells)} |', num_equal == len(pairs)


def _weights(config: dict[str, Any]) -> str:
  """' int8' where it says so; results of before int8 weights do not."""
  quantize = config.get('quantize', 'none')
  return '' if quantize == 'none' else f' {quantize}'


def read(path: str) -> dict[str, Any]:
  """A result file of generate.py."""
  try:
    report = json.loads(pathlib.Path(path).read_bytes())
    for name in ('proposer', 'verify', 'dtype', 'exact'):
      report['config'][name]
    for name in ('block_efficiency', 'tokens_per_second'):
      report['aggregate'][name]
    for request in report['requests']:
      request['prompt_tokens'], request['seed'], request['tokens']
  except (ValueError, KeyError, TypeError):
    raise ValueError(f'{path!r} is not a result of generate.py.') from None
  return report


def main(values: flags.FlagValues) -> int:
  if not values.results:
    raise ValueError('--results must name at least one file.')
  reports = [read(path) for path in values.results]
  rows = [row(report, reports[0]) for report in reports]
  print(_HEADER)
  print('\n'.join(line for line, _ in rows))
  return 0 if all(is_equal for _, is_equal in rows) else 1


if __name__ == '__main__':
  sys.exit(script.run_main(main, FLAG_GROUPS))

"""Shows speculative decoding with models and heads that come along.

  python experiments/demo.py
  python experiments/demo.py --head=eagle:FOLDER

A target, a draft and heads, of bytes, trained by experiments/train.py on
Python's standard library, go on with functions of modules that were kept from
training: a trace of the draft proposing and the target verifying, the text,
then plain decoding beside each that drafts, greedy and sampled at one seed. The
texts must be equal; exit code 1 if one is not.
"""

import io
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from experiments import generate, script, surroundings
from experiments.run_config import HEADS, RunConfig
from specjax.models.load import DEMO_HEADS
from specjax.sampling import SamplingOptions

PROMPTS = str(
  surroundings.ROOT / 'specjax' / 'models' / 'demo' / 'prompts.jsonl'
)
NUM_TRACED, NUM_TOKENS, SEED = 40, 160, 6
WARM = SamplingOptions(temperature=0.8, top_p=0.95)
DRAFTED = {'draft': 'demo:draft', 'proposer': 'draft'}
SHOWN = {
  'plain': {},
  'draft': DRAFTED,
  **{
    name.removeprefix('demo:'): {
      'head': name,
      'proposer': name.removeprefix('demo:'),
    }
    for name in DEMO_HEADS
  },
}


def define_flags(values: flags.FlagValues):
  flags.DEFINE_multi_string(
    'head',
    [],
    'One more head of demo:target to show, as KIND:FOLDER with a KIND of '
    'medusa, mtp or eagle. May be given more than once.',
    flag_values=values,
  )


FLAG_GROUPS = (('Demo', define_flags),)


def shown(heads: Sequence[str]) -> dict[str, dict[str, str]]:
  """Everything that is shown, by the name of its row."""
  rows = dict(SHOWN)
  for text in heads:
    kind, _, folder = text.partition(':')
    if kind not in HEADS or not folder:
      raise ValueError(
        f'--head must be KIND:FOLDER with a KIND of {", ".join(HEADS)}, got '
        f'{text!r}.'
      )
    name = pathlib.Path(folder).name[:11]
    rows[name] = {'head': folder, 'proposer': kind}
  return rows


def configuration(**settings) -> RunConfig:
  return RunConfig(
    target='demo:target',
    prompts_jsonl=PROMPTS,
    verify='coupled',
    num_draft_tokens=4,
    **{'max_length': 320, 'max_new_tokens': NUM_TOKENS, **settings},
  )


def compare(
  rows: dict[str, dict[str, str]], options: SamplingOptions, name: str
) -> tuple[list[str], list[dict[str, Any]], bool]:
  """Lines of the table, the reports, and whether all texts are equal."""
  lines: list[str] = []
  reports: list[dict[str, Any]] = []
  are_equal = True
  for how, drafted in rows.items():
    config = configuration(options=options, seed=SEED, **drafted)
    reports.append(generate.generate(config, io.StringIO()))
    tokens = [[r['tokens'] for r in report['requests']] for report in reports]
    is_equal = tokens[0] == tokens[-1]
    are_equal &= is_equal
    same = {True: 'yes', False: 'NO'}[is_equal] if drafted else ''
    figures = reports[-1]['aggregate']
    line = (
      f'{name:<8} {how:<11} {figures["tokens_per_second"]:9.0f}'
      f' {figures["num_steps"]:6} {figures["block_efficiency"]:9.2f}  {same}'
    )
    lines.append(line.rstrip())
  return lines, reports, are_equal


def main(values: flags.FlagValues) -> int:
  rows = shown(values.head)
  generate.generate(
    configuration(
      max_new_tokens=NUM_TRACED,
      trace=True,
      limit=1,
      options=WARM,
      seed=SEED,
      **DRAFTED,
    )
  )
  table: list[str] = []
  are_equal = True
  for options, name in ((SamplingOptions(), 'greedy'), (WARM, 'sampled')):
    lines, reports, is_equal = compare(rows, options, name)
    table += lines
    are_equal &= is_equal
  first = reports[-1]['requests'][0]
  print('\nThe same text, its prompt and what follows:\n')
  print(first['prompt'] + first['text'])
  num_requests = len(reports[-1]['requests'])
  device = jax.devices()[0].platform.upper()
  what = f'{num_requests} x {NUM_TOKENS} tokens'
  print(
    f'\n{what:<20}  tokens/s          tokens  same'
    f'\n{"":20} {f"({device})":>9}  steps  per step  text'
  )
  print(*table, sep='\n')
  return 0 if are_equal else 1


if __name__ == '__main__':
  sys.exit(script.run_main(main, FLAG_GROUPS))

"""Shows speculative decoding on a pair of models that needs no download.

  python experiments/demo.py

First a trace of a draft proposing and the target verifying, then plain against
speculative decoding, greedy and sampled at one seed. The texts must be equal;
exit code 1 if one is not.
"""

import io
import sys
from typing import Any

import jax
from absl import flags

from experiments import common, generate
from experiments.run_config import RunConfig
from specjax.sampling import SamplingOptions

PROMPT = '  def __post_init__(self):\n'
NUM_TRACED = 40  # Tokens.
WARM = SamplingOptions(temperature=0.8, top_p=0.95)
DRAFTED = {'draft': 'demo:draft', 'proposer': 'draft'}


def configuration(**settings) -> RunConfig:
  return RunConfig(
    target='demo:target',
    prompt=PROMPT,
    verify='coupled',
    num_draft_tokens=4,
    **{'max_length': 384, 'max_new_tokens': 256, **settings},
  )


def compare(options: SamplingOptions, name: str) -> tuple[list[str], bool]:
  """Two lines of the table, and whether the two texts are equal."""
  lines: list[str] = []
  reports: list[dict[str, Any]] = []
  for how, drafted in (('plain', {}), ('speculative', DRAFTED)):
    config = configuration(options=options, seed=1, **drafted)
    reports.append(generate.generate(config, io.StringIO()))
    is_equal = len({tuple(r['requests'][0]['tokens']) for r in reports}) == 1
    same = {True: 'yes', False: 'NO'}[is_equal] if drafted else ''
    figures = reports[-1]['aggregate']
    line = (
      f'{name:<8} {how:<11} {figures["tokens_per_second"]:9.0f}'
      f' {figures["num_steps"]:6} {figures["block_efficiency"]:9.2f}  {same}'
    )
    lines.append(line.rstrip())
  return lines, is_equal


def main(values: flags.FlagValues) -> int:
  del values  # There is nothing to choose.
  print(
    'Target and draft are counted over the source of specjax, not trained: the'
    '\ntarget knows what follows up to 8 bytes, the draft up to 4.\n\n'
    f'The target continues {PROMPT!r}, and'
  )
  generate.generate(
    configuration(max_new_tokens=NUM_TRACED, trace=True, **DRAFTED)
  )
  device = jax.devices()[0].platform.upper()
  print(
    f'\n{"256 tokens":<20}  tokens/s          tokens  same'
    f'\n{"":20} {f"({device})":>9}  steps  per step  text'
  )
  are_equal = True
  for options, name in ((SamplingOptions(), 'greedy'), (WARM, 'sampled')):
    lines, is_equal = compare(options, name)
    print(*lines, sep='\n')
    are_equal &= is_equal
  print(
    '\nTokens per step carry over to other machines; tokens/s do not, and a '
    'target\nas small as this one has little to gain.'
  )
  return 0 if are_equal else 1


if __name__ == '__main__':
  sys.exit(common.run_main(main, ()))

r"""Compares ways to train a draft, or a head, at equal budget on held-out text.

  python experiments/draft_table.py --out=drafts --num_steps=2000 \
    --json_out=drafts.jsonl

Everything is trained for as many steps on the same rows, and is measured by
decoding modules that were kept from training: block efficiency at K = 4,
tokens/s over plain decoding (the median of five rounds in turn), and the share
of first, second, ... drafts that are accepted where those before them were. A
line of JSON each, as they come.

Drafts have one shape:

  scratch     the next token of the text
  forward_kl, reverse_kl, js, tv    the target's law, on the same text
  on_policy   forward_kl, half of the rows continued by the draft itself
  online      forward_kl, half of the rows written by target and draft together,
              of which only the rejected places are learnt

Heads read the target's hiddens; all learn its law by forward_kl:

  medusa      four heads that see nothing of each other's drafts
  mtp         one module, unrolled four tokens ahead
  eagle, eagle_ttt      EAGLE, one token ahead; four (training-time test)
  eagle3_1, eagle3      EAGLE-3 likewise

What is there already in --out is not trained again: processes with other --ways
may share it, and one more with all of them measures.
"""

import dataclasses
import json
import pathlib
import statistics
import sys
from typing import Any

import jax
from absl import flags

from experiments import (
  conversions,
  drafts,
  held_out,
  script,
  surroundings,
  text_files,
  train_run,
)
from experiments.progress import Progress
from experiments.train_config import TrainConfig
from specjax.models.heads import files
from specjax.models.load import Loaded
from specjax.proposers.base import Nothing, Proposer
from specjax.proposers.draft_model import DraftModel
from specjax.shapes import Params

WAYS: dict[str, dict[str, Any]] = {
  'scratch': {'target': None},
  'forward_kl': {'loss': 'forward_kl'},
  'reverse_kl': {'loss': 'reverse_kl'},
  'js': {'loss': 'js'},
  'tv': {'loss': 'tv'},
  'on_policy': {
    'loss': 'forward_kl',
    'written_by': 'draft',
    'written_share': 0.5,
  },
  'online': {
    'loss': 'forward_kl',
    'written_by': 'pair',
    'written_share': 0.5,
  },
  'medusa': {'head': 'medusa', 'loss': 'forward_kl', 'depth': 4},
  'mtp': {'head': 'mtp', 'loss': 'forward_kl', 'depth': 4},
  'eagle': {'head': 'eagle', 'depth': 1},
  'eagle_ttt': {'head': 'eagle', 'depth': 4},
  'eagle3_1': {'head': 'eagle3', 'depth': 1},
  'eagle3': {'head': 'eagle3', 'depth': 4},
}
TEMPERATURES = (0.0, 1.0)
_MOST_PROMPTS = 10_000


def define_flags(values: flags.FlagValues):
  def whole(name, default, text):
    flags.DEFINE_integer(name, default, text, flag_values=values)

  def string(name, default, text):
    flags.DEFINE_string(name, default, text, flag_values=values)

  string('target', 'demo:target', 'The model to be imitated and sped up.')
  string(
    'config',
    str(surroundings.ROOT / 'specjax/models/demo/draft/config.json'),
    "The drafts' shape.",
  )
  flags.DEFINE_list(
    'ways',
    [way for way in WAYS if way not in ('reverse_kl', 'js', 'online')],
    f'Which of {", ".join(WAYS)}.',
    flag_values=values,
  )
  whole('num_steps', 2000, 'Steps of each.')
  whole('batch_size', 8, 'Rows of a step.')
  whole('length', 257, 'Tokens of a row.')
  flags.DEFINE_float('learning_rate', 3e-3, 'At its peak.', flag_values=values)
  whole('seed', 0, 'Of weights, order and noise.')
  whole('num_draft_tokens', 4, 'K.')
  whole('num_prompts', 24, 'Held-out prompts.')
  string(
    'out', None, 'Folder of runs and models; those there are gone on with.'
  )
  string('json_out', None, 'File of the lines; it is written anew.')


FLAG_GROUPS = (('Table', define_flags),)


def train(
  values: flags.FlagValues, way: str
) -> tuple[pathlib.Path, dict[str, Any]]:
  """The folder, trained unless it is there, and the report of its training."""
  folder = pathlib.Path(values.out, way)
  model = folder / 'model'
  settings = WAYS[way]
  config = TrainConfig(
    **{
      'config': None
      if 'head' in settings
      else str(pathlib.Path(values.config).resolve()),
      'target': values.target,
      'data': ('stdlib',),
      'num_steps': values.num_steps,
      'num_warmup_steps': min(100, values.num_steps // 10),
      'batch_size': values.batch_size,
      'length': values.length,
      'learning_rate': values.learning_rate,
      'seed': values.seed,
      'run_dir': str(folder),
      'out': str(model),
      **settings,
    }
  )
  if not model.exists():
    train_run.run(config)
  report = json.loads((folder / 'report.json').read_text(encoding='utf-8'))
  wanted = json.loads(json.dumps(dataclasses.asdict(config)))
  # Where it lies may be spelled in more than one way.
  for settings in (wanted, report['config']):
    del settings['run_dir'], settings['out']
  if report['config'] != wanted:
    raise ValueError(
      f'{model} was trained with other flags; give another --out or remove '
      f'{folder}.'
    )
  return model, report


def make_proposer(
  values: flags.FlagValues, target: Loaded, way: str, folder: pathlib.Path
) -> tuple[Proposer, Params]:
  """What was trained, as it drafts."""
  kind = WAYS[way].get('head')
  if kind is not None:
    head, params = files.load_head(
      folder, kind.removesuffix('3'), target.model, target.params
    )
    return drafts.with_head(head, values.num_draft_tokens), params
  loaded = conversions.load_model(str(folder), target.model.dtype, 'none', None)
  return DraftModel(
    model=loaded.model, num_draft_tokens=values.num_draft_tokens
  ), loaded.params


def measure(
  num_prompts: int,
  target: Loaded,
  proposer: Proposer,
  params: Params,
) -> dict[str, Any]:
  """A row's figures at both temperatures."""
  prompts = held_out.Prompts(
    names=('stdlib_held_out',), num_prompts=num_prompts
  )
  rows = {}
  for temperature in TEMPERATURES:
    requests = prompts.requests(target.tokenizer, temperature)
    rows[f'{temperature:g}'] = held_out.measure(
      target, proposer, params, requests
    )
  return rows


def beside_plain(
  num_prompts: int,
  target: Loaded,
  proposer: Proposer,
  params: Params,
  *,
  num_rounds: int = 5,
) -> dict[str, Any]:
  """A row's figures and, of rounds in turn, its speed over plain decoding.

  The machine's own speed drifts, above all while something trains.
  """
  rounds = [
    (
      measure(num_prompts, target, proposer, params),
      measure(num_prompts, target, Nothing(), ()),
    )
    for _ in range(num_rounds)
  ]
  rows, plain = rounds[0]
  over = lambda one, t: (
    one[0][t]['tokens_per_second'] / one[1][t]['tokens_per_second']
  )
  return {
    'is_greedy_text_equal': rows['0']['tokens'] == plain['0']['tokens'],
    'over_plain': {
      t: statistics.median(over(one, t) for one in rounds) for t in rows
    },
    'over_plain_rounds': {t: [over(one, t) for one in rounds] for t in rows},
    'by_temperature': {
      t: {name: x for name, x in row.items() if name != 'tokens'}
      for t, row in rows.items()
    },
  }


def main(values: flags.FlagValues):
  if not values.out:
    raise ValueError('--out must name a folder; --help says how.')
  for way in values.ways:
    if way not in WAYS:
      raise ValueError(f'--ways must be of {", ".join(WAYS)}, got {way!r}.')
  if not values.ways:
    raise ValueError(f'--ways must have one of {", ".join(WAYS)}, got none.')
  most = WAYS['medusa']['depth'] if 'medusa' in values.ways else 64
  if not 1 <= values.num_draft_tokens <= most:
    raise ValueError(
      '--num_draft_tokens must be in 1..64, and in 1..4 with the four heads of '
      f'medusa, got {values.num_draft_tokens}.'
    )
  if not 1 <= values.num_prompts <= _MOST_PROMPTS:
    raise ValueError(
      f'--num_prompts must be in 1..{_MOST_PROMPTS}, got {values.num_prompts}.'
    )
  if values.json_out is not None:
    text_files.check_writable(values.json_out)
  target = conversions.load_model(values.target, 'bfloat16', 'none', None)
  lines = []
  device = jax.devices()[0].platform.upper()
  print(
    f'{"":<10} {"1000":>10} {"seconds":>7}  tokens per step  over plain '
    f'({device})  accepted by position,\n'
    f'{"trained":<10} {"parameters":>10} {"trained":>7}  '
    f'T = 0  T = 1     T = 0  T = 1       T = 1'
  )
  for way in values.ways:
    folder, report = train(values, way)
    with Progress(f'decoding with {way}'):
      proposer, params = make_proposer(values, target, way, folder)
      found = beside_plain(values.num_prompts, target, proposer, params)
    speed, rows = found['over_plain'], found['by_temperature']
    print(
      f'{way:<10} {report["num_parameters"] / 1000:10.0f} '
      f'{report["last"]["seconds"]:7.0f}  '
      + '  '.join(f'{row["block_efficiency"]:5.2f}' for row in rows.values())
      + f'     {speed["0"]:5.2f}  {speed["1"]:5.2f}       '
      + ' '.join(
        '   -' if x is None else f'{x:4.2f}'
        for x in rows['1']['acceptance_conditional']
      )
      + ('' if found['is_greedy_text_equal'] else '   GREEDY TEXT DIFFERS'),
      flush=True,
    )
    lines.append(
      {
        'way': way,
        'settings': {
          name: values[name].value
          for name in ('target', 'num_steps', 'batch_size', 'length', 'seed')
        },
        'num_parameters': report['num_parameters'],
        'seconds_trained': report['last']['seconds'],
        'trained_at': report['environment']['git_revision'],
        **found,
        'environment': surroundings.environment(),
      }
    )
    if values.json_out is not None:
      text = ''.join(json.dumps(line) + '\n' for line in lines)
      text_files.write_text(values.json_out, text)


if __name__ == '__main__':
  sys.exit(script.run_main(main, FLAG_GROUPS))

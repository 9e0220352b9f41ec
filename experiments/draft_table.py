r"""Compares ways to train a draft, at equal budget, on held-out text.

  python experiments/draft_table.py --out=drafts --num_steps=2000 \
    --json_out=drafts.jsonl

Every draft has the same shape, sees as many steps of as many tokens, and is
measured by decoding modules that were kept from training: block efficiency at
K = 4, and tokens/s beside plain decoding. A line of JSON each, as they come.

  scratch     the next token of the text
  forward_kl, reverse_kl, js, tv    the target's law, on the same text
  on_policy   forward_kl, half of the rows continued by the draft itself
  online      forward_kl, half of the rows written by target and draft together,
              of which only the rejected places are learnt
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

import jax
from absl import flags

from experiments import common, conversions, held_out, train_run
from experiments.train_config import TrainConfig
from specjax.models.load import Loaded
from specjax.proposers.base import Nothing
from specjax.proposers.draft_model import DraftModel

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
}
TEMPERATURES = (0.0, 1.0)


def define_flags(values: flags.FlagValues):
  def whole(name, default, text):
    flags.DEFINE_integer(name, default, text, flag_values=values)

  def string(name, default, text):
    flags.DEFINE_string(name, default, text, flag_values=values)

  string('target', 'demo:target', 'The model to be imitated and sped up.')
  string(
    'config',
    str(common.ROOT / 'specjax/models/demo/draft/config.json'),
    "The drafts' shape.",
  )
  flags.DEFINE_list(
    'ways',
    ['scratch', 'forward_kl', 'tv', 'on_policy'],
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


def train(values: flags.FlagValues, way: str) -> tuple[pathlib.Path, float]:
  """The draft's folder, trained unless it is there, and the seconds it took."""
  folder = pathlib.Path(values.out, way)
  model = folder / 'model'
  config = TrainConfig(
    **{
      'config': values.config,
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
      **WAYS[way],
    }
  )
  if not model.exists():
    train_run.run(config)
  report = json.loads((folder / 'report.json').read_text(encoding='utf-8'))
  if report['config'] != json.loads(json.dumps(dataclasses.asdict(config))):
    raise ValueError(
      f'{model} was trained with other flags; give another --out or remove '
      f'{folder}.'
    )
  return model, report['last']['seconds']


def measure(
  values: flags.FlagValues, target: Loaded, draft: pathlib.Path | None
) -> dict[str, Any]:
  """A row's figures at both temperatures; without a draft, plain decoding."""
  prompts = held_out.Prompts(
    names=('stdlib_held_out',), num_prompts=values.num_prompts
  )
  proposer, params = Nothing(), ()
  if draft is not None:
    loaded = conversions.load_model(
      str(draft), target.model.dtype, 'none', None
    )
    params = loaded.params
    proposer = DraftModel(
      model=loaded.model, num_draft_tokens=values.num_draft_tokens
    )
  rows = {}
  for temperature in TEMPERATURES:
    requests = prompts.requests(target.tokenizer, temperature)
    rows[f'{temperature:g}'] = held_out.measure(
      target, proposer, params, requests
    )
  return rows


def main(values: flags.FlagValues):
  if not values.out:
    raise ValueError('--out must name a folder; --help says how.')
  for way in values.ways:
    if way not in WAYS:
      raise ValueError(f'--ways must be of {", ".join(WAYS)}, got {way!r}.')
  if values.json_out is not None:
    common.check_writable(values.json_out)
  target = conversions.load_model(values.target, 'bfloat16', 'none', None)
  plain = measure(values, target, None)
  lines = []
  print(
    f'{"draft":<12} {"seconds":>8}  tokens per step  tokens/s over plain '
    f'({jax.devices()[0].platform.upper()})\n'
    f'{"":<12} {"trained":>8}  T = 0    T = 1    T = 0    T = 1'
  )
  for way in values.ways:
    folder, seconds = train(values, way)
    with common.Progress(f'decoding with {way}'):
      rows = measure(values, target, folder)
    is_same = rows['0'].pop('tokens') == plain['0']['tokens']
    rows['1'].pop('tokens')
    speed = {
      t: row['tokens_per_second'] / plain[t]['tokens_per_second']
      for t, row in rows.items()
    }
    tau = {t: row['block_efficiency'] for t, row in rows.items()}
    print(
      f'{way:<12} {seconds:8.0f}  {tau["0"]:5.2f}    {tau["1"]:5.2f}    '
      f'{speed["0"]:5.2f}    {speed["1"]:5.2f}'
      + ('' if is_same else '   GREEDY TEXT DIFFERS'),
      flush=True,
    )
    lines.append(
      {
        'way': way,
        'settings': {
          name: values[name].value
          for name in ('target', 'num_steps', 'batch_size', 'length', 'seed')
        },
        'seconds_trained': seconds,
        'is_greedy_text_equal': is_same,
        'over_plain': speed,
        'by_temperature': rows,
        'environment': common.environment(),
      }
    )
    if values.json_out is not None:
      write_lines(values.json_out, lines)


def write_lines(path: str, rows: list[dict[str, Any]]):
  """All of the lines or, if it fails, the old file."""
  target = pathlib.Path(path)
  temporary = target.with_name(f'.{target.name}.tmp')
  text = ''.join(json.dumps(row) + '\n' for row in rows)
  temporary.write_text(text, encoding='utf-8')
  temporary.replace(target)


if __name__ == '__main__':
  sys.exit(common.run_main(main, FLAG_GROUPS))

"""Reproduces ways to train a draft: DistillSpec (2023), Medusa, EAGLE-3.

Claim:    a draft that learns the target's law drafts better than one that
          learns the same text, arXiv:2310.08461; heads that read the drafts
          before theirs (EAGLE-3, arXiv:2503.01840; MTP, arXiv:2412.19437) draft
          better than heads that do not (Medusa, arXiv:2401.10774); EAGLE-3
          keeps its acceptance behind its own drafts if it was unrolled in
          training (its training-time test), and loses it if not.
Notation: our K is their draft length; acceptance by position is that of a draft
          behind accepted ones (EAGLE-3's n-alpha).
Command:  python experiments/reproduce/trained_drafts.py
Runtime:  16 minutes on 2 CPU cores, most of it training, which --out keeps;
          --quick: 8 seconds, of models that come along.
Expected: tokens a step: distilled above from scratch, MTP above Medusa,
          unrolled above not; the second draft of EAGLE-3 as good as the first
          if unrolled, much worse if not.
Got:      tokens a step, T = 0 and 1, scratch then forward_kl: 2.858 1.952 3.119
          2.352; tokens a step, T = 0 and 1, medusa then mtp: 2.522 1.928 4.315
          3.293; tokens a step, T = 0 and 1, eagle then eagle_ttt: 3.835 3.054
          4.231 3.075; tokens a step, T = 0 and 1, eagle3_1 then eagle3: 2.471
          2.197 3.979 2.469; second draft over first, eagle3_1: 0.4605; second
          draft over first, eagle3: 1.061; 7 of 7 hold; 2026-11-30, CPU.
Differs:  the demo target (bytes, 4.8 M parameters); 300 steps of 4 rows of 256
          bytes for each, where the papers train for days; K = 4, 24 held-out
          prompts of 128 bytes, 128 new bytes each; 4 depths in training.
"""

import json
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from absl import flags

from experiments import conversions, draft_table, drafts, script, surroundings
from experiments.reproduce import record
from specjax.models.heads import files
from specjax.models.load import DEMO_HEADS, head_folder
from specjax.proposers.draft_model import DraftModel

K, NUM_STEPS, BATCH, RATE, NUM_PROMPTS = 4, 300, 4, 4e-3, 24
_QUICK_PROMPTS = 2


def define_flags(values: flags.FlagValues):
  flags.DEFINE_string(
    'out',
    None,
    'Folder that keeps what is trained, and is gone on with.',
    flag_values=values,
  )


FLAG_GROUPS = (*record.FLAG_GROUPS, ('Training', define_flags))


def trained(out: str | None) -> list[dict[str, Any]]:
  """The lines of draft_table.py.

  Raises:
    ValueError: a model in `out` was trained by another state of the code, which
      the record would not say.
  """
  with tempfile.TemporaryDirectory() as scratch:
    lines = pathlib.Path(scratch, 'table.jsonl')
    values = flags.FlagValues()
    draft_table.define_flags(values)
    values(
      [
        'draft_table.py',
        f'--out={out or scratch}',
        f'--json_out={lines}',
        f'--num_draft_tokens={K}',
        f'--num_steps={NUM_STEPS}',
        f'--batch_size={BATCH}',
        f'--learning_rate={RATE}',
        f'--num_prompts={NUM_PROMPTS}',
      ]
    )
    draft_table.main(values)
    found = [json.loads(line) for line in lines.read_text().splitlines()]
  check_revision(found, surroundings.environment()['git_revision'])
  return found


def check_revision(lines: list[dict[str, Any]], revision: str | None):
  """Raises ValueError unless all was trained at this revision."""
  for line in lines:
    if line['trained_at'] != revision:
      raise ValueError(
        f'all of --out must be trained at {revision}, the state of the code, '
        f'got {line["way"]} of {line["trained_at"]}.'
      )


def shipped() -> Iterator[dict[str, Any]]:
  """Such lines for the draft and the heads that come along."""
  load = lambda name: conversions.load_model(name, 'bfloat16', 'none', None)
  target, draft = load('demo:target'), load('demo:draft')
  proposers = {
    'forward_kl': (
      DraftModel(model=draft.model, num_draft_tokens=K),
      draft.params,
    )
  }
  for name in DEMO_HEADS:
    kind = name.removeprefix('demo:')
    head, params = files.load_head(
      head_folder(name), kind, target.model, target.params
    )
    proposers[kind] = drafts.with_head(head, K), params
  for way, (proposer, params) in proposers.items():
    yield {
      'way': way,
      'num_parameters': sum(x.size for x in jax.tree.leaves(params)),
      **draft_table.beside_plain(
        _QUICK_PROMPTS, target, proposer, params, num_rounds=1
      ),
    }


def _row(line: dict[str, Any]) -> dict[str, Any]:
  """A line of draft_table.py, flat."""
  cold, warm = (line['by_temperature'][t] for t in '01')
  return {
    'way': line['way'],
    '1000 parameters': round(line['num_parameters'] / 1000),
    'greedy text equal': 'yes' if line['is_greedy_text_equal'] else 'NO',
    'tokens_per_step, T = 0': cold['block_efficiency'],
    'tokens_per_step, T = 1': warm['block_efficiency'],
    'speed over plain, T = 0': line['over_plain']['0'],
    'speed over plain, T = 1': line['over_plain']['1'],
    **{
      f'draft {i} accepted, T = 1': '-' if share is None else share
      for i, share in enumerate(warm['acceptance_conditional'], 1)
    },
  }


def findings(rows: list[dict[str, Any]]) -> list[record.Finding]:
  """What the rows say of the claims; of ways that are there."""
  by_way = {row['way']: row for row in rows}
  equal = [row['greedy text equal'] for row in rows]
  found = [
    record.true(
      'greedy text is that of plain decoding, ways where it is',
      'all',
      equal.count('yes'),
      equal == ['yes'] * len(rows),
    )
  ]
  for better, worse in (
    ('forward_kl', 'scratch'),
    ('mtp', 'medusa'),
    ('eagle_ttt', 'eagle'),
    ('eagle3', 'eagle3_1'),
  ):
    if not {better, worse} <= {*by_way}:
      continue
    got = [
      by_way[way][f'tokens_per_step, T = {t}']
      for way in (worse, better)
      for t in '01'
    ]
    found.append(
      record.true(
        f'tokens a step, T = 0 and 1, {worse} then {better}',
        'growing',
        got,
        got[2] > got[0] and got[3] > got[1],
        is_headline=True,
      )
    )
  for way in ('eagle3_1', 'eagle3'):
    if way not in by_way:
      continue
    shares = [by_way[way][f'draft {i} accepted, T = 1'] for i in (1, 2)]
    is_unrolled = way == 'eagle3'
    ratio = shares[1] / shares[0]
    found.append(
      record.true(
        f'second draft over first, {way}',
        'about 1' if is_unrolled else 'far below 1',
        ratio,
        ratio > 0.9 if is_unrolled else ratio < 0.7,
        note='accepted behind accepted drafts, T = 1',
        is_headline=True,
      )
    )
  return found


def main(values) -> int:
  if values.quick and values.out is not None:
    raise ValueError('--out is not used with --quick; drop one.')

  def reproduce(quick: bool) -> record.Measured:
    lines = shipped() if quick else trained(values.out)
    rows = [_row(line) for line in lines]
    return record.Measured(findings=findings(rows), rows=rows)

  return record.run('trained_drafts', reproduce, values)


if __name__ == '__main__':
  sys.exit(script.run_main(main, FLAG_GROUPS))

"""Reproduces token intersection, Timor et al. (2025), arXiv:2502.05202.

Claim:    a draft of another family, with another vocabulary, drafts by the ids
          that both have (TLI) and no text changes: coupled text is that of
          plain decoding, token for token.
Notation: alpha_tested of the definitions in `definitions.py`.
Command:  python experiments/reproduce/other_vocabulary.py
Runtime:  4 minutes on 2 CPU cores; --quick: 15 seconds.
Expected: equal texts; acceptance below that of a draft of the same family
          (0.5B of Qwen, in `acceptance.py`).
Got:      texts equal to those of plain decoding, temperature 0, 1: 8 of 8 8 of
          8; alpha_tested at temperature 0, 1: 0.4598 0.4444; tokens a step:
          1.741 1.717; 1 of 1 hold; 2 shown, not asserted; 2026-11-30, CPU.
Differs:  SmolLM2 135M for Qwen2.5-Coder-Instruct 1.5B, both int8; K = 4, batch
          8, 32 tokens of 8 HumanEval prompts. The law is certified by
          `certify.py` on models whose law can be listed.
"""

import sys
from typing import Any

from experiments import script
from experiments.reproduce import definitions, measured, record

K, BATCH, NUM_PROMPTS, NUM_TOKENS = 4, 8, 8, 32
TEMPERATURES = (0.0, 1.0)


def measure(place: measured.Place) -> list[dict[str, Any]]:
  """A row per draft and temperature; all coupled."""
  target = {'target': 'demo:target', 'dtype': 'float32'}
  # The demo pair has one vocabulary, so the intersection is all of it.
  draft = 'demo:draft'
  if not place.is_quick:
    target = {'target': place.model(measured.QWEN), 'quantize': 'int8'}
    draft = place.model(measured.SMOLLM2)
  prompts = [
    {**row, 'temperature': heat, 'seed': seed}
    for heat in TEMPERATURES
    for seed, row in enumerate(measured.rows(place, 'humaneval', NUM_PROMPTS))
  ]
  settings = {
    **target,
    'verify': 'coupled',
    'num_draft_tokens': K,
    'batch_size': BATCH,
    'max_new_tokens': 16 if place.is_quick else NUM_TOKENS,
    'max_length': 512,
  }
  plain = measured.run(prompts, records=False, **settings)
  run = measured.run(prompts, **settings, proposer='tli', draft=draft)
  found = []
  for i, heat in enumerate(TEMPERATURES):
    rows = slice(i * NUM_PROMPTS, (i + 1) * NUM_PROMPTS)
    same = sum(a == b for a, b in zip(run.tokens[rows], plain.tokens[rows]))
    own = run.trace.select(run.trace['temperature'] == heat)
    found.append(
      {
        'temperature': heat,
        'K': K,
        'equal_texts': f'{same} of {NUM_PROMPTS}',
        **definitions.measure(own),
      }
    )
  return found


def findings(rows: list[dict[str, Any]]) -> list[record.Finding]:
  equal = [row['equal_texts'] for row in rows]
  get = lambda name: [row[name][0] for row in rows]
  return [
    record.true(
      'texts equal to those of plain decoding, temperature 0, 1',
      'all',
      equal,
      all(a == b for a, b in (text.split(' of ') for text in equal)),
      is_headline=True,
    ),
    record.shown(
      'alpha_tested at temperature 0, 1',
      'below the same family',
      get('alpha_tested'),
      'accepted over tested drafts; coupled',
      is_headline=True,
    ),
    record.shown(
      'tokens a step',
      'above 1',
      get('tokens_per_step'),
      'correction and bonus counted',
      is_headline=True,
    ),
  ]


def main(values) -> int:
  place = measured.place_of(values)

  def reproduce(quick: bool) -> record.Measured:
    del quick  # The place says it.
    rows = measure(place)
    return record.Measured(findings=findings(rows), rows=rows)

  return record.run('other_vocabulary', reproduce, values)


if __name__ == '__main__':
  sys.exit(script.run_main(main, measured.FLAG_GROUPS))

"""Reproduces early exit by depth, after LayerSkip (2024), arXiv:2404.16710.

Claim:    a model's first layers draft for all of them, the better the more they
          are; as a draft costs what its layers cost, there is a best depth.
Notation: their exit layer E of L layers; speed is bounded by tokens a step over
          1 + K E / L, a verification counted as one pass.
Command:  python experiments/reproduce/early_exit.py
Runtime:  5 minutes on 2 CPU cores; --quick: 10 seconds.
Expected: acceptance grows with the depth; theirs is of models that were trained
          for early exits, so without that only deep exits draft well.
Got:      alpha by depth (5 of 30, 10 of 30, 15 of 30, 20 of 30, 25 of 30, 28 of
          30): 0.03901 0.02875 0.1088 0.1786 0.4645 0.5248; speed over plain
          decoding at most: 0.624 0.4411 0.3734 0.331 0.4101 0.4158; 1 of 1
          hold; 1 shown, not asserted; 2026-11-30, CPU.
Differs:  SmolLM2 135M (30 layers, int8), which was not trained for it; K = 4,
          greedy, 64 tokens of 8 HumanEval prompts.
"""

import sys
from typing import Any

from experiments import script
from experiments.reproduce import definitions, measured, record

K, BATCH, NUM_PROMPTS, NUM_TOKENS = 4, 8, 8, 64
NUM_LAYERS, EXITS = 30, (5, 10, 15, 20, 25, 28)
_DEMO_LAYERS, _DEMO_EXITS = 6, (2, 5)


def measure(place: measured.Place) -> list[dict[str, Any]]:
  """A row per exit layer."""
  settings = {'target': 'demo:target'}
  depth, exits = _DEMO_LAYERS, _DEMO_EXITS
  if not place.is_quick:
    settings = {'target': place.model(measured.SMOLLM2), 'quantize': 'int8'}
    depth, exits = NUM_LAYERS, EXITS
  found = []
  for layer in exits:
    trace = measured.run(
      measured.rows(place, 'humaneval', NUM_PROMPTS),
      **settings,
      proposer='early_exit',
      exit_layer=layer,
      num_draft_tokens=K,
      batch_size=BATCH,
      max_new_tokens=16 if place.is_quick else NUM_TOKENS,
      exact=False,
    ).trace
    own = definitions.measure(trace)
    tau = own['tokens_per_step'][0]
    found.append(
      {
        'layers': f'{layer} of {depth}',
        'K': K,
        'most_speed': tau / (1 + K * layer / depth),
        **own,
      }
    )
  return found


def findings(rows: list[dict[str, Any]]) -> list[record.Finding]:
  alphas = [row['alpha_tested'][0] for row in rows]
  pairs = list(zip(alphas, alphas[1:]))
  depths = ', '.join(row['layers'] for row in rows)
  return [
    record.true(
      f'alpha by depth ({depths})',
      'growing',
      alphas,
      # A small dip is within what 8 prompts show.
      all(b > a - 0.05 for a, b in pairs) and alphas[-1] > alphas[0],
      note='a dip below 0.05 is let pass',
      is_headline=True,
    ),
    record.shown(
      'speed over plain decoding at most',
      'above 1 somewhere',
      [row['most_speed'] for row in rows],
      'tokens a step over 1 + K E / L',
      is_headline=True,
    ),
  ]


def main(values) -> int:
  place = measured.place_of(values)

  def reproduce(quick: bool) -> record.Measured:
    del quick  # The place says it.
    rows = measure(place)
    return record.Measured(findings=findings(rows), rows=rows)

  return record.run('early_exit', reproduce, values)


if __name__ == '__main__':
  sys.exit(script.run_main(main, measured.FLAG_GROUPS))

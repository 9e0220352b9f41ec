"""Reproduces what DeepSeek-V3 (2024), arXiv:2412.19437, says of one MTP module.

Claim:    a second token that is accepted with probability a makes 1 + a tokens
          a step; so 1.8x with a = 0.85 to 0.90 leaves 2.8 to 5.6 % of a step
          for the module.
Notation: D = 1 module is one draft, K = 1.
Command:  python experiments/reproduce/deepseek_mtp.py
Runtime:  6 seconds on 2 CPU cores; --quick: 5 seconds.
Expected: 1.85 to 1.90 tokens a step; overhead 0.028 to 0.056.
Got:      tokens a step: 1.85 1.9; overhead that 1.8x implies: 0.02778 0.05556;
          4 of 4 hold; 2026-11-30, CPU.
Differs:  an identity, and the loop on toy pairs with that acceptance. The paper
          gives no setting for 85-90 % and 1.8x; they are quoted as claimed.
"""

import sys

from experiments import script
from experiments.reproduce import record, toys
from specjax import metrics
from specjax.verify import chain

ACCEPTANCE = (0.85, 0.90)
CLAIMED = 1.8


def reproduce(quick: bool) -> list[record.Finding]:
  tokens = [metrics.expected_tokens(a, 1) for a in ACCEPTANCE]
  found = [
    record.close(
      'tokens a step', [1.85, 1.90], tokens, 1e-12, is_headline=True
    ),
    record.close(
      'overhead that 1.8x implies',
      [0.028, 0.056],
      [tau / CLAIMED - 1 for tau in tokens],
      5e-4,
      is_headline=True,
    ),
  ]
  for a in ACCEPTANCE[:1] if quick else ACCEPTANCE:
    program = toys.pair_program(
      ((0.5, 0.5), (a - 0.5, 1.5 - a)),
      chain.Rejection(),
      1,
      rows=512 if quick else 8192,
      num_tokens=16,
    )
    steps = toys.steps(program)
    found.append(
      record.within_error(
        f'tokens a step of the loop, a = {a}',
        1 + a,
        steps.num_emitted[steps.num_draft == 1],
      )
    )
  return found


def main(values) -> int:
  return record.run('deepseek_mtp', reproduce, values)


if __name__ == '__main__':
  sys.exit(script.run_main(main, record.FLAG_GROUPS))

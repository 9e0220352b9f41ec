"""Reproduces the formula of Lookahead decoding (2024), arXiv:2402.02057.

Claim:    the longest of b independent candidates of K tokens yields
          (K + 1) - sum_i (1 - alpha^i)^b tokens.
Notation: their gamma is our K; b is the number of candidates checked at once.
Command:  python experiments/reproduce/lookahead.py
Runtime:  3 seconds on 2 CPU cores; --quick: 2 seconds.
Expected: for K = 4 and b = 1, 5, 15: 1.2496 1.9043 2.5600 (alpha 0.2), 1.6496
          2.9072 3.8779 (0.4), 2.3056 4.0866 4.8481 (0.6).
Got:      tokens a step: 1.25 1.904 2.56 1.65 2.907 3.878 2.306 4.087 4.848; 11
          of 11 hold; 2026-11-30, CPU.
Differs:  the formula and a simulation of it; candidates from a pool of n-grams
          are neither independent nor equally good, and a step that checks them
          costs more. Its speed is not measured here.
"""

import sys

import numpy as np

from experiments import script
from experiments.reproduce import record
from specjax import metrics

K = 4
CANDIDATES = (1, 5, 15)
TABLE = {
  0.2: (1.2496, 1.9043, 2.5600),
  0.4: (1.6496, 2.9072, 3.8779),
  0.6: (2.3056, 4.0866, 4.8481),
}


def expected_tokens(alpha: float, k: int, num_candidates: int) -> float:
  """Tokens a step, the target's own included."""
  missed = sum((1 - alpha**i) ** num_candidates for i in range(1, k + 1))
  return k + 1 - missed


def simulate(alpha: float, b: int, num_steps: int) -> np.ndarray:
  """Tokens of each step: the longest run of hits among b candidates."""
  rng = np.random.default_rng(0)
  is_hit = rng.random((num_steps, b, K)) < alpha
  return 1 + np.cumprod(is_hit, axis=2).sum(axis=2).max(axis=1)


def reproduce(quick: bool) -> list[record.Finding]:
  num_steps = 20_000 if quick else 200_000
  return [
    record.close(
      'tokens a step',
      [value for row in TABLE.values() for value in row],
      [expected_tokens(a, K, b) for a in TABLE for b in CANDIDATES],
      5e-5,
      is_headline=True,
    ),
    record.close(
      'one candidate is a chain',
      [metrics.expected_tokens(alpha, K) for alpha in TABLE],
      [expected_tokens(alpha, K, 1) for alpha in TABLE],
      1e-12,
    ),
    *(
      record.within_error(
        f'simulated, alpha {alpha}, b {b}',
        expected_tokens(alpha, K, b),
        simulate(alpha, b, num_steps),
      )
      for alpha in TABLE
      for b in CANDIDATES
    ),
  ]


def main(values) -> int:
  return record.run('lookahead', reproduce, values)


if __name__ == '__main__':
  sys.exit(script.run_main(main, record.FLAG_GROUPS))

"""What a run did, counted from its records, and what theory expects.

All counts are taken on the host from the per-token records of `DecodeState`,
after every cut, so a text that was shortened at a stop string is counted as
the text the caller got. Definitions, with s over verifications:

  d_s drafted, a_s accepted, e_s emitted = a_s + 1 correction or bonus, less a
  cut; a draft behind a stop was never asked for and is not counted.
"""

import dataclasses
import math

import numpy as np

from specjax.state import ACCEPTED


@dataclasses.dataclass(frozen=True)
class Tally:
  """Counts over verifications; tallies of requests add up.

  Attributes:
    num_steps: verifications.
    num_drafting_steps: those with at least one draft.
    num_drafted: drafts verified.
    num_accepted: drafts accepted and emitted.
    num_emitted: tokens emitted.
    num_tested: accepted drafts and, per step, the first rejected one.
    accepted_histogram: int [K + 1], steps by accepted drafts.
    num_trying: int [K], steps that accepted i and drafted at least i + 1.
    overlap_sum: sum over tested drafts of sum min(p, q).
    num_overlaps: tested drafts whose law is known.
  """

  num_steps: int
  num_drafting_steps: int
  num_drafted: int
  num_accepted: int
  num_emitted: int
  num_tested: int
  accepted_histogram: np.ndarray
  num_trying: np.ndarray
  overlap_sum: float
  num_overlaps: int

  def __add__(self, other: 'Tally') -> 'Tally':
    names = [field.name for field in dataclasses.fields(self)]
    return Tally(*(getattr(self, n) + getattr(other, n) for n in names))


def tally(
  *,
  step: np.ndarray,
  source: np.ndarray,
  num_draft: np.ndarray,
  overlap: np.ndarray,
  num_draft_tokens: int,
  is_stopped: bool,
) -> Tally:
  """Counts one request from the records of its emitted tokens.

  Args:
    step: int [n], the step each emitted token belongs to, not decreasing.
    source: int [n], as `DecodeState.source_BL`.
    num_draft: int [n], drafts verified, at each step's first token.
    overlap: float [n], sum min(p, q) where a draft was tested, else NaN.
    num_draft_tokens: K.
    is_stopped: the last step was cut at a stop id or a stop string; the
      drafts behind the stop do not count.

  Two steps, K = 3: two drafts kept and corrected, then all three and a bonus.

  >>> counts = tally(
  ...   step=np.array([0, 0, 0, 1, 1, 1, 1]),
  ...   source=np.array([1, 1, 2, 1, 1, 1, 3]),
  ...   num_draft=np.array([3, 0, 0, 3, 0, 0, 0]),
  ...   overlap=np.full(7, np.nan), num_draft_tokens=3, is_stopped=False)
  >>> counts.num_accepted, counts.num_drafted, counts.num_tested
  (5, 6, 6)
  >>> summarise(counts)['block_efficiency']
  3.5
  """
  first = np.flatnonzero(np.diff(step, prepend=-1))
  emitted = np.diff(first, append=len(step))
  is_accepted = (source == ACCEPTED).astype(int)
  accepted = np.add.reduceat(is_accepted, first) if len(first) else first
  drafted = num_draft[first].astype(int)
  if is_stopped and len(first):
    drafted[-1] = min(drafted[-1], emitted[-1])
  order = np.arange(num_draft_tokens)[:, None]
  overlap = overlap[~np.isnan(overlap)]
  return Tally(
    num_steps=len(first),
    num_drafting_steps=int(np.sum(drafted > 0)),
    num_drafted=int(np.sum(drafted)),
    num_accepted=int(np.sum(accepted)),
    num_emitted=len(step),
    num_tested=int(np.sum(accepted + (accepted < drafted))),
    accepted_histogram=np.bincount(accepted, minlength=num_draft_tokens + 1),
    num_trying=np.sum((drafted > order) & (accepted >= order), axis=1),
    overlap_sum=float(np.sum(overlap)),
    num_overlaps=len(overlap),
  )


def summarise(counts: Tally) -> dict:
  """The figures that results carry; null where nothing was counted.

  Returns:
    num_steps, num_drafted, num_accepted, num_emitted: counts.
    block_efficiency: emitted / steps; correction and bonus count, plain = 1.
    mean_acceptance_length: 1 + accepted / steps that drafted.
    draft_acceptance_rate: accepted / drafted.
    alpha_tested: accepted / tested, the alpha of `expected_tokens`.
    acceptance_per_position: [K], share of drafting steps with a_s >= i.
    acceptance_conditional: [K], share of a_s >= i among the steps that
      accepted i - 1 and drafted i.
    accepted_histogram: [K + 1], steps by accepted drafts.
    expected_acceptance: mean over tested drafts of sum min(p, q).
  """
  ratio = lambda a, b: float(a) / float(b) if b else None
  histogram = counts.accepted_histogram
  survivors = np.cumsum(histogram[::-1])[::-1][1:]  # steps with a_s >= i
  rate = ratio(counts.num_accepted, counts.num_drafting_steps)
  return {
    'num_steps': counts.num_steps,
    'num_drafted': counts.num_drafted,
    'num_accepted': counts.num_accepted,
    'num_emitted': counts.num_emitted,
    'block_efficiency': ratio(counts.num_emitted, counts.num_steps),
    'mean_acceptance_length': None if rate is None else 1 + rate,
    'draft_acceptance_rate': ratio(counts.num_accepted, counts.num_drafted),
    'alpha_tested': ratio(counts.num_accepted, counts.num_tested),
    'acceptance_per_position': [
      ratio(n, counts.num_drafting_steps) for n in survivors
    ],
    'acceptance_conditional': [
      ratio(n, m) for n, m in zip(survivors, counts.num_trying)
    ],
    'accepted_histogram': histogram.tolist(),
    'expected_acceptance': ratio(counts.overlap_sum, counts.num_overlaps),
  }


def expected_tokens(alpha: float, num_draft_tokens: int) -> float:
  """Tokens per verification with i.i.d. acceptance, bonus included.

  (1 - alpha^(K + 1)) / (1 - alpha). Leviathan et al., equation 1.

  >>> round(expected_tokens(0.8, 5), 4)
  3.6893
  """
  return math.fsum(alpha**i for i in range(num_draft_tokens + 1))


def speedup(
  alpha: float, num_draft_tokens: int, cost_ratio: float, verify_cost: float = 1
) -> float:
  """Speed over plain decoding: E / (verify_cost + K cost_ratio).

  Args:
    alpha: acceptance rate, see `alpha_tested`.
    num_draft_tokens: K; 0 is plain decoding.
    cost_ratio: c, one draft step over one plain target step.
    verify_cost: one verification over one plain target step.

  Source: Leviathan et al., arXiv:2211.17192, Theorem 3.8, where a
    verification costs 1.

  >>> round(speedup(0.8, 8, 0.05), 3)
  3.092
  """
  cost = verify_cost + num_draft_tokens * cost_ratio
  return expected_tokens(alpha, num_draft_tokens) / cost


def optimal_num_draft_tokens(
  alpha: float, cost_ratio: float, max_draft_tokens: int = 64
) -> int:
  """The K in 0..max with the largest `speedup`, the smaller one of a tie.

  >>> optimal_num_draft_tokens(0.8, 0.05), optimal_num_draft_tokens(0.5, 0.5)
  (8, 0)
  """
  return max(
    range(max_draft_tokens + 1), key=lambda k: speedup(alpha, k, cost_ratio)
  )


def alpha_from_block_efficiency(tau: float, num_draft_tokens: int) -> float:
  """The alpha for which `expected_tokens` is tau, by bisection.

  Raises:
    ValueError: tau outside 1..K + 1.

  >>> round(alpha_from_block_efficiency(3.6893, 5), 3)
  0.8
  """
  if not 1 <= tau <= num_draft_tokens + 1:
    raise ValueError(
      f'tau must be in 1..{num_draft_tokens + 1} for {num_draft_tokens} '
      f'draft tokens, got {tau}.'
    )
  low, high = 0.0, 1.0
  for _ in range(60):
    middle = (low + high) / 2
    if expected_tokens(middle, num_draft_tokens) < tau:
      low = middle
    else:
      high = middle
  return (low + high) / 2

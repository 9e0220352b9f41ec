"""The arithmetic of a benchmark: rates, intervals, and what theory predicts.

Axes: R repeats, P batches of prompts, each timed as a whole.
"""

import dataclasses

import numpy as np

_NUM_RESAMPLES = 2000
_LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Interval:
  """A ratio of two rates; low and high hold it with 95 % confidence."""

  value: float
  low: float
  high: float


def rates(emitted_P: np.ndarray, seconds_RP: np.ndarray) -> np.ndarray:
  """Tokens per second of each repeat, float64 [R].

  >>> rates(np.array([10, 30]), np.array([[1.0, 1.0], [2.0, 3.0]])).tolist()
  [20.0, 8.0]
  """
  return np.sum(emitted_P) / np.sum(seconds_RP, axis=1)


def ratio(
  emitted_P: np.ndarray,
  seconds_RP: np.ndarray,
  base_emitted_P: np.ndarray,
  base_seconds_RP: np.ndarray,
  seed: int = 0,
) -> Interval:
  """How many times as fast: the ratio of the median rates.

  The interval is a percentile bootstrap over repeats and batches of prompts.
  Both sides are drawn together, for both decoded the same prompts, in the same
  minutes.

  Args:
    emitted_P: tokens of each batch.
    seconds_RP: what they took.
    base_emitted_P: of the other side.
    base_seconds_RP: likewise.
    seed: of the draws, so that an interval can be had again.

  Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
    chapter 13.

  >>> one = np.ones((2, 3))
  >>> ratio(np.full(3, 8), one, np.full(3, 2), one)
  Interval(value=4.0, low=4.0, high=4.0)
  """
  num_repeats, num_batches = seconds_RP.shape
  rng = np.random.default_rng(seed)
  found = []
  for _ in range(_NUM_RESAMPLES):
    p = rng.integers(num_batches, size=num_batches)
    r = rng.integers(num_repeats, size=num_repeats)[:, None]
    found.append(
      np.median(rates(emitted_P[p], seconds_RP[r, p]))
      / np.median(rates(base_emitted_P[p], base_seconds_RP[r, p]))
    )
  edge = (1 - _LEVEL) / 2
  low, high = np.quantile(found, [edge, 1 - edge])
  value = np.median(rates(emitted_P, seconds_RP)) / np.median(
    rates(base_emitted_P, base_seconds_RP)
  )
  return Interval(value=float(value), low=float(low), high=float(high))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """Seconds of the parts of a step, each measured alone.

  Attributes:
    plain: a target pass of the fastest plain decoding.
    verify: a target pass over the rows of this cell.
    draft: a pass of the drafting model over one row; None without one.
    absorb: its pass over the rows that `propose` feeds first; None without.
    propose: the whole of `Proposer.propose`, run alone.
  """

  plain: float
  verify: float
  draft: float | None
  absorb: float | None
  propose: float


def step_seconds(costs: Costs, num_passes: float) -> float:
  """What a step of the loop should take.

    verify + (passes - 1) draft + absorb      with a model that drafts
    verify + propose                          with any other proposer

  Args:
    costs: measured.
    num_passes: passes of the drafting model per step, on average; the first of
      them is the one that absorbs.

  >>> costs = Costs(plain=10, verify=12, draft=2, absorb=3, propose=9)
  >>> step_seconds(costs, 4.0)
  21.0
  """
  if costs.draft is None:
    return costs.verify + costs.propose
  return costs.verify + (num_passes - 1) * costs.draft + costs.absorb


def predicted_speedup(
  costs: Costs, num_passes: float, tokens_per_step: float
) -> float:
  """Speed over the fastest plain decoding: tau * plain / step.

  Args:
    costs: measured.
    num_passes: as in `step_seconds`.
    tokens_per_step: tau, tokens per row of the batch and step of the loop,
      steps that a finished row waits through counted. With one row it is the
      block efficiency.

  Source: Leviathan et al., arXiv:2211.17192, Theorem 3.8, with measured tokens
    per step, a verification that does not cost 1, and a first draft pass that
    absorbs what was committed.

  >>> costs = Costs(plain=10, verify=12, draft=2, absorb=3, propose=9)
  >>> round(predicted_speedup(costs, 4.0, 3.15), 3)
  1.5
  """
  return tokens_per_step * costs.plain / step_seconds(costs, num_passes)


def drafts_by_step(step_BL, num_draft_BL, is_emitted_BL) -> np.ndarray:
  """The most drafts of any row in each step of the loop, int [steps].

  Args:
    step_BL: int [B, L], the row's step that emitted each token.
    num_draft_BL: int [B, L], drafts verified, at each step's first token.
    is_emitted_BL: bool [B, L].

  All rows begin in the loop's first step, so a row's steps are the loop's.

  >>> drafts_by_step(
  ...   np.array([[0, 0, 1], [0, 1, 2]]), np.array([[1, 0, 0], [0, 3, 2]]),
  ...   np.ones((2, 3), bool)).tolist()
  [1, 3, 2]
  """
  step = step_BL[is_emitted_BL]
  most = np.zeros(int(step.max(initial=-1)) + 1, int)
  np.maximum.at(most, step, num_draft_BL[is_emitted_BL])
  return most

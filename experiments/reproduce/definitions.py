"""Every definition of acceptance, side by side, from one recorded run.

They differ by several points on the same run, so a number without its
definition says little. Intervals are bootstrapped over prompts.
"""

import dataclasses

import numpy as np

from experiments import replay_laws, replay_steps, trace_file
from specjax import metrics
from specjax.proposers.stopping import Fixed

_RESAMPLES = 2000
Interval = tuple[float, float, float]  # A value, and where 95 % of draws lie.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Counts:
  """Sums of every prompt, float [R] each.

  Attributes:
    steps: verifications.
    drafting: those with a draft.
    drafted, accepted, emitted: tokens.
    tested: accepted drafts and the first rejected one of each step.
    kept_first: steps that kept their first draft.
    overlap_tested: sum of sum min(p, q) over tested drafts.
    overlap_all: the same over all emitted tokens.
  """

  steps: np.ndarray
  drafting: np.ndarray
  drafted: np.ndarray
  accepted: np.ndarray
  emitted: np.ndarray
  tested: np.ndarray
  kept_first: np.ndarray
  overlap_tested: np.ndarray
  overlap_all: np.ndarray


def count(trace: trace_file.TraceFile) -> Counts:
  """The counts of a trace; overlaps are NaN for drafts without laws."""
  row_S = trace['step_request']
  num = trace.num_requests
  add = lambda value_S: np.bincount(row_S, value_S, minlength=num)
  start_S = _step_begins(trace)
  accepted_S, emitted_S = trace['accepted'], trace['emitted']
  # Drafts behind a stop were never asked for.
  text_end_R = trace.begin + trace['num_tokens']
  is_cut_S = (start_S + emitted_S == text_end_R[row_S]) & (
    trace['is_stopped'][row_S]
  )
  drafted_S = np.where(
    is_cut_S, np.minimum(trace['drafted'], emitted_S), trace['drafted']
  )
  is_drafting_S = drafted_S > 0
  is_rejected_S = accepted_S < drafted_S
  overlap_P = _overlap(trace)
  row_P = np.repeat(np.arange(num), trace['num_tokens'])
  # Tested tokens of a step: the accepted ones and the first correction.
  ends = np.concatenate([[0], np.cumsum(overlap_P)])
  num_tested_S = accepted_S + is_rejected_S
  end_S = start_S + num_tested_S
  return Counts(
    steps=add(None),
    drafting=add(is_drafting_S),
    drafted=add(drafted_S),
    accepted=add(accepted_S),
    emitted=add(emitted_S),
    tested=add(num_tested_S),
    kept_first=add(accepted_S > 0),
    overlap_tested=add(ends[end_S] - ends[start_S]),
    overlap_all=np.bincount(row_P, overlap_P, minlength=num),
  )


def _overlap(trace: trace_file.TraceFile) -> np.ndarray:
  """sum min(p, q) at every position, at the recorded temperatures, [P].

  Ids beyond the recorded ones overlap as their tails do, which is at most as
  much as theirs together.
  """
  p, q = replay_laws.laws(trace, trace['temperature'])
  return np.exp(np.minimum(p, q)).sum(axis=1)


def _step_begins(trace: trace_file.TraceFile) -> np.ndarray:
  """The position of each step's first token, int [S]."""
  order = np.lexsort((trace['step_index'], trace['step_request']))
  emitted = trace['emitted'][order].astype(np.int64)
  begin = np.zeros(len(order), np.int64)
  # Requests lie one behind the other, and so do their steps.
  begin[order] = np.cumsum(emitted) - emitted
  return begin


def _tau(c: Counts) -> np.ndarray:
  return _over(c.emitted, c.steps)


def _over(top, below):
  return np.sum(top, -1) / np.maximum(np.sum(below, -1), 1)


# Name, and the figure of counts whose last axis is prompts.
DEFINITIONS = {
  'tokens_per_step': _tau,
  'mean_acceptance_length': lambda c: 1 + _over(c.accepted, c.drafting),
  'draft_acceptance_rate': lambda c: _over(c.accepted, c.drafted),
  'first_draft_accepted': lambda c: _over(c.kept_first, c.drafting),
  'alpha_tested': lambda c: _over(c.accepted, c.tested),
  'expected_acceptance': lambda c: _over(c.overlap_tested, c.tested),
  'alpha_tv': lambda c: _over(c.overlap_all, c.emitted),
}


def measure(trace: trace_file.TraceFile, seed: int = 0) -> dict[str, Interval]:
  """Every definition, with its interval over prompts.

  `alpha_of_tau` is the alpha under which K drafts, accepted independently,
  would yield as many tokens a step.
  """
  counts = count(trace)
  drawn = resample(counts, trace.num_requests, seed)
  found = {
    name: interval(float(figure(counts)), figure(drawn))
    for name, figure in DEFINITIONS.items()
  }
  k = trace.about['num_draft_tokens']
  found['alpha_of_tau'] = tuple(
    metrics.alpha_from_block_efficiency(tau, k)
    for tau in found['tokens_per_step']
  )
  return {
    name: values for name, values in found.items() if not np.isnan(values[0])
  }


def resample(counts: Counts, num_prompts: int, seed: int) -> Counts:
  """Counts of drawn prompts, [resamples, R]."""
  rng = np.random.default_rng(seed)
  drawn = rng.integers(num_prompts, size=(_RESAMPLES, num_prompts))
  return Counts(
    **{
      field.name: getattr(counts, field.name)[drawn]
      for field in dataclasses.fields(counts)
    }
  )


def interval(value: float, drawn: np.ndarray) -> Interval:
  """A value and the middle 95 % of what was drawn."""
  low, high = np.percentile(drawn, [2.5, 97.5])
  return value, float(low), float(high)


def block_gain(
  trace: trace_file.TraceFile,
  num_draft_tokens: int,
  samples: int = 200,
  seed: int = 0,
) -> Interval:
  """Tokens a step of block over token verification, less 1.

  Both are replayed from one trace at its own temperatures, with acceptances
  redrawn; the interval is over prompts.
  """
  rng = np.random.default_rng(seed)
  steps = {}
  for verify in ('rejection', 'block'):
    found = replay_laws.acceptance(trace, verify, None, num_draft_tokens)
    counts, _ = replay_steps.simulate(
      trace,
      found.drafts,
      num_draft_tokens,
      Fixed(),
      is_block=verify == 'block',
      samples=samples,
      weight_WP=np.ones((1, len(trace['token']))),
      rng=rng,
    )
    # Of the same texts, so tokens a step are as steps are few.
    steps[verify] = counts['steps'][0].mean(axis=0)
  drawn = rng.integers(
    trace.num_requests, size=(_RESAMPLES, trace.num_requests)
  )
  gain = lambda rows: (
    steps['rejection'][rows].sum(-1) / steps['block'][rows].sum(-1) - 1
  )
  return interval(float(gain(np.arange(trace.num_requests))), gain(drawn))

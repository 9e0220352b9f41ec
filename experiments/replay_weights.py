"""Texts of one temperature that speak of another.

  w_t = prod of p_T(x_s) / p_R(x_s) over the token t and the h - 1 before it

p_R drew the token and p_T is the target's law at the temperature asked for.
With h the whole text, ratios of sums weighted by w are those of texts that were
drawn at T, but then a few texts have nearly all the weight. With a shorter h
more texts count, but what stands before the window is text of the recorded
temperature. So h is doubled as long as enough texts count, and an interval
supposes that the way left is no longer than the way so far: from the texts as
they are, over the shorter windows, to this one.

Source: importance sampling and effective sample sizes as in Kong, A note on
  importance sampling using standardized weights, 1992; the window is ours.
"""

import dataclasses

import numpy as np

from experiments import trace_file

# An interval needs so many texts, and this share of all, to count.
_LEAST_TEXTS, _LEAST_SHARE = 5, 0.75


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
  """What the positions of a trace weigh.

  Attributes:
    weight_WP: ones, for texts as they are; for an estimate then a row for each
      window from 1 to h.
    window: h, tokens; 0 for such texts.
    num_texts: as many texts as count, (sum W)^2 / sum W^2 with W of a text.
    is_enough: whether these are enough for an interval.
  """

  weight_WP: np.ndarray
  window: int
  num_texts: float
  is_enough: bool


def plain(trace: trace_file.TraceFile) -> Weights:
  """Every text as it is; two at least are needed to see how texts differ."""
  num = trace.num_requests
  return Weights(
    weight_WP=np.ones((1, len(trace['token']))),
    window=0,
    num_texts=float(num),
    is_enough=num > 1,
  )


def tilted(
  trace: trace_file.TraceFile, log_tilt_P: np.ndarray, temperature: float
) -> Weights:
  """Weights for texts of another temperature.

  Args:
    trace: the texts.
    log_tilt_P: log p_T(x) / p_R(x) of each token.
    temperature: T.
  """
  least = max(_LEAST_TEXTS, _LEAST_SHARE * trace.num_requests)
  longest = int(np.max(trace['num_tokens'], initial=1))
  window, rows = 1, [np.ones(len(log_tilt_P)), windowed(trace, log_tilt_P, 1)]
  while window < longest:
    longer = windowed(trace, log_tilt_P, 2 * window)
    if num_texts(trace, longer) < least:
      break
    window *= 2
    rows.append(longer)
  found = num_texts(trace, rows[-1])
  return Weights(
    weight_WP=np.stack(rows),
    window=window,
    num_texts=found,
    is_enough=found >= least
    and bool(np.all(trace['temperature'] > temperature)),
  )


def windowed(
  trace: trace_file.TraceFile, log_tilt_P: np.ndarray, window: int
) -> np.ndarray:
  """w of every position, scaled so that the largest is 1, [P]."""
  # A token that cannot be drawn at T must not make the others' sums NaN.
  log_tilt_P = np.maximum(log_tilt_P, -1e4)
  log_w_P = np.zeros(len(log_tilt_P))
  for begin, num in zip(trace.begin, trace['num_tokens']):
    sums = np.concatenate([[0], np.cumsum(log_tilt_P[begin : begin + num])])
    end = np.arange(1, num + 1)
    log_w_P[begin : begin + num] = sums[end] - sums[np.maximum(end - window, 0)]
  return np.exp(log_w_P - np.max(log_w_P, initial=-np.inf))


def num_texts(trace: trace_file.TraceFile, weight_P: np.ndarray) -> float:
  """The effective number of texts."""
  row_P = np.repeat(np.arange(trace.num_requests), trace['num_tokens'])
  weight_R = np.bincount(row_P, weight_P, minlength=trace.num_requests)
  return float(weight_R.sum() ** 2 / np.maximum((weight_R**2).sum(), 1e-300))

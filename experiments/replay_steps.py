"""Cuts recorded texts into steps again, as another run would have."""

import numpy as np

from experiments import trace_file
from experiments.replay_laws import ByLaw, ByLookup
from specjax.proposers.base import Outcome
from specjax.proposers.stopping import Confidence, StoppingRule

COUNTS = ('steps', 'drafted', 'accepted', 'emitted', 'tested')


def simulate(
  trace: trace_file.TraceFile,
  drafts: ByLaw | ByLookup,
  num_draft_tokens: int,
  rule: StoppingRule,
  *,
  is_block: bool,
  samples: int,
  weight_WP: np.ndarray,
  rng: np.random.Generator,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """Cuts every text into steps, S times.

  What happens at a token counts by the token's weight, so a figure of texts of
  another law is a ratio of these counts if the weights lead there.

  Args:
    trace: the texts.
    drafts: what was drafted, and how probably it is accepted.
    num_draft_tokens: K.
    rule: ends drafts.
    is_block: whether drafts are judged together.
    samples: S.
    weight_WP: of each position, in W ways; ones for texts as they are.
    rng: of the acceptances.

  Returns:
    Counts [W, S, R] by name, and steps by accepted drafts [W, K + 1].
  """
  num_requests, k = trace.num_requests, num_draft_tokens
  each = lambda values: np.tile(values, samples)  # Rows: sample, request.
  begin_B, size_B = each(trace.begin), each(trace['num_tokens'])
  is_stopped_B = each(trace['is_stopped'])
  limit_B = np.where(is_stopped_B, each(trace['max_new_tokens']), size_B)
  best_q = np.exp(trace['law_q'].max(axis=1, initial=-np.inf))
  # Behind the last text there is nothing, which weighs nothing.
  weight_WP = np.pad(weight_WP, ((0, 0), (0, 1)))
  shape = (len(weight_WP), len(begin_B))
  counts = {name: np.zeros(shape) for name in COUNTS}
  histogram = np.zeros((len(weight_WP), k + 1))
  place_B = np.zeros_like(size_B)
  state = rule.init(len(size_B))
  while np.any(place_B < size_B):
    is_live_B = place_B < size_B
    start_B = np.where(is_live_B, begin_B + place_B, 0)
    most_B = np.broadcast_to(np.asarray(rule.most(state, k)), place_B.shape)
    most_B = np.minimum(most_B, np.maximum(limit_B - place_B - 1, 0))
    most_B = np.minimum(most_B, drafts.most(start_B, k))
    drafted_B = np.zeros_like(place_B)
    accepted_B = np.zeros_like(place_B)
    is_drafting_B, is_kept_B = is_live_B.copy(), is_live_B.copy()
    log_w_B = np.zeros(len(place_B))
    for i in range(k):
      is_there_B = place_B + i < size_B
      index_B = np.where(is_there_B, begin_B + place_B + i, 0)
      is_drafting_B &= i < most_B
      drafted_B += is_drafting_B
      # Behind a stop nothing is known, and nothing counts.
      is_kept_B &= is_drafting_B & is_there_B
      log_ratio_B = drafts.log_ratio(start_B, i)
      log_u_B = np.log(1 - rng.random(len(place_B)))  # Of (0, 1].
      is_kept_B &= log_u_B <= log_ratio_B - log_w_B
      accepted_B += is_kept_B
      counts['accepted'] += weight_WP[:, index_B] * is_kept_B
      if is_block:
        log_w_B = np.where(
          is_kept_B, np.minimum(0.0, log_w_B - log_ratio_B), log_w_B
        )
      if isinstance(rule, Confidence):
        is_drafting_B &= ~is_there_B | (best_q[index_B] >= rule.least)
    emitted_B = np.minimum(accepted_B + 1, size_B - place_B) * is_live_B
    is_cut_B = is_stopped_B & (place_B + emitted_B == size_B)
    drafted_B = np.where(is_cut_B, np.minimum(drafted_B, emitted_B), drafted_B)
    is_rejected_B = accepted_B < drafted_B
    weight_WB = weight_WP[:, start_B] * is_live_B
    counts['steps'] += weight_WB
    counts['drafted'] += weight_WB * drafted_B
    counts['tested'] += weight_WP[:, start_B + accepted_B] * is_rejected_B
    for row, weight_B in zip(histogram, weight_WB):
      row += np.bincount(accepted_B, weight_B, minlength=k + 1)
    state = rule.observe(state, _outcome(accepted_B, drafted_B, emitted_B))
    place_B = place_B + emitted_B
  counts['tested'] += counts['accepted']
  ends = np.cumsum(weight_WP, axis=1) - weight_WP
  counts['emitted'] += ends[:, begin_B + size_B] - ends[:, begin_B]
  shape = (len(weight_WP), samples, num_requests)
  return {name: x.reshape(shape) for name, x in counts.items()}, histogram


def _outcome(accepted_B, drafted_B, emitted_B) -> Outcome:
  """As much of an outcome as rules look at."""
  nothing = dict.fromkeys(Outcome._fields)
  return Outcome(
    **{
      **nothing,
      'num_accepted_B': accepted_B,
      'num_draft_B': drafted_B,
      'num_emitted_B': emitted_B,
    }
  )

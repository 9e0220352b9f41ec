"""The law that the loop must have, by an independent slow reference.

Everything here is NumPy in float64 and shares no code with the decoder: the
transform sorts, the toy model's hash is taken over whole sequences, and every
sequence is listed. What agrees with it by chance alone is consistent.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.base import LanguageModel
from specjax.models.toy import ToyModel
from specjax.sampling import SamplingOptions
from specjax.shapes import Params

# The next-token logits of M sequences of one length: int [M, T] -> [M, V].
NextLogits = Callable[[np.ndarray], np.ndarray]

MIN_EXPECTED = 5.0  # The usual least expectation of a chi-square cell.


class Law(NamedTuple):
  """The exact joint law of the first T emitted tokens.

  Attributes:
    outcomes_MT: int64 [M, T], every possible outcome once, in lexicographic
      order; -1 behind a stop id.
    probs_M: float64 [M], their probabilities, all above 0.
  """

  outcomes_MT: np.ndarray
  probs_M: np.ndarray

  def count(self, tokens_BT: np.ndarray) -> np.ndarray:
    """How often each outcome was seen, int64 [M + 1]; the last: any other."""
    base = max(self.outcomes_MT.max(), np.max(tokens_BT)) + 2
    width = self.outcomes_MT.shape[1]
    place_T = base ** np.arange(width - 1, -1, -1, dtype=np.int64)
    known_M = (self.outcomes_MT + 1) @ place_T
    seen_B = (np.asarray(tokens_BT, np.int64) + 1) @ place_T
    index_B = np.minimum(np.searchsorted(known_M, seen_B), len(known_M) - 1)
    index_B = np.where(known_M[index_B] == seen_B, index_B, len(known_M))
    return np.bincount(index_B, minlength=len(known_M) + 1)


def toy_logits(model: ToyModel, params: Params) -> NextLogits:
  """The toy's next-token logits, hashed from scratch over each sequence."""
  table = np.asarray(params['table'], np.float64)

  def logits(tokens_MT: np.ndarray) -> np.ndarray:
    num_seen = tokens_MT.shape[1]
    position_T = np.arange(num_seen, dtype=np.uint32)
    h_MT = tokens_MT.astype(np.uint32) * np.uint32(0x9E3779B1)
    h_MT = h_MT + (position_T * np.uint32(0x85EBCA77))[None, :]
    h_MT = (h_MT ^ (h_MT >> np.uint32(15))) * np.uint32(0x2C1B3C6D)
    h_MT = h_MT ^ (h_MT >> np.uint32(12))
    if model.window is not None:
      h_MT = h_MT[:, max(num_seen - model.window, 0) :]
    h_M = h_MT.sum(axis=1, dtype=np.uint32)
    return table[h_M % np.uint32(model.table_size)]

  return logits


def model_logits(model: LanguageModel, params: Params) -> NextLogits:
  """Any model's next-token logits: each time the whole sequence, no reuse."""

  @jax.jit
  def last_logits(params, tokens_MT):
    m, t = tokens_MT.shape
    cache = model.init_cache(m, t, max_rewind=0)
    hidden, _ = model.apply(params, tokens_MT, cache)
    return model.unembed(params, hidden.last_BTD[:, -1:])[:, 0]

  return lambda tokens_MT: np.asarray(
    last_logits(params, jnp.asarray(tokens_MT, jnp.int32)), np.float64
  )


def reference_law(
  logits_MV: np.ndarray,
  options: SamplingOptions,
  prompt: Sequence[int],
  generated_MT: np.ndarray,
) -> np.ndarray:
  """What `sampling.transform` must mean: probabilities, float64 [M, V].

  Args:
    logits_MV: raw logits of the next token.
    options: the request's settings.
    prompt: its tokens; the repetition penalty counts them too.
    generated_MT: int [M, T], what was generated before the next token.
  """
  x_MV = np.array(logits_MV, np.float64)
  num_rows, vocab_size = x_MV.shape
  for token, bias in options.logit_bias:
    x_MV[:, token] += bias
  allowed = range(vocab_size)
  if options.allowed_ids is not None:
    allowed = options.allowed_ids
  for token in range(vocab_size):
    if token not in allowed or token in options.banned_ids:
      x_MV[:, token] = -np.inf
  for token in range(vocab_size):
    times_M = np.sum(generated_MT == token, axis=1)
    x_M = x_MV[:, token]
    penalty = options.repetition_penalty
    repeated_M = np.where(x_M > 0, x_M / penalty, x_M * penalty)
    x_M = np.where((times_M > 0) | (token in prompt), repeated_M, x_M)
    x_M = x_M - options.frequency_penalty * times_M
    x_MV[:, token] = x_M - options.presence_penalty * (times_M > 0)

  # Rank: value descending, then id ascending.
  order_MV = np.argsort(-x_MV, axis=1, kind='stable')
  x_MV = np.take_along_axis(x_MV, order_MV, axis=1)
  law_MV = np.zeros((num_rows, vocab_size))
  if options.temperature < np.finfo(np.float32).tiny:
    law_MV[:, 0] = 1
  else:
    with np.errstate(over='ignore'):
      law_MV = np.exp((x_MV - x_MV[:, :1]) / options.temperature)
    if options.top_k:
      law_MV[:, options.top_k :] = 0
    if options.top_p < 1:
      # The fewest with that much mass: those with less than it before them.
      share_MV = law_MV / law_MV.sum(axis=1, keepdims=True)
      law_MV[np.cumsum(share_MV, axis=1) - share_MV >= options.top_p] = 0
    law_MV[law_MV < options.min_p * law_MV[:, :1]] = 0
  law_MV /= law_MV.sum(axis=1, keepdims=True)
  unsorted_MV = np.zeros_like(law_MV)
  np.put_along_axis(unsorted_MV, order_MV, law_MV, axis=1)
  return unsorted_MV


def enumerate_exact(
  next_logits: NextLogits,
  prompt: Sequence[int],
  num_tokens: int,
  options: SamplingOptions,
  stop_ids: Sequence[int] = (),
) -> Law:
  """The joint law of the first `num_tokens` tokens of plain sampling.

  Args:
    next_logits: the model, see `toy_logits` and `model_logits`.
    prompt: at least one token.
    num_tokens: T.
    options: the request's settings.
    stop_ids: ids that end the output; they are kept.

  >>> import numpy as np
  >>> law = enumerate_exact(
  ...   lambda tokens_MT: np.log([[0.75, 0.25]] * len(tokens_MT)),
  ...   [0], 2, SamplingOptions(temperature=1.0), stop_ids=[1])
  >>> law.outcomes_MT.tolist(), law.probs_M.round(6).tolist()
  ([[0, 0], [0, 1], [1, -1]], [0.5625, 0.1875, 0.25])
  """
  alive_MT = np.zeros((1, 0), np.int64)
  alive_M = np.ones(1)
  ended = []
  for step in range(num_tokens):
    fed_MT = np.concatenate(
      [np.tile(np.asarray(prompt, np.int64), (len(alive_MT), 1)), alive_MT],
      axis=1,
    )
    law_MV = reference_law(next_logits(fed_MT), options, prompt, alive_MT)
    parent_M, token_M = np.nonzero(law_MV > 0)
    alive_M = alive_M[parent_M] * law_MV[parent_M, token_M]
    alive_MT = np.concatenate([alive_MT[parent_M], token_M[:, None]], axis=1)
    is_end_M = np.isin(token_M, list(stop_ids)) | (step + 1 == num_tokens)
    padding = ((0, 0), (0, num_tokens - step - 1))
    ended.append(
      (
        np.pad(alive_MT[is_end_M], padding, constant_values=-1),
        alive_M[is_end_M],
      )
    )
    alive_MT, alive_M = alive_MT[~is_end_M], alive_M[~is_end_M]
  outcomes_MT, probs_M = map(np.concatenate, zip(*ended))
  order_M = np.lexsort(outcomes_MT.T[::-1])
  return Law(outcomes_MT[order_M], probs_M[order_M])


class ChiSquare(NamedTuple):
  """Pearson's statistic, its degrees of freedom, and its p-value."""

  statistic: float
  dof: int
  p_value: float


def chi_square(counts: np.ndarray, probs: np.ndarray) -> ChiSquare:
  """Tests whether counts may stem from a law.

  Neighbouring cells are merged, in the given order, until each expects at
  least five; in lexicographic order that keeps what a sequence begins with. A
  count where the probability is 0 refutes the law: p is 0.

  Args:
    counts: int [M], how often each outcome was seen.
    probs: float [M], sum 1.

  Raises:
    ValueError: the shapes differ, or `probs` do not sum to 1.

  >>> result = chi_square([60, 40], [0.5, 0.5])
  >>> result.statistic, result.dof, round(result.p_value, 4)
  (4.0, 1, 0.0455)
  >>> chi_square([99, 1], [1.0, 0.0]).p_value
  0.0
  """
  counts, probs = np.asarray(counts), np.asarray(probs, np.float64)
  if counts.shape != probs.shape or not abs(probs.sum() - 1) < 1e-6:
    raise ValueError(
      'probs must have one entry per count and sum to 1, got shapes '
      f'{counts.shape} and {probs.shape}, sum {probs.sum()}.'
    )
  expected = counts.sum() * probs
  # A cell closes where the running expectation has grown by five.
  total = np.cumsum(expected)
  cell = np.zeros(len(total), np.int64)
  closed, cells = 0.0, 0
  for i, reached in enumerate(total):
    cell[i] = cells
    if reached - closed >= MIN_EXPECTED:
      closed, cells = reached, cells + 1
  cell = np.minimum(cell, max(cells - 1, 0))  # The rest joins the last cell.
  observed = np.bincount(cell, weights=counts)
  expected = np.bincount(cell, weights=expected)
  dof = len(expected) - 1
  if np.any(counts[probs == 0] > 0):
    return ChiSquare(float('inf'), dof, 0.0)
  statistic = float(np.sum((observed - expected) ** 2 / expected))
  if dof == 0:
    return ChiSquare(0.0, 0, 1.0)
  p_value = float(jax.scipy.stats.chi2.sf(statistic, dof))
  return ChiSquare(statistic, dof, p_value)

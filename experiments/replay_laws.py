"""What a trace says of each token's acceptance, by rule and temperature."""

import dataclasses
import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import trace_file
from specjax import noise as noise_lib
from specjax.proposers.ngram import NGram
from specjax.sampling import SamplingOptions

RULES = ('greedy', 'rejection', 'coupled', 'block')
# Settings that change no law, as a trace's JSON has them; not the temperature.
_OFF = json.loads(json.dumps(dataclasses.asdict(SamplingOptions())))
del _OFF['temperature']
_ROWS = 64  # Positions looked at together.
# Drafts of ids that were not recorded: how many an exact replay may miss in
# all, and an interval per token.
_MOST_UNSEEN, _MOST_UNSEEN_SHARE = 0.1, 0.01


@dataclasses.dataclass(frozen=True, eq=False)
class ByLaw:
  """Drafts of a language model, which has one law at each position.

  Attributes:
    log_ratio_P: log(q / p) of the token; 0 and -inf where equality decides.
  """

  log_ratio_P: np.ndarray

  def most(self, start_B: np.ndarray, num_draft_tokens: int) -> np.ndarray:
    """How many drafts there are in a step that begins at a position."""
    return np.full_like(start_B, num_draft_tokens)

  def log_ratio(self, start_B: np.ndarray, i: int) -> np.ndarray:
    """Of the i-th draft of such steps."""
    return self.log_ratio_P[np.minimum(start_B + i, len(self.log_ratio_P) - 1)]


@dataclasses.dataclass(frozen=True, eq=False)
class ByLookup:
  """Drafts that follow from the text and the step's beginning.

  They are certain, so the rules accept them just where they are the text.

  Attributes:
    is_equal_PK: whether the i-th draft behind a position is the text's token.
    num_draft_P: how many drafts there are.
  """

  is_equal_PK: np.ndarray
  num_draft_P: np.ndarray

  def most(self, start_B: np.ndarray, num_draft_tokens: int) -> np.ndarray:
    return np.minimum(self.num_draft_P[start_B], num_draft_tokens)

  def log_ratio(self, start_B: np.ndarray, i: int) -> np.ndarray:
    return np.where(self.is_equal_PK[start_B, i], 0.0, -np.inf)


class Acceptance(NamedTuple):
  """Which tokens would have been accepted, and how probably.

  Attributes:
    trace: the requests it is about.
    drafts: of either kind.
    kind: 'exact', 'law' or 'estimate', see `replay`.
    is_recorded: the texts were drawn at the temperature asked for.
    log_tilt_P: log of the token's probability at the temperature asked for
      over that at which it was drawn; zeros but for an estimate.
  """

  trace: trace_file.TraceFile
  drafts: ByLaw | ByLookup
  kind: str
  is_recorded: bool
  log_tilt_P: np.ndarray


def acceptance(
  trace: trace_file.TraceFile,
  verify: str,
  temperature: float | None,
  num_draft_tokens: int,
) -> Acceptance:
  """Reads the acceptance of every token off a trace.

  Requests that were recorded at the temperature are enough where there are
  some; else those of higher temperatures, whose texts hold what is likely here;
  else what is left but temperature 0.

  Raises:
    ValueError: the trace does not have what is asked for.
  """
  trace, is_recorded = _at_temperature(trace, temperature)
  if not len(trace['token']):
    raise ValueError('a replay needs a trace with tokens, got none.')
  heat_R = trace['temperature']
  if not is_recorded:
    heat_R = np.full(trace.num_requests, temperature, np.float32)
  is_hot_R = heat_R == 0  # Laws are one-hot.
  if verify == 'greedy' and not np.all(is_hot_R):
    raise ValueError('--verify=greedy needs temperature 0.')
  tilt_P = np.zeros(len(trace['token']))
  p = q = None
  if not is_recorded:
    p, q = laws(trace, heat_R)
    place = _place(trace)
    log_p_P = _at(p, place)
    num_rest = trace.about['vocab_size'] - trace['law_id'].shape[1]
    is_rest_P = place == trace['law_id'].shape[1]
    tilt_P = log_p_P - is_rest_P * np.log(max(num_rest, 1)) - trace['chosen_p']
  num_unseen = 0.0
  if is_recorded and verify == 'coupled':
    num_unseen = _num_unseen(trace)
  is_certain = bool(np.all(is_hot_R)) or (
    is_recorded
    and verify == trace.about['verify'] == 'coupled'
    and num_unseen <= _MOST_UNSEEN
  )
  kind = 'exact' if is_certain else 'law'
  if not is_certain and num_unseen > _MOST_UNSEEN_SHARE * len(trace['token']):
    kind = 'estimate'
  if trace.about['config'].get('proposer') == 'ngram':
    drafts = _look_up(trace, num_draft_tokens)
  elif is_recorded:
    drafts = ByLaw(_recorded_ratio(trace, verify, is_certain))
  elif verify == 'coupled':
    drafts = ByLaw(_coupled(p, q, place))
  else:
    with np.errstate(invalid='ignore'):
      drafts = ByLaw(np.nan_to_num(_at(q, place) - log_p_P, nan=-np.inf))
  kind = kind if is_recorded else 'estimate'
  return Acceptance(trace, drafts, kind, is_recorded, tilt_P)


def _at_temperature(
  trace: trace_file.TraceFile, temperature: float | None
) -> tuple[trace_file.TraceFile, bool]:
  """The requests that tell of a temperature; whether they were drawn at it."""
  recorded_R = trace['temperature']
  if temperature is None:
    return trace, True
  for is_one_R in (
    recorded_R == np.float32(temperature),
    recorded_R > temperature,
    recorded_R > 0,
  ):
    if np.any(is_one_R):
      found = trace.select(is_one_R)
      return found, bool(found['temperature'][0] == np.float32(temperature))
  raise ValueError(
    'a trace of temperature 0 has one text per prompt and says nothing of '
    f'other temperatures, got --temperatures={temperature:g}.'
  )


def _place(trace: trace_file.TraceFile) -> np.ndarray:
  """Where each token is among the recorded ids; M if it is not, int [P]."""
  is_token = trace['law_id'] == trace['token'][:, None]
  return np.where(
    np.any(is_token, axis=1), np.argmax(is_token, axis=1), is_token.shape[1]
  )


def _recorded_ratio(
  trace: trace_file.TraceFile, verify: str, is_certain: bool
) -> np.ndarray:
  """log(q / p) of the tokens with the settings of the run, [P]."""
  chosen_p, chosen_q = trace['chosen_p'], trace['chosen_q']
  is_hot = np.repeat(trace['temperature'] == 0, trace['num_tokens'])
  # At temperature 0 the laws are one-hot: q is 1 or 0 at the token.
  is_equal = np.where(chosen_q > -1e-3, 0.0, -np.inf)
  if np.all(is_hot):
    return is_equal
  if verify != 'coupled':
    return np.where(is_hot, is_equal, chosen_q - chosen_p)
  p, q = laws(trace, trace['temperature'])
  own = _race(trace, q) if is_certain else _coupled(p, q, _place(trace))
  return np.where(is_hot, is_equal, own)


def _look_up(trace: trace_file.TraceFile, num_draft_tokens: int) -> ByLookup:
  """What prompt lookup drafts behind every position, made again."""
  config = trace.about['config']
  proposer = NGram(
    num_draft_tokens=num_draft_tokens,
    min_ngram=config['ngram_min'],
    max_ngram=config['ngram_max'],
  )
  num_P = trace['num_tokens']
  size = int(np.max(trace['prompt_length'] + num_P, initial=1))
  drafts, counts = [], []
  text_RL = np.zeros((trace.num_requests, size + num_draft_tokens), np.int32)
  for row, (at, length, begin, num) in enumerate(
    zip(trace.prompt_begin, trace['prompt_length'], trace.begin, num_P)
  ):
    text_RL[row, :length] = trace['prompt_token'][at : at + length]
    text_RL[row, length : length + num] = trace['token'][begin : begin + num]
  row_P = np.repeat(np.arange(trace.num_requests), num_P)
  length_P = np.arange(len(row_P)) - np.repeat(
    trace.begin - trace['prompt_length'], num_P
  )
  for start in range(0, len(row_P), _ROWS):
    at = np.minimum(np.arange(start, start + _ROWS), len(row_P) - 1)
    draft, count = _propose(
      proposer, text_RL[row_P[at]], length_P[at].astype(np.int32)
    )
    drafts.append(np.asarray(draft))
    counts.append(np.asarray(count))
  draft_PK = np.concatenate(drafts)[: len(row_P)]
  index_PK = length_P[:, None] + np.arange(num_draft_tokens)
  is_there_PK = index_PK < (trace['prompt_length'] + num_P)[row_P][:, None]
  return ByLookup(
    is_there_PK & (draft_PK == text_RL[row_P[:, None], index_PK]),
    np.concatenate(counts)[: len(row_P)],
  )


@functools.partial(jax.jit, static_argnames='proposer')
def _propose(proposer: NGram, tokens_BL, length_B):
  state = proposer.stop.init(tokens_BL.shape[0])
  proposal, _ = proposer.propose(
    {}, None, state, None, tokens_BL, length_B, None
  )
  return proposal.draft_BK, proposal.num_draft_B


def laws(
  trace: trace_file.TraceFile, temperature_R: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Both log-laws at other temperatures, [P, M + 1]; the last is the tail.

  The ids that were not recorded share their tail alike. At temperature 0 the
  laws are one-hot.

  Raises:
    ValueError: a request had filters, penalties or biases, whose laws are not
      those of the models alone.
  """
  for row, options in enumerate(trace.about['options']):
    for name, off in _OFF.items():
      if name in options and options[name] != off:
        raise ValueError(
          'another temperature, and coupled verification, need requests '
          f'without filters, penalties and biases, got {name} = '
          f'{options[name]} in request {row}.'
        )
  heat = np.repeat(temperature_R, trace['num_tokens'])[:, None]
  num_rest = trace.about['vocab_size'] - trace['law_id'].shape[1]
  found = []
  for name in 'pq':
    # A law that is not there is NaN, and stays so.
    with np.errstate(divide='ignore', invalid='ignore'):
      tail = np.log(trace[f'tail_{name}'] / max(num_rest, 1))[:, None]
      law = np.concatenate([trace[f'law_{name}'], tail], axis=1)
      law = law.astype(np.float64)
      hot = np.where(law == law.max(axis=1, keepdims=True), 0.0, -np.inf)
      # Of equal ids the lowest is the arg-max; ids are not sorted here, so two
      # equal largest ones would be both kept: only the first is.
      hot[np.cumsum(hot == 0, axis=1) > 1] = -np.inf
      hot[np.isnan(law)] = np.nan
      law = law / np.where(heat > 0, heat, 1.0)
      law[:, -1] += np.log(num_rest) if num_rest else -np.inf
      law -= np.logaddexp.reduce(law, axis=1, keepdims=True)
    found.append(np.where(heat > 0, law, hot))
  return found[0], found[1]


def _at(law: np.ndarray, place: np.ndarray) -> np.ndarray:
  return np.take_along_axis(law, place[:, None], axis=1)[:, 0]


def _coupled(p: np.ndarray, q: np.ndarray, place: np.ndarray) -> np.ndarray:
  """log P(the draft's race is won by the token | the target's is), [P].

  1 / sum_i max(p_i, q_i p_j / q_j); Daliri et al., arXiv:2408.07978.
  """
  p_token, q_token = _at(p, place)[:, None], _at(q, place)[:, None]
  with np.errstate(invalid='ignore'):
    other = q + p_token - q_token
  other = np.where(np.isnan(other), -np.inf, other)
  total = np.logaddexp.reduce(np.maximum(p, other), axis=1)
  return np.where(q_token[:, 0] > -np.inf, np.minimum(-total, 0.0), -np.inf)


def _num_unseen(trace: trace_file.TraceFile) -> float:
  """How many drafts at most are, on average, of ids that were not recorded.

  An id that is not among those with the largest max(p, q) has no more than the
  least of these, and above temperature 0 the ids that are not recorded weigh
  most if their tail is shared alike, from temperature 1 on, or by as few as
  that allows, below it.
  """
  if np.all(np.isnan(trace['law_q'])):
    return 0.0  # What prompt lookup drafts is made again.
  _, q = laws(trace, trace['temperature'])
  heat_P = np.repeat(trace['temperature'], trace['num_tokens'])
  heat_P = heat_P.astype(np.float64)
  with np.errstate(divide='ignore', invalid='ignore'):
    log_tail_P = np.log(trace['tail_q'].astype(np.float64))
    log_best_P = np.minimum(
      log_tail_P, np.maximum(trace['law_p'], trace['law_q']).min(axis=1)
    )
    few_P = log_tail_P + (1 / np.maximum(heat_P, 1e-9) - 1) * log_best_P
    log_q_PM = trace['law_q'] / np.maximum(heat_P, 1e-9)[:, None]
    seen_P = np.logaddexp.reduce(log_q_PM.astype(np.float64), axis=1)
    few_P = np.exp(few_P - np.logaddexp(few_P, seen_P))
  # Without a tail `few_P` is no number at temperature 1, and not asked for.
  unseen_P = np.where(heat_P >= 1, np.exp(q[:, -1]), few_P)
  # At temperature 0 the trace says of every token whether it is the draft.
  return float(np.sum(unseen_P[heat_P > 0]))


def _race(trace: trace_file.TraceFile, q: np.ndarray) -> np.ndarray:
  """0 where the draft's own draw is the token, -inf where not, [P].

  With the noise of the run, at the recorded ids: others hardly ever win, see
  `_num_unseen`.
  """
  size = trace.about['vocab_size']
  draw = jax.jit(
    jax.vmap(
      lambda seed, position: noise_lib.gumbel(
        noise_lib.token_key(seed, position), size
      )
    )
  )
  seed = np.repeat(trace['seed'], trace['num_tokens'])
  position = np.repeat(
    trace['prompt_length'] - trace.begin, trace['num_tokens']
  ) + np.arange(len(seed))
  best = []
  for start in range(0, len(seed), 64):
    rows = slice(start, start + 64)
    noise = draw(
      jnp.asarray(seed[rows]), jnp.asarray(position[rows], jnp.int32)
    )
    noise = np.take_along_axis(np.asarray(noise), trace['law_id'][rows], axis=1)
    best.append(np.argmax(q[rows, :-1] + noise, axis=1))
  best = np.concatenate(best) if best else np.zeros(0, int)
  own = np.take_along_axis(trace['law_id'], best[:, None], axis=1)[:, 0]
  return np.where(own == trace['token'], 0.0, -np.inf)


def alpha_tv(
  trace: trace_file.TraceFile, temperature: float | None
) -> tuple[float, float] | None:
  """Mean of sum min(p, q), at least and at most; None with filters."""
  heat = trace['temperature']
  if temperature is not None:
    heat = np.full_like(heat, temperature)
  if np.all(np.isnan(trace['law_q'])):
    return None
  try:
    p, q = laws(trace, heat)
  except ValueError:
    return None
  if not len(p):
    return None
  overlap = np.exp(np.minimum(p, q))
  return float(overlap[:, :-1].sum(1).mean()), float(overlap.sum(1).mean())

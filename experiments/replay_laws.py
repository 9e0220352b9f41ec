"""What a trace says of each token's acceptance, by rule and temperature."""

import dataclasses
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import trace_file
from specjax import noise as noise_lib
from specjax.sampling import SamplingOptions

RULES = ('greedy', 'rejection', 'coupled', 'block')
# Settings that change no law, as a trace's JSON has them; not the temperature.
_OFF = json.loads(json.dumps(dataclasses.asdict(SamplingOptions())))
del _OFF['temperature']


class Ratios(NamedTuple):
  """log(q / p) of the token at each position.

  Attributes:
    log_ratio_SP: [S, P]: S = 1 where all is known; 0 and -inf for rules that
      decide by equality.
    kind: 'exact', 'law' or 'estimate', see `replay`.
  """

  log_ratio_SP: np.ndarray
  kind: str


def log_ratios(
  trace: trace_file.TraceFile,
  verify: str,
  temperature: float | None,
  rng: np.random.Generator,
  samples: int,
) -> Ratios:
  """Which tokens would have been accepted, and how probably."""
  recorded = trace['temperature']
  is_recorded = temperature is None or bool(
    np.all(np.float32(temperature) == recorded)
  )
  is_greedy = bool(np.all(recorded == 0))
  if verify == 'greedy' and not (
    is_greedy if is_recorded else temperature == 0
  ):
    raise ValueError('--verify=greedy needs temperature 0.')
  repeat = lambda log_ratio_P: np.tile(log_ratio_P, (samples, 1))
  chosen_p, chosen_q = trace['chosen_p'], trace['chosen_q']
  if not is_recorded:
    p, q = laws(trace, np.full(trace.num_requests, temperature))
    return Ratios(_estimate(p, q, verify, rng, samples), 'estimate')
  # At temperature 0 the laws are one-hot: q is 1 or 0 at the token.
  is_equal = np.where(chosen_q > -1e-3, 0.0, -np.inf)
  if is_greedy:
    return Ratios(is_equal[None], 'exact')
  is_hot = np.repeat(recorded, trace['num_tokens']) == 0
  if verify != 'coupled':
    return Ratios(
      repeat(np.where(is_hot, is_equal, chosen_q - chosen_p)), 'law'
    )
  p, q = laws(trace, recorded)
  if trace.about['verify'] == 'coupled':
    own = _race(trace, q)
    return Ratios(np.where(is_hot, is_equal, own)[None], 'exact')
  token = trace['token'][:, None]
  place = np.where(
    np.any(trace['law_id'] == token, axis=1),
    np.argmax(trace['law_id'] == token, axis=1),
    trace['law_id'].shape[1],
  )
  return Ratios(
    repeat(np.where(is_hot, is_equal, _coupled(p, q, place))), 'law'
  )


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
    with np.errstate(divide='ignore', invalid='ignore'):
      tail = np.log(trace[f'tail_{name}'] / max(num_rest, 1))[:, None]
      law = np.concatenate([trace[f'law_{name}'], tail], axis=1)
      law = law.astype(np.float64)
      hot = np.where(law == law.max(axis=1, keepdims=True), 0.0, -np.inf)
      # Of equal ids the lowest is the arg-max; ids are not sorted here, so two
      # equal largest ones would be both kept: only the first is.
      hot[np.cumsum(hot == 0, axis=1) > 1] = -np.inf
      law = law / np.where(heat > 0, heat, 1.0)
      law[:, -1] += np.log(num_rest) if num_rest else -np.inf
      law -= np.logaddexp.reduce(law, axis=1, keepdims=True)
    found.append(np.where(heat > 0, law, hot))
  return found[0], found[1]


def _estimate(
  p: np.ndarray,
  q: np.ndarray,
  verify: str,
  rng: np.random.Generator,
  samples: int,
) -> np.ndarray:
  """log(q / p) of tokens drawn from p at every position, [S, P]."""
  cumulated = np.cumsum(np.exp(p), axis=1)
  found = []
  for _ in range(samples):
    u = rng.random((len(p), 1)) * cumulated[:, -1:]
    place = np.sum(cumulated <= u, axis=1)
    found.append(
      _coupled(p, q, place)
      if verify == 'coupled'
      else (_at(q, place) - _at(p, place))
    )
  return np.stack(found)


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


def _race(trace: trace_file.TraceFile, q: np.ndarray) -> np.ndarray:
  """0 where the draft's own draw is the token, -inf where not, [P].

  With the noise of the run, at the recorded ids; an id beyond them could win
  with a chance of about its tail.
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
  try:
    p, q = laws(trace, heat)
  except ValueError:
    return None
  if not len(p):
    return None
  overlap = np.exp(np.minimum(p, q))
  return float(overlap[:, :-1].sum(1).mean()), float(overlap.sum(1).mean())

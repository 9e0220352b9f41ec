"""Sampling settings, the transform from logits to a law, and the draw.

Everything the decoder draws from passes through `transform`, target rows and
draft rows alike. Nothing here knows about speculation.

The vocabulary is never sorted: top-k and top-p are thresholds, found by
bisection on the bit pattern of the float32 weights.
"""

import dataclasses
from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import ranking
from specjax.noise import gumbel, is_number
from specjax.shapes import Array, Key

TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
  """One request's settings, on the host, checked when made.

  Attributes:
    temperature: 0 is greedy; so is a number below float32's least normal one.
    top_k: keep the k most likely ids (value descending, id ascending); 0 off.
    top_p: keep the fewest most likely ids with this much mass; 1 off.
    min_p: keep ids at least this fraction as likely as the best; 0 off.
    repetition_penalty: divides positive and multiplies negative logits
      of ids in prompt or output; 1 off.
    presence_penalty: subtracted once from ids in the output; 0 off.
    frequency_penalty: subtracted per occurrence in the output; 0 off.
    logit_bias: pairs of an id and what is added to its logit, in nats.
    banned_ids: ids that are never emitted.
    allowed_ids: the only ids that may be emitted; None allows all.

  Raises:
    ValueError: naming the setting, the rule and the value.

  >>> SamplingOptions(temperature=-0.5)
  Traceback (most recent call last):
  ...
  ValueError: temperature must be in [0, 1e6], got -0.5.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  logit_bias: tuple[tuple[int, float], ...] = ()
  banned_ids: tuple[int, ...] = ()
  allowed_ids: tuple[int, ...] | None = None

  def __post_init__(self):
    def check(name: str, rule: str, ok: Callable[[float], bool]):
      value = getattr(self, name)
      if not (is_number(value) and ok(value)):  # No rule holds for a NaN.
        raise ValueError(f'{name} must be {rule}, got {value!r}.')

    check('temperature', 'in [0, 1e6]', lambda x: 0 <= x <= 1e6)
    check(
      'top_k',
      f'a whole number in 0..{2**31 - 1}',
      lambda x: 0 <= x < 2**31 and int(x) == x,
    )
    check('top_p', 'in (0, 1]', lambda x: 0 < x <= 1)
    check('min_p', 'in [0, 1]', lambda x: 0 <= x <= 1)
    # Bounds far from where float32 would turn a law into NaN.
    check('repetition_penalty', 'in [1e-6, 1e6]', lambda x: 1e-6 <= x <= 1e6)
    check('presence_penalty', 'in [-1e6, 1e6]', lambda x: abs(x) <= 1e6)
    check('frequency_penalty', 'in [-1e6, 1e6]', lambda x: abs(x) <= 1e6)
    for token, bias in self.logit_bias:
      if not (is_number(bias) and abs(bias) <= 1e9):
        raise ValueError(
          f'logit_bias of id {token} must be in [-1e9, 1e9], got {bias}.'
        )
    if self.allowed_ids is not None:
      if not set(self.allowed_ids) - set(self.banned_ids):
        raise ValueError(
          'allowed_ids must leave at least one id that is not banned, '
          f'got {sorted(self.allowed_ids)}.'
        )

  @property
  def is_greedy(self) -> bool:
    """The host's side of `is_greedy` below: the same threshold."""
    return self.temperature < TINY


@flax.struct.dataclass
class Sampling:
  """The settings of a batch, all traced: rows need not agree.

  Attributes:
    temperature_B: float32 [B], 0 = greedy.
    top_k_B: int32 [B], 0 = off.
    top_p_B: float32 [B], 1 = off.
    min_p_B: float32 [B], 0 = off.
    repetition_penalty_B: float32 [B], or None when no row has any penalty.
    presence_penalty_B: float32 [B], or None likewise.
    frequency_penalty_B: float32 [B], or None likewise.
    logit_bias_BV: float32 [B, V], -inf bans an id; None when no row has any.
  """

  temperature_B: Array
  top_k_B: Array
  top_p_B: Array
  min_p_B: Array
  repetition_penalty_B: Array | None = None
  presence_penalty_B: Array | None = None
  frequency_penalty_B: Array | None = None
  logit_bias_BV: Array | None = None

  @property
  def has_penalties(self) -> bool:
    """Whether any row has a penalty: then all three arrays are there."""
    return self.repetition_penalty_B is not None


def stack_options(
  options: Sequence[SamplingOptions],
  vocab_size: int,
  among: Sequence[SamplingOptions] | None = None,
) -> Sampling:
  """The settings of a batch from those of its rows.

  Args:
    options: one per row.
    vocab_size: V, the number of true ids.
    among: settings of all rows to come, so that batches of one run have the
      same optional parts and share a compilation; None: these rows alone.

  Raises:
    ValueError: an id outside the vocabulary, or every id banned.

  >>> stack_options([SamplingOptions(top_k=3)], 10).top_k_B
  Array([3], dtype=int32)
  """

  def column(name: str, dtype) -> Array:
    return jnp.asarray([getattr(o, name) for o in options], dtype)

  among = options if among is None else among
  penalties = {}
  names = ('repetition_penalty', 'presence_penalty', 'frequency_penalty')
  if any((1, 0, 0) != tuple(getattr(o, n) for n in names) for o in among):
    penalties = {f'{n}_B': column(n, jnp.float32) for n in names}
  bias_BV = None
  if any(o.logit_bias or o.banned_ids or o.allowed_ids for o in among):
    bias_BV = jnp.asarray(
      np.stack([_dense_bias(o, vocab_size) for o in options])
    )
  return Sampling(
    temperature_B=column('temperature', jnp.float32),
    top_k_B=column('top_k', jnp.int32),
    top_p_B=column('top_p', jnp.float32),
    min_p_B=column('min_p', jnp.float32),
    logit_bias_BV=bias_BV,
    **penalties,
  )


def _dense_bias(options: SamplingOptions, vocab_size: int) -> np.ndarray:
  named = {
    'logit_bias': [token for token, _ in options.logit_bias],
    'banned_ids': options.banned_ids,
    'allowed_ids': options.allowed_ids or (),
  }
  for name, ids in named.items():
    for token in ids:
      if not 0 <= token < vocab_size:
        raise ValueError(
          f'{name} must name ids in 0..{vocab_size - 1}, got {token}.'
        )
  bias_V = np.zeros(vocab_size, np.float32)
  for token, bias in options.logit_bias:
    bias_V[token] += bias
  if options.allowed_ids is not None:
    is_allowed_V = np.zeros(vocab_size, bool)
    is_allowed_V[list(options.allowed_ids)] = True
    bias_V[~is_allowed_V] = -np.inf
  bias_V[list(options.banned_ids)] = -np.inf
  if not np.any(bias_V > -np.inf):
    raise ValueError(
      f'banned_ids must leave at least one of the {vocab_size} ids.'
    )
  return bias_V


def draw(log_weights_BV: Array, key_B: Key, sampling: Sampling) -> Array:
  """Draws one id per row from softmax(log_weights), int32 [B].

  Ties go to the lowest id. A batch without a sampled row makes no noise.
  """

  def noisy(log_weights_BV):
    noise_BV = jax.vmap(lambda k: gumbel(k, log_weights_BV.shape[-1]))(key_B)
    return ranking.best(log_weights_BV + noise_BV)

  def greedy(log_weights_BV):
    return ranking.best(log_weights_BV)

  return jax.lax.cond(any_sampled(sampling), noisy, greedy, log_weights_BV)


@flax.struct.dataclass
class Counts:
  """How often each id stands before each of T rows.

  Attributes:
    seen_BTV: int32, in the prompt and in what was generated.
    generated_BTV: int32, in what was generated alone.
  """

  seen_BTV: Array
  generated_BTV: Array


def count_committed(
  tokens_BL: Array, length_B: Array, prompt_length_B: Array, vocab_size: int
) -> Counts:
  """Counts of the committed tokens, T = 1.

  Args:
    tokens_BL: int32 [B, L]; ids outside the vocabulary count for nothing.
    length_B: int32 [B], what lies at or beyond it is not read.
    prompt_length_B: int32 [B], where the generated text begins.
    vocab_size: V.
  """
  index_1L = jnp.arange(tokens_BL.shape[1], dtype=jnp.int32)[None, :]
  is_seen_BL = index_1L < length_B[:, None]
  is_generated_BL = is_seen_BL & (index_1L >= prompt_length_B[:, None])
  return Counts(
    seen_BTV=_count(tokens_BL, is_seen_BL, vocab_size)[:, None],
    generated_BTV=_count(tokens_BL, is_generated_BL, vocab_size)[:, None],
  )


def penalty_counts(
  sampling: Sampling,
  tokens_BL: Array,
  length_B: Array,
  prompt_length_B: Array,
  vocab_size: int,
) -> Counts | None:
  """`count_committed` where a row has penalties; None where none has."""
  if not sampling.has_penalties:
    return None
  return count_committed(tokens_BL, length_B, prompt_length_B, vocab_size)


def _count(tokens_BL: Array, is_real_BL: Array, vocab_size: int) -> Array:
  is_real_BL &= (tokens_BL >= 0) & (tokens_BL < vocab_size)
  id_BL = jnp.where(is_real_BL, tokens_BL, vocab_size)
  zero_BV = jnp.zeros((tokens_BL.shape[0], vocab_size), jnp.int32)
  return _add_one(zero_BV, id_BL)


@jax.vmap
def _add_one(counts_BV: Array, id_BL: Array) -> Array:
  """One more of each id, per row; ids beyond the vocabulary are dropped."""
  return counts_BV.at[id_BL].add(1, mode='drop')


def count_drafts(counts: Counts, draft_BK: Array) -> Counts:
  """Counts before each of N = K + 1 rows, given those before row 0.

  Row i has seen the drafts 0..i-1, whether or not they will be accepted: what
  a row sees is a pure function of the tokens before it.
  """
  b, k = draft_BK.shape
  vocab_size = counts.seen_BTV.shape[-1]
  index_1N1 = jnp.arange(k + 1)[None, :, None]
  is_before_1NK = jnp.arange(k)[None, None, :] < index_1N1
  id_BNK = jnp.where(is_before_1NK, draft_BK[:, None, :], vocab_size)

  def extend(counts_B1V: Array) -> Array:
    counts_BNV = jnp.broadcast_to(counts_B1V, (b, k + 1, vocab_size))
    return jax.vmap(_add_one)(counts_BNV, id_BNK)

  return jax.tree.map(extend, counts)


def is_greedy(temperature: Array) -> Array:
  """The one predicate for "temperature 0"; subnormal numbers count as 0.

  Args:
    temperature: float32 [...].

  Returns:
    bool [...].
  """
  return temperature < TINY


def any_sampled(sampling: Sampling) -> Array:
  """Whether any row needs randomness, bool []."""
  return jnp.any(~is_greedy(sampling.temperature_B))


def blank_broken(logits_BTV: Array) -> tuple[Array, Array]:
  """Zeros for laws that are not finite, and which are, bool [B, T].

  So a broken law is nobody's: a rule or a filter that looks at all rows is not
  bent by it. (And on a mesh, what is computed from the laws waits for the
  check, which may not communicate beside a branch.)
  """
  is_finite_BT = jnp.all(jnp.isfinite(logits_BTV), axis=-1)
  return jnp.where(is_finite_BT[:, :, None], logits_BTV, 0.0), is_finite_BT


def transform(
  sampling: Sampling, logits_BTV: Array, counts: Counts | None = None
) -> Array:
  """From the model's logits to the log-weights that are drawn from.

  Order: logit bias and bans; repetition penalty; frequency and presence
  penalties; temperature; top-k; top-p; min-p. Ids rank by value descending,
  then by id ascending, for arg-max, top-k and top-p alike.

  Args:
    sampling: settings of the B rows.
    logits_BTV: float32 [B, T, V] over the true ids.
    counts: [B, T, V] or [B, 1, V]; needed if `sampling` has penalties.

  Returns:
    float32 [B, T, V]: log-weights, not normalised, -inf where an id is out. A
    greedy row is one-hot: 0 at its arg-max.
  """
  x_BTV = logits_BTV.astype(jnp.float32)
  if sampling.logit_bias_BV is not None:
    x_BTV = x_BTV + sampling.logit_bias_BV[:, None, :]
  if sampling.has_penalties:
    x_BTV = _penalise(sampling, x_BTV, counts)
  # The gates stand on the batch: a cond inside vmap would run both sides.
  return jax.lax.cond(
    any_sampled(sampling),
    lambda x_BTV: _filtered(sampling, x_BTV),
    _one_hot_max,
    x_BTV,
  )


def _penalise(sampling: Sampling, x_BTV: Array, counts: Counts) -> Array:
  column = lambda setting_B: setting_B[:, None, None]
  repetition_B11 = column(sampling.repetition_penalty_B)
  scaled_BTV = jnp.where(
    x_BTV > 0, x_BTV / repetition_B11, x_BTV * repetition_B11
  )
  x_BTV = jnp.where(counts.seen_BTV > 0, scaled_BTV, x_BTV)
  generated_BTV = counts.generated_BTV.astype(jnp.float32)
  x_BTV -= column(sampling.frequency_penalty_B) * generated_BTV
  return x_BTV - column(sampling.presence_penalty_B) * (generated_BTV > 0)


def _one_hot_max(x_BTV: Array) -> Array:
  best_BT1 = ranking.best(x_BTV)[..., None]
  id_11V = jnp.arange(x_BTV.shape[-1])[None, None, :]
  return jnp.where(id_11V == best_BT1, 0.0, -jnp.inf)


def _filtered(sampling: Sampling, x_BTV: Array) -> Array:
  column = lambda setting_B: setting_B[:, None, None]
  is_greedy_B11 = column(is_greedy(sampling.temperature_B))
  safe_B11 = jnp.where(is_greedy_B11, 1.0, column(sampling.temperature_B))
  best_BT1 = jnp.max(x_BTV, axis=-1, keepdims=True)
  y_BTV = (x_BTV - best_BT1) / safe_B11
  y_BTV = jax.lax.cond(
    jnp.any(sampling.top_k_B > 0),
    lambda y_BTV: _keep_top_k(y_BTV, column(sampling.top_k_B)),
    lambda y_BTV: y_BTV,
    y_BTV,
  )
  y_BTV = jax.lax.cond(
    jnp.any(sampling.top_p_B < 1),
    lambda y_BTV: _keep_top_p(y_BTV, column(sampling.top_p_B)),
    lambda y_BTV: y_BTV,
    y_BTV,
  )
  # The best id has y = 0 and survives both filters, so min-p is one compare.
  y_BTV = jnp.where(y_BTV >= jnp.log(column(sampling.min_p_B)), y_BTV, -jnp.inf)
  # Of y, not of x: on a mesh nothing may be gathered beside the branches above.
  return jnp.where(is_greedy_B11, _one_hot_max(y_BTV), y_BTV)


def _ordered_bits(x: Array) -> Array:
  """uint32 that sort as the float32 do; -0 counts as 0."""
  bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
  sign = jnp.uint32(1 << 31)
  return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest(holds: Callable[[Array], Array], shape, num_bits: int) -> Array:
  """The largest uint32 for which a falling predicate holds, by bisection."""

  def body(i, found):
    bit = jnp.uint32(1) << (num_bits - 1 - i).astype(jnp.uint32)
    return jnp.where(holds(found | bit), found | bit, found)

  return jax.lax.fori_loop(0, num_bits, body, jnp.zeros(shape, jnp.uint32))


def _keep_top_k(y_BTV: Array, k_B11: Array) -> Array:
  k_B11 = jnp.where(k_B11 > 0, k_B11, y_BTV.shape[-1])
  bits_BTV = _ordered_bits(y_BTV)
  count = lambda t_BT1: jnp.sum(bits_BTV >= t_BT1, axis=-1, keepdims=True)
  edge_BT1 = _largest(
    lambda t_BT1: count(t_BT1) >= k_B11, (*y_BTV.shape[:2], 1), 32
  )
  above_BT1 = jnp.sum(bits_BTV > edge_BT1, axis=-1, keepdims=True)
  return _cut_at(y_BTV, bits_BTV, edge_BT1, k_B11 - above_BT1)


def _keep_top_p(y_BTV: Array, p_B11: Array) -> Array:
  bits_BTV = _ordered_bits(y_BTV)
  weight_BTV = jnp.exp(y_BTV)
  need_BT1 = p_B11 * jnp.sum(weight_BTV, axis=-1, keepdims=True)
  # The best id weighs 1: it is kept even where top_p is 0 in float32.
  need_BT1 = jnp.maximum(need_BT1, TINY)

  def mass(is_in_BTV):
    return jnp.sum(jnp.where(is_in_BTV, weight_BTV, 0), axis=-1, keepdims=True)

  edge_BT1 = _largest(
    lambda t_BT1: mass(bits_BTV >= t_BT1) >= need_BT1, need_BT1.shape, 32
  )
  is_edge_BTV = bits_BTV == edge_BT1
  edge_weight_BT1 = jnp.max(
    jnp.where(is_edge_BTV, weight_BTV, 0), axis=-1, keepdims=True
  )
  missing_BT1 = need_BT1 - mass(bits_BTV > edge_BT1)
  num_edge_BT1 = jnp.ceil(missing_BT1 / jnp.maximum(edge_weight_BT1, TINY))
  num_edge_BT1 = jnp.clip(num_edge_BT1, 1, y_BTV.shape[-1]).astype(jnp.int32)
  kept_BTV = _cut_at(y_BTV, bits_BTV, edge_BT1, num_edge_BT1)
  return jnp.where(p_B11 < 1, kept_BTV, y_BTV)


def _cut_at(
  y_BTV: Array, bits_BTV: Array, edge_BT1: Array, num_edge_BT1: Array
) -> Array:
  """Keeps what is above the edge and the first `num_edge` ids on it."""
  is_edge_BTV = bits_BTV == edge_BT1
  size = y_BTV.shape[-1]
  id_11V = jnp.arange(size, dtype=jnp.uint32)[None, None, :]

  def cut(is_edge_BTV):
    # The largest id before which fewer than num_edge ids lie on the edge.
    def holds(id_BT1):
      before_BT1 = jnp.sum(
        is_edge_BTV & (id_11V < id_BT1), axis=-1, keepdims=True
      )
      return before_BT1 < num_edge_BT1

    last_BT1 = _largest(holds, edge_BT1.shape, max(size.bit_length(), 1))
    return is_edge_BTV & (id_11V <= last_BT1)

  num_tied_BT1 = jnp.sum(is_edge_BTV, axis=-1, keepdims=True)
  is_edge_BTV = jax.lax.cond(
    jnp.any(num_tied_BT1 > num_edge_BT1),
    cut,
    lambda is_edge_BTV: is_edge_BTV,
    is_edge_BTV,
  )
  return jnp.where((bits_BTV > edge_BT1) | is_edge_BTV, y_BTV, -jnp.inf)

"""Rules that decide how much of a drafted chain to keep: pure, unbatched.

A rule sees K drafts, the law each was drawn from, and the target's N = K + 1
laws; it accepts a prefix and names the one token after it. `p` is the target,
`q` the draft (Leviathan et al.). All of them are written on probabilities
that come out of one `transform`, and on noise that is handed in, so that a
test can enumerate their law instead of sampling it.

  rule       accepts draft i with            lossless
  Greedy     draft == arg-max p              the target's greedy tokens
  Rejection  min(1, p/q)                     in law
  Coupled    draft == the target's own draw  the target's sampled tokens
  Block      min(1, h), jointly              in law
"""

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from specjax import noise as noise_lib
from specjax import ranking
from specjax.shapes import Array


class Noise(NamedTuple):
  """The random numbers of one verification.

  Attributes:
    accept_K: float32 [K] in [0, 1), one uniform per draft.
    token_N: N typed keys, or the Gumbel rows float32 [N, V] themselves: the
      target's own draw at each of the N positions.
    residual_N: likewise, for the correction at each position.
  """

  accept_K: Array
  token_N: Array
  residual_N: Array


class Verdict(NamedTuple):
  """What a rule decides.

  Attributes:
    num_accepted: int32 [], 0..num_draft.
    next_token: int32 [], the correction, or the bonus if all were accepted.
    path_M: int32 [M], offsets of the kept tokens in the verified block, the
      pending token first; None for a chain, where they are 0, 1, 2, ...
  """

  num_accepted: Array
  next_token: Array
  path_M: Array | None = None


class Rule(Protocol):
  """A verification rule.

  Attributes:
    name: as on the command line.
    draft_purpose: the noise the drafts must be drawn with. With the wrong one
      the text stays right and acceptance falls.
  """

  name: str
  draft_purpose: int

  def __call__(
    self,
    noise: Noise,
    draft_K: Array,
    draft_log_weights_KV: Array | None,
    num_draft: Array,
    target_log_weights_NV: Array,
  ) -> Verdict:
    """Verifies one row.

    Args:
      noise: this step's random numbers.
      draft_K: int32 [K], the drafts; those at and beyond `num_draft` are not
        there.
      draft_log_weights_KV: float32 [K, V], exactly what each was drawn from;
        None if they were not drawn at all (then q is one-hot on the draft).
      num_draft: int32 [], 0..K.
      target_log_weights_NV: float32 [N, V], after the transform.
    """
    ...


def make_noise(seed: Array, length: Array, num_draft_tokens: int) -> Noise:
  """The noise of one row's step, from its seed and its length.

  Args:
    seed: uint32 [].
    length: int32 [], committed tokens at the start of the step.
    num_draft_tokens: K.
  """
  offset_N = jnp.arange(num_draft_tokens + 1, dtype=jnp.int32)
  accept_key = lambda i: noise_lib.step_key(seed, noise_lib.ACCEPT, length, i)
  return Noise(
    accept_K=jax.vmap(lambda i: jax.random.uniform(accept_key(i)))(
      offset_N[:num_draft_tokens]
    ),
    token_N=noise_lib.draw_keys(
      seed, noise_lib.TOKEN, length, num_draft_tokens + 1
    ),
    residual_N=noise_lib.draw_keys(
      seed, noise_lib.RESIDUAL, length, num_draft_tokens + 1
    ),
  )


def accept_prob(p: Array, q: Array) -> Array:
  """min(1, p / q), and 0 where p is 0.

  Args:
    p: float32 [...], the target's probability of the draft.
    q: float32 [...], that with which it was drawn.

  Returns:
    float32 [...].

  Source: Leviathan et al., arXiv:2211.17192, Algorithm 1. Deviation: where q is
    0 (a draft that q cannot have drawn) it is 1 unless p is 0.

  >>> accept_prob(jnp.array([0.3, 0.0, 0.5]), jnp.array([0.6, 1.0, 0.2]))
  Array([0.5, 0. , 1. ], dtype=float32)
  """
  return jnp.where(p < q, p / jnp.where(q > 0, q, 1.0), p > 0).astype(p.dtype)


def residual(p_V: Array, q_V: Array) -> Array:
  """Distribution to draw from once a draft token has been rejected.

  `max(p - q, 0)`, normalised; `p` itself where that is zero everywhere.

  Args:
    p_V: float32 [V], target probabilities after the transform. The block rule
      passes p scaled by its weight.
    q_V: float32 [V], the probabilities the draft was really drawn from.

  Returns:
    float32 [V], sums to 1.

  Lossless in law, with acceptance probability min(1, p/q).
  Source: Leviathan et al., arXiv:2211.17192, Algorithm 1. Deviation: p == q,
  where a rejection has probability zero, falls back to p.

  >>> residual(jnp.array([0.6, 0.4]), jnp.array([0.9, 0.1]))
  Array([0., 1.], dtype=float32)
  """
  excess_V = jnp.maximum(p_V - q_V, 0.0)
  excess_V = jnp.where(jnp.sum(excess_V) > 0, excess_V, p_V)
  return excess_V / jnp.sum(excess_V)


def draft_probs(
  draft_K: Array, draft_log_weights_KV: Array | None, vocab_size: int
) -> Array:
  """q as float32 [K, V]: the normalised law, or one-hot on the draft."""
  if draft_log_weights_KV is None:
    return jax.nn.one_hot(draft_K, vocab_size)
  return jax.nn.softmax(draft_log_weights_KV, axis=-1)


def block_accept_prob(
  p_NV: Array, q_KV: Array, draft_K: Array, num_draft: Array
) -> tuple[Array, Array]:
  """The probabilities h and the weights w of block verification.

    w_0 = 1,  w_i = min(1, w_{i-1} p(X_i) / q(X_i))
    S_i = sum_x max(w_i p(x | X_<=i) - q(x | X_<=i), 0)
    h_i = S_i / (S_i + 1 - w_i),  h_num_draft = w_num_draft

  With the q row at `num_draft` taken as zero, S = w there and the general
  formula gives h = w by itself: a short or an empty draft is no special case.

  Args:
    p_NV: float32 [N, V], the target's laws.
    q_KV: float32 [K, V], what the drafts were drawn from.
    draft_K: int32 [K].
    num_draft: int32 [], 0..K; drafts at and beyond it are not there.

  Returns:
    h_N and w_N, float32 [N], index i = 0..K; h_0 is 1 (nothing is accepted).
    Entries beyond `num_draft` mean nothing.
  """
  k = draft_K.shape[0]
  index_K = jnp.arange(k)
  p_draft_K = p_NV[index_K, draft_K]
  q_draft_K = q_KV[index_K, draft_K]

  def weigh(w, pq):
    p, q = pq
    w = jnp.minimum(1.0, w * p / jnp.where(q > 0, q, 1.0))
    return w, w

  w_K = jax.lax.scan(weigh, jnp.float32(1), (p_draft_K, q_draft_K))[1]
  w_N = jnp.concatenate([jnp.ones(1), w_K])
  q_NV = jnp.concatenate([q_KV, jnp.zeros_like(p_NV[:1])])
  is_drafted_N1 = (jnp.arange(k + 1) < num_draft)[:, None]
  q_NV = jnp.where(is_drafted_N1, q_NV, 0.0)
  s_N = jnp.sum(jnp.maximum(w_N[:, None] * p_NV - q_NV, 0.0), axis=-1)
  room_N = s_N + 1.0 - w_N
  h_N = jnp.where(room_N > 0, s_N / jnp.where(room_N > 0, room_N, 1.0), 1.0)
  # With p == q behind a full weight both are rounding errors; h is free there.
  return h_N.at[0].set(1.0), w_N


def draw_token(log_weights_V: Array, noise_N: Array, index: Array) -> Array:
  """Draws from softmax(log_weights) with the noise at `index`.

  Args:
    log_weights_V: float32 [V], -inf where an id is out; not all of them.
    noise_N: N typed keys, or Gumbel rows float32 [N, V], as in `Noise`.
    index: int32 [], which of the N.

  Returns:
    int32 [].
  """
  noise = noise_N[index]
  if jnp.issubdtype(noise_N.dtype, jax.dtypes.prng_key):
    noise = noise_lib.gumbel(noise, log_weights_V.shape[0])
  return ranking.best(log_weights_V + noise)


def _leading(accepted_K: Array) -> Array:
  """How many lead before the first False, int32 []."""
  return jnp.sum(jnp.cumprod(accepted_K.astype(jnp.int32)), dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class Greedy:
  """Accepts a draft iff it is the target's arg-max; uses no noise.

  Lossless for temperature 0: exactly the target's greedy tokens. A row with a
  temperature above 0 must not come here.
  Source: Stern et al., arXiv:1811.03115, section 3 (exact match).
  """

  name = 'greedy'
  draft_purpose = noise_lib.TOKEN

  def __call__(
    self,
    noise: Noise,
    draft_K: Array,
    draft_log_weights_KV: Array | None,
    num_draft: Array,
    target_log_weights_NV: Array,
  ) -> Verdict:
    """The drafts that lead equal to the arg-max, and the next arg-max."""
    del noise, draft_log_weights_KV
    best_N = ranking.best(target_log_weights_NV)
    return _accept_equal(best_N, draft_K, num_draft)


@dataclasses.dataclass(frozen=True)
class Rejection:
  """Speculative sampling, token by token.

  Accept draft x with probability min(1, p(x) / q(x)); at the first rejection
  draw from norm(max(p - q, 0)); after the last draft draw a bonus from p. A
  draft that was not drawn (q one-hot) is accepted with p(x), and its residual
  is p without x.

  Lossless in law: the emitted tokens have the transformed target's law. The
  number of drafts may change the text of a seed, never its law.
  Source: Leviathan et al., arXiv:2211.17192, Algorithm 1; Chen et al.,
  arXiv:2302.01318, Algorithm 2 (whose q is our p).
  """

  name = 'rejection'
  draft_purpose = noise_lib.DRAFT

  def __call__(
    self,
    noise: Noise,
    draft_K: Array,
    draft_log_weights_KV: Array | None,
    num_draft: Array,
    target_log_weights_NV: Array,
  ) -> Verdict:
    """The drafts that lead accepted, then correction or bonus."""
    p_NV = jax.nn.softmax(target_log_weights_NV, axis=-1)
    q_KV = draft_probs(draft_K, draft_log_weights_KV, p_NV.shape[-1])
    index_K = jnp.arange(draft_K.shape[0])
    a_K = accept_prob(p_NV[index_K, draft_K], q_KV[index_K, draft_K])
    # Strictly less: a uniform can be 0, and p(x) = 0 must never be accepted.
    num_accepted = _leading((noise.accept_K < a_K) & (index_K < num_draft))
    return _correct(
      noise, num_accepted, num_draft, p_NV, q_KV, target_log_weights_NV
    )


@dataclasses.dataclass(frozen=True)
class Coupled:
  """The target draws its own tokens; a draft is accepted iff it is the draw.

  Both models use the same Gumbel noise at the same absolute position, so a
  good draft often draws the same token, with probability at least
  (1 - TV) / (1 + TV). The output does not depend on the draft at all.

  Lossless, and more: with a given seed these are the tokens of plain sampling,
  whatever the proposer and the number of drafts.
  Source: Daliri et al., arXiv:2408.07978, Algorithm 1 (Gumbel sampling).
  """

  name = 'coupled'
  draft_purpose = noise_lib.TOKEN

  def __call__(
    self,
    noise: Noise,
    draft_K: Array,
    draft_log_weights_KV: Array | None,
    num_draft: Array,
    target_log_weights_NV: Array,
  ) -> Verdict:
    """The drafts that lead equal to the target's draws, and its next draw."""
    del draft_log_weights_KV
    noise_NV = noise.token_N
    if jnp.issubdtype(noise_NV.dtype, jax.dtypes.prng_key):
      vocab_size = target_log_weights_NV.shape[-1]
      noise_NV = jax.vmap(lambda key: noise_lib.gumbel(key, vocab_size))(
        noise_NV
      )
    own_N = ranking.best(target_log_weights_NV + noise_NV)
    return _accept_equal(own_N, draft_K, num_draft)


@dataclasses.dataclass(frozen=True)
class Block:
  """Block verification: the drafts are judged together, not one by one.

  Every length i is tried with its own uniform, u_i < h_i, and the longest that
  passes is kept; the correction comes from norm(max(w_i p - q, 0)). No valid
  rule that uses on-path probabilities alone accepts more in expectation.

  Lossless in law. For one-hot drafts and at temperature 0 it equals
  `Rejection` in law and gains nothing.
  Source: Sun et al., arXiv:2403.10444, Algorithm 2 (M_b is our p, M_s our q).
  """

  name = 'block'
  draft_purpose = noise_lib.DRAFT

  def __call__(
    self,
    noise: Noise,
    draft_K: Array,
    draft_log_weights_KV: Array | None,
    num_draft: Array,
    target_log_weights_NV: Array,
  ) -> Verdict:
    """The longest length that passes, then correction or bonus."""
    p_NV = jax.nn.softmax(target_log_weights_NV, axis=-1)
    q_KV = draft_probs(draft_K, draft_log_weights_KV, p_NV.shape[-1])
    h_N, w_N = block_accept_prob(p_NV, q_KV, draft_K, num_draft)
    length_K = jnp.arange(1, draft_K.shape[0] + 1, dtype=jnp.int32)
    passes_K = (noise.accept_K < h_N[1:]) & (length_K <= num_draft)
    num_accepted = jnp.max(jnp.where(passes_K, length_K, 0), initial=0)
    return _correct(
      noise,
      num_accepted,
      num_draft,
      w_N[:, None] * p_NV,
      q_KV,
      target_log_weights_NV,
    )


def _accept_equal(own_N: Array, draft_K: Array, num_draft: Array) -> Verdict:
  """Accepts while the draft equals the target's own token."""
  index_K = jnp.arange(draft_K.shape[0])
  num_accepted = _leading((draft_K == own_N[:-1]) & (index_K < num_draft))
  return Verdict(num_accepted, own_N[num_accepted])


def _correct(
  noise: Noise,
  num_accepted: Array,
  num_draft: Array,
  p_NV: Array,
  q_KV: Array,
  target_log_weights_NV: Array,
) -> Verdict:
  """The bonus from p after the last draft, else a draw from the residual.

  The bonus is drawn as `Coupled` draws it, from the target's own log-weights,
  so that plain decoding has one text per seed whatever the rule.
  """
  is_bonus = num_accepted == num_draft
  q_NV = jnp.concatenate([q_KV, jnp.zeros_like(p_NV[:1])])
  log_residual_V = jnp.log(residual(p_NV[num_accepted], q_NV[num_accepted]))
  log_weights_V = jnp.where(
    is_bonus, target_log_weights_NV[num_accepted], log_residual_V
  )
  noise_N = jnp.where(
    _per_row(is_bonus, noise.token_N), noise.token_N, noise.residual_N
  )
  next_token = draw_token(log_weights_V, noise_N, num_accepted)
  return Verdict(num_accepted, next_token)


def _per_row(flag: Array, rows: Array) -> Array:
  """A scalar flag with the rank of `rows`."""
  return jnp.broadcast_to(flag, rows.shape)


RULES: dict[str, Rule] = {
  rule.name: rule for rule in (Greedy(), Rejection(), Coupled(), Block())
}

"""The exact law of a verification rule, without a sampling error.

Every draft is listed with its probability, and every number of accepted
drafts with the probability that the rule's own helpers give it. The
probabilities of what is emitted must then add up to the target's.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.shapes import Array
from specjax.verify import chain

# An on-path law: the tokens since the step began -> probabilities, V of them.
PathLaw = Callable[[tuple[int, ...]], Sequence[float]]


class RuleLaw(NamedTuple):
  """The exact law of one verification.

  Attributes:
    law: float64 [V] * (K + 1): the joint law of the next K + 1 tokens, where
      those that the rule did not emit are drawn from the target.
    expected_accepted: mean number of accepted drafts.
  """

  law: np.ndarray
  expected_accepted: float


def path_law(
  p: PathLaw, vocab_size: int, num_tokens: int, start: tuple[int, ...] = ()
) -> np.ndarray:
  """The joint law of the tokens drawn one by one from p, [V] * num_tokens.

  `start` is what was drawn before them.

  >>> path_law(lambda path: [0.75, 0.25], 2, 2).tolist()
  [[0.5625, 0.1875], [0.1875, 0.0625]]
  """
  law = np.ones((vocab_size,) * num_tokens)
  for path in np.ndindex(law.shape):
    for i, token in enumerate(path):
      law[path] *= p(start + path[:i])[token]
  return law


def ideal_accepted(
  p: PathLaw, q: PathLaw, vocab_size: int, num_draft_tokens: int
) -> float:
  """The sum over prefixes of min(P, Q): no rule accepts more on average."""
  sums = [
    np.minimum(path_law(p, vocab_size, n), path_law(q, vocab_size, n)).sum()
    for n in range(1, num_draft_tokens + 1)
  ]
  return float(sum(sums))


def rejection_probs(
  p_NV: Array, q_KV: Array, draft_K: Array, num_draft: Array
) -> tuple[Array, Array]:
  """P(num_accepted = i) and the law of the next token then, for `Rejection`.

  Args:
    p_NV: float32 [N, V], the target's laws.
    q_KV: float32 [K, V], what the drafts were drawn from.
    draft_K: int32 [K].
    num_draft: int32 [], 0..K.

  Returns:
    float32 [N] and [N, V]; entries beyond `num_draft` are not reached.
  """
  k = draft_K.shape[0]
  index_K = jnp.arange(k)
  a_K = chain.accept_prob(p_NV[index_K, draft_K], q_KV[index_K, draft_K])
  a_K = jnp.where(index_K < num_draft, a_K, 0.0)
  reach_N = jnp.concatenate([jnp.ones(1), jnp.cumprod(a_K)])
  stay_N = jnp.concatenate([1 - a_K, jnp.ones(1)])
  return reach_N * stay_N, _next_laws(p_NV, q_KV, num_draft)


def block_probs(
  p_NV: Array, q_KV: Array, draft_K: Array, num_draft: Array
) -> tuple[Array, Array]:
  """`rejection_probs` for `Block`: the longest length that passes is kept.

  Args:
    p_NV: float32 [N, V], the target's laws.
    q_KV: float32 [K, V], what the drafts were drawn from.
    draft_K: int32 [K].
    num_draft: int32 [], 0..K.

  Returns:
    float32 [N] and [N, V]; entries beyond `num_draft` are not reached.
  """
  h_N, w_N = chain.block_accept_prob(p_NV, q_KV, draft_K, num_draft)
  h_N = jnp.where(jnp.arange(h_N.shape[0]) <= num_draft, h_N, 0.0)
  fail_N = jnp.concatenate([1 - h_N[1:], jnp.ones(1)])
  none_behind_N = jnp.cumprod(fail_N[::-1])[::-1]
  next_NV = _next_laws(w_N[:, None] * p_NV, q_KV, num_draft)
  return h_N * none_behind_N, next_NV


def _next_laws(p_NV: Array, q_KV: Array, num_draft: Array) -> Array:
  q_NV = jnp.concatenate([q_KV, jnp.zeros_like(p_NV[:1])])
  is_bonus_N1 = (jnp.arange(p_NV.shape[0]) == num_draft)[:, None]
  own_NV = p_NV / jnp.sum(p_NV, axis=-1, keepdims=True)
  return jnp.where(is_bonus_N1, own_NV, jax.vmap(chain.residual)(p_NV, q_NV))


# By the rule's name: what to enumerate it with.
RULE_PROBS = {'rejection': rejection_probs, 'block': block_probs}


@functools.partial(jax.jit, static_argnames='name')
def _rule_probs(name, p_MNV, q_MKV, draft_MK, num_draft):
  each = jax.vmap(RULE_PROBS[name], in_axes=(0, 0, 0, None))
  return each(p_MNV, q_MKV, draft_MK, num_draft)


def enumerate_rule(
  name: str,
  p: PathLaw,
  q: PathLaw,
  vocab_size: int,
  num_draft_tokens: int,
  *,
  is_drawn: bool = True,
) -> RuleLaw:
  """The exact law of one verification of K drafts.

  Args:
    name: 'rejection' or 'block'.
    p: the target.
    q: the draft.
    vocab_size: V.
    num_draft_tokens: K.
    is_drawn: False lets the draft propose the arg-max of q, with a one-hot q.

  >>> bv = enumerate_rule('block', lambda path: [1 / 3, 2 / 3],
  ...                     lambda path: [2 / 3, 1 / 3], 2, 2)
  >>> round(bv.expected_accepted, 4)  # 11/9
  1.2222
  """
  k = num_draft_tokens
  draft_MK = np.asarray(list(np.ndindex((vocab_size,) * k)), np.int64)
  if not is_drawn:
    best = ()
    for _ in range(k):
      best += (int(np.argmax(q(best))),)
    draft_MK = np.asarray([best], np.int64)
  paths = [tuple(int(token) for token in draft) for draft in draft_MK]
  p_MNV = np.asarray([[p(d[:i]) for i in range(k + 1)] for d in paths])
  q_MKV = np.asarray([[q(d[:i]) for i in range(k)] for d in paths])
  q_MKV = q_MKV.reshape(len(paths), k, vocab_size)
  if is_drawn:
    drawn_MK = np.take_along_axis(q_MKV, draft_MK[:, :, None], axis=2)
    prob_M = np.prod(drawn_MK[:, :, 0], axis=1)
  else:
    q_MKV = np.eye(vocab_size)[draft_MK]
    prob_M = np.ones(1)
  accepted_MN, next_MNV = map(
    lambda x: np.asarray(x, np.float64),
    _rule_probs(
      name,
      jnp.asarray(p_MNV, jnp.float32),
      jnp.asarray(q_MKV, jnp.float32),
      jnp.asarray(draft_MK, jnp.int32),
      jnp.int32(k),
    ),
  )
  law = np.zeros((vocab_size,) * (k + 1))
  for path, prob, accepted_N, next_NV in zip(
    paths, prob_M, accepted_MN, next_MNV
  ):
    for i in range(k + 1):
      for token in range(vocab_size):
        start = (*path[:i], token)
        rest = path_law(p, vocab_size, k - i, start)
        law[start] += prob * accepted_N[i] * next_NV[i, token] * rest
  mean_M = accepted_MN @ np.arange(k + 1)
  return RuleLaw(law, float(prob_M @ mean_M))

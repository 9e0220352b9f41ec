"""How far a draft's law q is from the target's p, and cross-entropy.

  forward_kl  KL(p || q) = sum p log(p / q)       covers everything p does
  reverse_kl  KL(q || p) = sum q log(q / p)       seeks the modes of p
  js          (KL(p || m) + KL(q || m)) / 2, m = (p + q) / 2
  tv          sum |p - q| / 2 = 1 - sum min(p, q)

Total variation is one minus the probability that a drawn draft is accepted
(Leviathan et al., arXiv:2211.17192, Theorem 3.5), so it trains what decoding
counts; it says little where p and q hardly overlap, as at the start.
DistillSpec (Zhou et al., arXiv:2310.08461, section 4) compares the four.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.shapes import Array, check_shape

# Logits of one chunk; more are never in memory at once. A loss holds half a
# dozen arrays of so many (both models', softmaxes, gradients), 16 MB each.
_MAX_VALUES = 1 << 22


def _kl(log_p: Array, log_q: Array) -> Array:
  # Where p is 0 its logarithm may be -inf: 0 x inf must not come up.
  p = jnp.exp(log_p)
  difference = jnp.where(p > 0, log_p - log_q, 0.0)
  return jnp.sum(p * difference, axis=-1)


def _forward_kl(log_p: Array, log_q: Array) -> Array:
  return _kl(log_p, log_q)


def _reverse_kl(log_p: Array, log_q: Array) -> Array:
  return _kl(log_q, log_p)


def _js(log_p: Array, log_q: Array) -> Array:
  log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
  return (_kl(log_p, log_m) + _kl(log_q, log_m)) / 2


def _tv(log_p: Array, log_q: Array) -> Array:
  return jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), axis=-1) / 2


DIVERGENCES: dict[str, Callable[[Array, Array], Array]] = {
  'forward_kl': _forward_kl,
  'reverse_kl': _reverse_kl,
  'js': _js,
  'tv': _tv,
}


def divergence(name: str, target_logits: Array, draft_logits: Array) -> Array:
  """How far softmax(draft) is from softmax(target), in nats; tv in 0..1.

  Args:
    name: a key of `DIVERGENCES`.
    target_logits: [..., V], any float; the law p.
    draft_logits: [..., V]; the law q.

  Returns:
    float32 [...].

  Raises:
    ValueError: at trace time, for an unknown name or differing shapes.

  >>> import jax.numpy as jnp
  >>> p, q = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.75, 0.25]))
  >>> round(float(divergence('tv', p, q)), 4)
  0.25
  """
  check_divergence(name)
  check_shape('draft_logits', draft_logits, target_logits.shape)
  log_p, log_q = (
    jax.nn.log_softmax(x.astype(jnp.float32), axis=-1)
    for x in (target_logits, draft_logits)
  )
  return DIVERGENCES[name](log_p, log_q)


def check_divergence(name: str):
  """Raises ValueError unless the name is one of `DIVERGENCES`."""
  if name not in DIVERGENCES:
    raise ValueError(
      f'loss must be one of {", ".join(DIVERGENCES)}, got {name!r}.'
    )


def overlap(target_logits: Array, draft_logits: Array) -> Array:
  """sum min(p, q): the probability that a drawn draft is accepted.

  Args:
    target_logits: [..., V], any float; the law p.
    draft_logits: [..., V]; the law q.

  Returns:
    float32 [...], 0..1.

  Source: Leviathan et al., arXiv:2211.17192, Theorem 3.5.
  """
  p, q = (
    jax.nn.softmax(x.astype(jnp.float32), axis=-1)
    for x in (target_logits, draft_logits)
  )
  return jnp.sum(jnp.minimum(p, q), axis=-1)


def cross_entropy(logits: Array, tokens: Array) -> Array:
  """-log softmax(logits)[token], in nats.

  Args:
    logits: [..., V], any float.
    tokens: integers [...], ids in 0..V - 1.

  Returns:
    float32 [...].
  """
  log_q = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
  return -jnp.take_along_axis(log_q, tokens[..., None], axis=-1)[..., 0]


def chunked(
  per_token: Callable[..., dict[str, Array]],
  inputs_BT: tuple[Any, ...],
  mask_BT: Array,
  vocab_size: int,
) -> dict[str, Array]:
  """Masked means of per-token figures, a stretch of every row at a time.

  Logits of a whole batch over a big vocabulary would fill the memory: they are
  made for one stretch, reduced, and made again for the gradient.

  Args:
    per_token: from slices of the inputs to figures, float32 [B, T'] each.
    inputs_BT: trees of arrays [B, T, ...], such as hiddens and tokens.
    mask_BT: bool [B, T].
    vocab_size: V, from which the length of a stretch follows.

  Returns:
    The figures' means over the mask, float32 [].
  """
  b, t = mask_BT.shape
  size = _stretch(b, vocab_size)
  num_predicted = jnp.maximum(jnp.sum(mask_BT), 1)

  def sums(inputs, mask):
    figures = per_token(*inputs)
    return {k: jnp.sum(jnp.where(mask, v, 0.0)) for k, v in figures.items()}

  if t <= size:
    totals = sums(inputs_BT, mask_BT)
  else:

    def add(totals, stretch):
      new = jax.checkpoint(sums)(*stretch)
      return jax.tree.map(jnp.add, totals, new), None

    parts = _stretches((inputs_BT, mask_BT), size)
    first = jax.tree.map(lambda x: x[0], parts)
    zeros = jax.tree.map(
      lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(sums, *first)
    )
    totals = jax.lax.scan(add, zeros, parts)[0]
  return {k: total / num_predicted for k, total in totals.items()}


def stretched(
  per_token: Callable[[Array], Any], x_BTD: Array, vocab_size: int
) -> Any:
  """`per_token(x_BTD)`, which makes logits, a stretch of every row at a time.

  Args:
    per_token: from [B, T', D] to a tree of arrays [B, T', ...].
    x_BTD: such as hiddens.
    vocab_size: V, from which the length of a stretch follows.
  """
  b, t = x_BTD.shape[:2]
  size = _stretch(b, vocab_size)
  if t <= size:
    return per_token(x_BTD)
  parts = jax.lax.map(per_token, _stretches(x_BTD, size))
  return jax.tree.map(
    lambda x: jnp.moveaxis(x, 0, 1).reshape(b, -1, *x.shape[3:])[:, :t], parts
  )


def _stretch(num_rows: int, vocab_size: int) -> int:
  """Tokens of a row whose logits are in memory at once."""
  return max(_MAX_VALUES // (num_rows * vocab_size), 1)


def _stretches(tree: Any, size: int) -> Any:
  """Arrays [B, T, ...] as [T / size, B, size, ...], padded with zeros."""

  def cut(x: Array) -> Array:
    b, t = x.shape[:2]
    x = jnp.pad(x, ((0, 0), (0, -t % size), *((0, 0),) * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(b, -1, size, *x.shape[2:]), 1, 0)

  return jax.tree.map(cut, tree)

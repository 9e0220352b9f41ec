"""The target's pass over a block, at the narrowest of a few compiled widths."""

import functools

import jax
import jax.numpy as jnp

from specjax.models.base import Cache, Hidden, LanguageModel
from specjax.shapes import Array, Params
from specjax.sharding import constrain, constrain_rows


def powers_of_two(num_rows: int) -> tuple[int, ...]:
  """1, 2, 4, ... below N, and N: few to compile, none twice too wide.

  >>> powers_of_two(6)
  (1, 2, 4, 6)
  """
  return (
    *(2**i for i in range(num_rows.bit_length()) if 2**i < num_rows),
    num_rows,
  )


def check(widths: tuple[int, ...], num_rows: int) -> None:
  """Raises ValueError unless they ascend from 1 at least to N."""
  is_ascending = list(widths) == sorted({*widths})
  if not is_ascending or widths[-1:] != (num_rows,) or widths[0] < 1:
    raise ValueError(
      f'widths must ascend from 1 at least to {num_rows}, the rows of a '
      f'verification, got {widths}.'
    )


def target_pass(
  target: LanguageModel,
  params: Params,
  tokens_BN: Array,
  cache: Cache,
  num_tokens_B: Array,
  *,
  widths: tuple[int, ...],
  capture: tuple[int, ...],
) -> tuple[Hidden, Array, Cache]:
  """Feeds a block and unembeds it.

  The pass runs at the first width that holds the longest row. Which one it is
  depends on the whole batch, and nothing else that a step computes does.

  Args:
    target: the model.
    params: its parameters.
    tokens_BN: int32 [B, N].
    cache: what came before.
    num_tokens_B: int32 [B], how many of the N are real.
    widths: ascending, the last is N.
    capture: layers to return as features.

  Returns:
    The hiddens and logits of N rows, zeros behind the width, and the cache.
  """

  def at(
    width: int, tokens_BN: Array, cache: Cache
  ) -> tuple[tuple[Hidden, Array], Cache]:
    hidden, cache = target.apply(
      params,
      tokens_BN[:, :width],
      cache,
      num_tokens_B=num_tokens_B,
      capture=capture,
    )
    return (hidden, target.unembed(params, hidden.last_BTD)), cache

  if len(widths) == 1:
    (hidden, logits_BNV), cache = at(widths[0], tokens_BN, cache)
    return hidden, logits_BNV, cache

  def pin(found: tuple[Hidden, Array]) -> tuple[Hidden, Array]:
    hidden, logits_BNV = found
    return (
      constrain_rows(hidden, target.placement),
      constrain(logits_BNV, target.placement, 'batch', None, 'vocab'),
    )

  shapes, _ = jax.eval_shape(
    functools.partial(at, widths[-1]), tokens_BN, cache
  )
  found = pin(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
  chosen = jnp.sum(jnp.max(num_tokens_B) > jnp.asarray(widths[:-1]))
  carry = found, cache, jnp.int32(0)
  for index, width in enumerate(widths):

    def run(_, carry, width=width):
      found, cache, num_runs = carry
      # Always so. But what does not depend on the carry the compiler takes out
      # of the loop, and then every width would do it, beside the other loops.
      own_BN = jnp.where(num_runs == 0, tokens_BN, 0)
      part, cache = at(width, own_BN, cache)
      write = lambda whole, part: whole.at[:, :width].set(part)
      return pin(jax.tree.map(write, found, part)), cache, num_runs + 1

    # None or one pass: a loop works in place where a branch would copy.
    trips = jnp.where(chosen == index, 1, 0)
    carry = jax.lax.fori_loop(0, trips, run, carry)
  (hidden, logits_BNV), cache, _ = carry
  return hidden, logits_BNV, cache

"""Random numbers as pure functions of a seed, a position and a purpose.

No row index, batch size, padding or mesh enters a key, and no stream is
advanced by another's work: what a row draws depends on its own history alone.
"""

import numbers

import jax
import jax.numpy as jnp

from specjax.shapes import Array, Key

# TOKEN is the target's own draw, keyed by absolute position alone; the others
# are keyed by the length at the start of the step and the offset in it, so
# that a position drafted again gets fresh noise.
TOKEN, DRAFT, ACCEPT, RESIDUAL = range(4)

MAX_SEED = 2**32 - 1


def is_number(value) -> bool:
  """Whether it is a real number, NumPy's included; True and False are none."""
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_seed(seed: int) -> int:
  """Returns `seed`; raises ValueError unless it is in 0..2**32 - 1.

  >>> check_seed(2**32)
  Traceback (most recent call last):
  ...
  ValueError: seed must be a whole number in 0..4294967295, got 4294967296.
  """
  # The range first: int() of NaN or infinity raises an error of its own.
  if not is_number(seed) or not 0 <= seed <= MAX_SEED or seed != int(seed):
    raise ValueError(
      f'seed must be a whole number in 0..{MAX_SEED}, got {seed!r}.'
    )
  return int(seed)


def _purpose_key(seed: Array, purpose: int) -> Key:
  key = jax.random.key(seed.astype(jnp.uint32), impl='threefry2x32')
  return jax.random.fold_in(key, purpose)


def token_key(seed: Array, position: Array) -> Key:
  """Key of the target's own draw for the token at an absolute position.

  Args:
    seed: uint32 [], the request's.
    position: int32 [], the token's index in the row, the prompt counted.
  """
  return jax.random.fold_in(_purpose_key(seed, TOKEN), position)


def step_key(seed: Array, purpose: int, length: Array, offset: Array) -> Key:
  """Key of DRAFT, ACCEPT or RESIDUAL noise.

  Args:
    seed: uint32 [], the request's seed.
    purpose: DRAFT, ACCEPT or RESIDUAL.
    length: int32 [], the row's length at the start of the step. Rules that
      look past the first rejection are biased with noise keyed by position
      alone: a position drafted again would see the same noise.
    offset: int32 [], the draft's index in the step.
  """
  key = jax.random.fold_in(_purpose_key(seed, purpose), length)
  return jax.random.fold_in(key, offset)


def draw_keys(seed: Array, purpose: int, length: Array, num_keys: int) -> Key:
  """The keys of `num_keys` consecutive draws of one row, [num_keys].

  Draw i is for the token at position `length + i`.

  Args:
    seed: uint32 [], the request's.
    purpose: TOKEN, DRAFT, ACCEPT or RESIDUAL.
    length: int32 [], the row's length at the start of the step.
    num_keys: static.
  """
  offset = jnp.arange(num_keys, dtype=jnp.int32)
  if purpose == TOKEN:
    return jax.vmap(lambda i: token_key(seed, length + i))(offset)
  return jax.vmap(lambda i: step_key(seed, purpose, length, i))(offset)


def gumbel(key: Key, vocab_size: int) -> Array:
  """Standard Gumbel noise over the true ids, float32 [V].

  Always one row at the true width: the values depend on the shape. The mode
  is 'high': the usual 23 random bits end at 15.9, and ids below a probability
  of 1e-6 would be drawn too rarely or never.
  """
  return jax.random.gumbel(key, (vocab_size,), jnp.float32, mode='high')

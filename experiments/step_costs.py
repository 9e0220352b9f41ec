"""What one pass of a model costs, by the number of rows it takes.

Speculation pays where a pass over K + 1 rows costs little more than a pass
over one: the table of these costs says what a speed-up can be at most.
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import ranking
from specjax.models.base import Hidden, LanguageModel
from specjax.models.heads.base import FeatureHead, IndependentHeads, widen
from specjax.shapes import Array, Params

_MOST_PASSES = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entries:
  """A feature-fed head as a model that can be timed; its features are zeros.

  Its parameters are {'target', 'proposer'}.
  """

  head: FeatureHead

  @property
  def dtype(self) -> str:
    return self.head.feature_dtype

  def init_cache(self, *args, **kwargs) -> Any:
    return self.head.block.init_cache(*args, **kwargs)

  def keep(self, *args) -> Any:
    return self.head.block.keep(*args)

  def apply(self, params: Params, tokens_BT: Array, cache: Any):
    head = self.head
    shape = (*tokens_BT.shape, head.feature_dim)
    feature_BTD = jnp.zeros(shape, head.feature_dtype)
    feature_BTD, cache = head.apply(params, feature_BTD, tokens_BT, cache)
    return Hidden(feature_BTD), cache

  def unembed(self, params: Params, feature_BTD: Array) -> Array:
    # The first pass of a step is unembedded at its last entry alone.
    logits_B1R = self.head.unembed(params, feature_BTD[:, -1:])
    if self.head.num_ids is not None:
      ids_R = params['proposer']['ids']
      logits_B1R = widen(logits_B1R, ids_R, self.head.vocab_size)
    shape = (*feature_BTD.shape[:2], self.head.vocab_size)
    return jnp.broadcast_to(logits_B1R, shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guesses:
  """Independent heads as a model that can be timed; they keep nothing."""

  heads: IndependentHeads
  num_heads: int

  @property
  def dtype(self) -> str:
    return self.heads.feature_dtype

  def init_cache(self, batch_size: int, *args, **kwargs) -> Array:
    return jnp.zeros(batch_size, jnp.int32)

  def keep(self, cache: Array, *args) -> Array:
    return cache

  def apply(self, params: Params, tokens_BT: Array, cache: Array):
    shape = (*tokens_BT.shape, self.heads.feature_dim)
    # So that a pass waits for the one before it.
    wide_BTE = jnp.broadcast_to(tokens_BT[:, :, None], shape)
    return Hidden(wide_BTE.astype(self.heads.feature_dtype)), cache

  def unembed(self, params: Params, features_BTE: Array) -> Array:
    logits = self.heads.logits(params, features_BTE, self.num_heads)
    return functools.reduce(jnp.maximum, logits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
  """Milliseconds of one pass.

  Attributes:
    median, least, most: over the timed calls.
    num_calls: how many there were.
    num_passes: passes per call, in one loop on the device.
    seconds_compile: of the first call, apart.
  """

  median: float
  least: float
  most: float
  num_calls: int
  num_passes: int
  seconds_compile: float


def measure(
  model: LanguageModel,
  params: Params,
  *,
  batch_size: int,
  num_rows: int,
  length: int,
  num_slots: int,
  num_calls: int = 5,
  call_seconds: float = 0.05,
) -> Cost:
  """Times passes over `num_rows` new tokens per batch row, logits included.

  The passes run in a loop on the device, as in decoding, each on the tokens
  that the one before it found likeliest; the cache goes back in between.

  Args:
    model: of any kind.
    params: its parameters.
    batch_size: B.
    num_rows: T, the rows of a pass.
    length: tokens already in the cache. They are zeros, which cost as much.
    num_slots: S, slots of the cache.
    num_calls: timed calls, after one that compiles and one that warms up.
    call_seconds: a call makes so many passes (4..64) as take about this long.

  Raises:
    ValueError: if the rows do not fit behind `length`.
  """
  if length + num_rows > num_slots:
    raise ValueError(
      f'num_slots must be at least {length + num_rows}, the length and the '
      f'rows of a pass, got {num_slots}.'
    )
  length_B = jnp.full(batch_size, length, jnp.int32)
  cache = model.init_cache(batch_size, num_slots, max_rewind=num_rows)
  cache = model.keep(cache, length_B, None, jnp.zeros_like(length_B))
  tokens_BT = jnp.zeros((batch_size, num_rows), jnp.int32)

  def call(num_passes: int) -> float:
    nonlocal tokens_BT, cache
    clock = time.perf_counter()
    tokens_BT, cache = _passes(
      model, params, tokens_BT, cache, length_B, jnp.int32(num_passes)
    )
    jax.block_until_ready((tokens_BT, cache))
    return time.perf_counter() - clock

  seconds_compile = call(1)
  num_passes = int(np.clip(call_seconds / call(1), 4, _MOST_PASSES))
  seconds = [call(num_passes) / num_passes for _ in range(num_calls)]
  return Cost(
    median=1e3 * float(np.median(seconds)),
    least=1e3 * min(seconds),
    most=1e3 * max(seconds),
    num_calls=num_calls,
    num_passes=num_passes,
    seconds_compile=seconds_compile,
  )


@functools.partial(
  jax.jit, static_argnames='model', donate_argnames=('tokens_BT', 'cache')
)
def _passes(
  model: LanguageModel,
  params: Params,
  tokens_BT: Array,
  cache,
  length_B: Array,
  num_passes: Array,
):
  def one(_, carry):
    tokens_BT, cache = carry
    hidden, cache = model.apply(params, tokens_BT, cache)
    logits_BTV = model.unembed(params, hidden.last_BTD)
    cache = model.keep(cache, length_B, None, jnp.zeros_like(length_B))
    return ranking.best(logits_BTV), cache

  return jax.lax.fori_loop(0, num_passes, one, (tokens_BT, cache))


def predicted_speedup(
  block_efficiency: float,
  *,
  plain: float,
  verify: float,
  draft: float = 0.0,
  num_draft_tokens: int = 0,
) -> float:
  """Speed over plain decoding: tau * plain / (verify + K * draft).

  Args:
    block_efficiency: tau, tokens per verification.
    plain: the cost of a target pass over one row, in any unit.
    verify: of one over K + 1 rows.
    draft: of a draft's pass over one row; 0 for a lookup.
    num_draft_tokens: K.

  Source: Leviathan et al., arXiv:2211.17192, Theorem 3.8, with measured
    tokens per step and a verification that does not cost 1.

  >>> predicted_speedup(3.0, plain=10, verify=12, draft=2, num_draft_tokens=4)
  1.5
  """
  return block_efficiency * plain / (verify + num_draft_tokens * draft)

"""The first of many values: the largest, and of equals the earliest."""

import jax
import jax.numpy as jnp

from specjax.shapes import Array


def best(x: Array) -> Array:
  """The index of the largest value along the last axis, int32.

  What `jnp.argmax` returns where nothing is NaN. XLA:CPU goes through an
  arg-max one value at a time, but through a maximum, and then a minimum over
  the indices that reach it, many at a time (`experiments/microbench.py
  --parts=sampling` times both). Over a split axis both are plain reductions.

  Args:
    x: [..., V], no NaN; any float or integer.

  Returns:
    int32 [...]. Where a value is NaN: some index in 0..V - 1.

  >>> best(jnp.array([[1, 3, 3], [2, 2, 0]])).tolist()
  [1, 0]
  """
  most = jnp.max(x, axis=-1, keepdims=True)
  index = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
  last = x.shape[-1] - 1
  return jnp.min(jnp.where(x == most, index, last), axis=-1)

"""What the device at hand can do, measured: memory and matrix products."""

import os
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments import chips


def measure(
  num_bytes: int, size: int, num_calls: int = 5
) -> tuple[chips.Chip, dict[str, float]]:
  """The device at hand, and its matrix rates by dtype.

  Args:
    num_bytes: of the array that is copied and summed.
    size: side of the square matrices that are multiplied.
    num_calls: timed calls; the fastest counts.
  """
  x = jnp.ones(num_bytes // 4, jnp.float32)
  copied = _fastest(jax.jit(lambda x: x + 1), (x,), num_calls)
  summed = _fastest(jax.jit(jnp.sum), (x,), num_calls)
  del x
  rates = {}
  for dtype, total in (
    ('float32', 'float32'),
    ('bfloat16', 'float32'),
    ('int8', 'int32'),
  ):
    a, b = (jnp.ones((size, size), dtype) for _ in range(2))

    @jax.jit
    def product(a, b, total=total):
      # Weights lie [out, in], as in the models.
      return jax.lax.dot_general(
        a, b, (((1,), (1,)), ((), ())), preferred_element_type=total
      )

    rates[dtype] = 2 * size**3 / _fastest(product, (a, b), num_calls)
  memory = jax.local_devices()[0].memory_stats() or {}
  chip = chips.Chip(
    name=jax.local_devices()[0].device_kind,
    hbm_bytes=memory.get('bytes_limit') or _host_memory(),
    hbm_bandwidth=max(2 * num_bytes / copied, num_bytes / summed),
    bfloat16_flops=rates['bfloat16'],
    int8_ops=rates['int8'],
  )
  return chip, rates


def _host_memory() -> int:
  return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def _fastest(call: Callable, arguments: tuple, num_calls: int) -> float:
  jax.block_until_ready(call(*arguments))
  found = []
  for _ in range(num_calls):
    clock = time.perf_counter()
    jax.block_until_ready(call(*arguments))
    found.append(time.perf_counter() - clock)
  return min(found)

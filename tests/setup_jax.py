"""Imported first by every test file: the settings that all tests run under.

Rank promotion raises, so that `length_B < index_B1` is an error and not a
silent [B, B]; eight fake CPU devices stand ready for placement tests; and
float32 products are not allowed to use shorter passes. Tests compile much and
compute little, so the compiler takes less trouble. Nothing is read from or left
in the user's cache of compiled programs, by scripts in processes of their own
neither.
"""

import os

os.environ['XLA_FLAGS'] = ' '.join(
  (
    os.environ.get('XLA_FLAGS', ''),
    '--xla_backend_optimization_level=0',
    '--xla_llvm_disable_expensive_passes=true',
  )
)

os.environ['JAX_ENABLE_COMPILATION_CACHE'] = 'false'

import jax  # noqa: E402

jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_default_matmul_precision', 'highest')

"""Imported first by every test file: the settings that all tests run under.

Rank promotion raises, so that `length_B < index_B1` is an error and not a
silent [B, B]; eight fake CPU devices stand ready for placement tests; and
float32 products are not allowed to use shorter passes.
"""

import jax

jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_default_matmul_precision', 'highest')

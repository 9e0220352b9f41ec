"""Products that XLA does slowly, each beside a twin in plain JAX.

  products   on CPUs: C++ called through `jax.ffi`, built by setup.py
  pallas     for GPUs and TPUs; not used by default

Nothing here is needed: where a kernel was not built, is turned off
(`SPECJAX_KERNELS=0`) or does not suit the device, its twin takes its place.
"""

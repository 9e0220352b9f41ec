"""`x @ weight.T` for narrow types on a CPU: one pass over the weights.

XLA:CPU multiplies bfloat16 and int8 far below what memory allows, one row worst
of all. Decoding reads every weight once a step for a few rows, and so these
products are the step. products.cc has them in C++ (AVX-512, AVX2, or any
processor slowly); `setup.py` builds it where a C++ compiler is found.

A row has the same bits in a product of any number of rows, on any number of
threads: int8 sums are exact, and a bfloat16 sum goes through its inputs in an
order that depends on their number only. This is what makes the text of a wide
step that of a narrow one.

The environment variable SPECJAX_KERNELS=0 turns the kernels off. It is read
once, when the first of them would be used.
"""

import ctypes
import functools
import importlib.metadata
import os
import pathlib
import sysconfig

import jax
import jax.numpy as jnp
from absl import logging
from jax import lax

from specjax.shapes import Array, check_shape

SWITCH = 'SPECJAX_KERNELS'
_LIBRARY = pathlib.Path(__file__).with_name(
  '_products' + (sysconfig.get_config_var('EXT_SUFFIX') or '.so')
)


@functools.cache
def is_available() -> bool:
  """Whether products run in the kernels when compiled for a CPU.

  False if they are turned off, were not built, or were built for another
  jaxlib; a line on stderr says why, once, unless they are turned off.

  Raises:
    ValueError: SPECJAX_KERNELS is neither 0 nor 1.
  """
  switch = os.environ.get(SWITCH, '1')
  if switch not in ('0', '1'):
    raise ValueError(f'{SWITCH} must be 0 or 1, got {switch!r}.')
  if switch == '0':
    return False
  try:
    _register(_LIBRARY)
  except (OSError, RuntimeError) as error:
    logging.warning('Products are left to XLA: %s', error)
    return False
  return True


def _register(path: pathlib.Path):
  """Makes the functions of a library known to XLA.

  Raises:
    OSError: it cannot be loaded.
    RuntimeError: it was built for another jaxlib.
  """
  if not path.exists():
    raise OSError(
      f'{path} is not there (was there a C++ compiler when specjax was '
      'installed?).'
    )
  library = ctypes.CDLL(str(path))
  library.specjax_jaxlib_version.restype = ctypes.c_char_p
  built_for = library.specjax_jaxlib_version().decode()
  installed = importlib.metadata.version('jaxlib')
  # With functions made for a newer jaxlib XLA would not even start.
  if built_for != installed:
    raise RuntimeError(
      f'the kernels were built for jaxlib {built_for}, found {installed}; '
      'install specjax again to build them anew.'
    )
  for name in ('specjax_int8_product', 'specjax_bfloat16_product'):
    function = jax.ffi.pycapsule(getattr(library, name))
    jax.ffi.register_ffi_target(name, function, platform='cpu')


def int8_product(x_MI: Array, weight_OI: Array) -> Array:
  """`x @ weight.T`, summed exactly (modulo 2**32, as XLA does).

  Args:
    x_MI: int8 [M, I].
    weight_OI: int8 [O, I].

  Returns:
    int32 [M, O], bit for bit that of `pure_int8_product`.

  Raises:
    ValueError: at trace time, if a shape or a dtype does not fit.

  >>> int8_product(jnp.int8([[1, 2]]), jnp.int8([[3, 4], [5, -6]])).tolist()
  [[11, -7]]
  """
  _check(x_MI, weight_OI, jnp.int8)
  if not is_available():
    return pure_int8_product(x_MI, weight_OI)
  return lax.platform_dependent(
    x_MI,
    weight_OI,
    cpu=functools.partial(_call, 'specjax_int8_product', jnp.int32),
    default=pure_int8_product,
  )


def pure_int8_product(x_MI: Array, weight_OI: Array) -> Array:
  """What `int8_product` computes, int32 [M, O], left to XLA."""
  return _dot(x_MI, weight_OI, jnp.int32)


def bfloat16_product(x_MI: Array, weight_OI: Array) -> Array:
  """`x @ weight.T`, summed in float32, in an order that no other row changes.

  Differentiable; gradients are products of XLA.

  Args:
    x_MI: bfloat16 [M, I].
    weight_OI: bfloat16 [O, I].

  Returns:
    float32 [M, O]: `pure_bfloat16_product` but for the order of its sums.

  Raises:
    ValueError: at trace time, if a shape or a dtype does not fit.

  >>> x, weight = jnp.bfloat16([[1, 2]]), jnp.bfloat16([[3, 4], [5, -6]])
  >>> bfloat16_product(x, weight).tolist()
  [[11.0, -7.0]]
  """
  _check(x_MI, weight_OI, jnp.bfloat16)
  if not is_available():
    return pure_bfloat16_product(x_MI, weight_OI)
  return _bfloat16_product(x_MI, weight_OI)


def pure_bfloat16_product(x_MI: Array, weight_OI: Array) -> Array:
  """What `bfloat16_product` computes, float32 [M, O], in XLA's order."""
  return _dot(x_MI, weight_OI, jnp.float32)


@jax.custom_jvp
def _bfloat16_product(x_MI: Array, weight_OI: Array) -> Array:
  return lax.platform_dependent(
    x_MI,
    weight_OI,
    cpu=functools.partial(_call, 'specjax_bfloat16_product', jnp.float32),
    default=pure_bfloat16_product,
  )


@_bfloat16_product.defjvp
def _bfloat16_product_jvp(primals, tangents):
  (x_MI, weight_OI), (dx_MI, dweight_OI) = primals, tangents
  dy_MO = _dot(dx_MI, weight_OI, jnp.float32)
  dy_MO = dy_MO + _dot(x_MI, dweight_OI, jnp.float32)
  return _bfloat16_product(x_MI, weight_OI), dy_MO


def _check(x_MI: Array, weight_OI: Array, dtype: jnp.dtype):
  check_shape('x_MI', x_MI, ('M', 'I'))
  check_shape('weight_OI', weight_OI, ('O', x_MI.shape[1]))
  for name, array in (('x_MI', x_MI), ('weight_OI', weight_OI)):
    if array.dtype != dtype:
      raise ValueError(f'{name} must be {jnp.dtype(dtype)}, got {array.dtype}.')


def _call(name: str, dtype: jnp.dtype, x_MI: Array, weight_OI: Array) -> Array:
  shape = (x_MI.shape[0], weight_OI.shape[0])
  call = jax.ffi.ffi_call(
    name, jax.ShapeDtypeStruct(shape, dtype), vmap_method='sequential'
  )
  return call(x_MI, weight_OI)


def _dot(x_MI: Array, weight_OI: Array, dtype: jnp.dtype) -> Array:
  dimensions = (((1,), (1,)), ((), ()))
  return lax.dot_general(
    x_MI, weight_OI, dimensions, preferred_element_type=dtype
  )

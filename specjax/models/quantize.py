"""int8 weights: one scale per output channel, one per row of activations.

  weight[o, i] ~ int8[o, i] * scale[o]          scale = max |row| / 127
  x @ weight.T ~ (int8(x) @ int8.T) * scale(x) * scale

Every matrix of a model is quantised: the products of the blocks, the output
head, and the embedding, tied or not, whose rows are what is looked up, so a
row's scale serves both. Norm scales and biases stay as they are.

Source: Dettmers et al., LLM.int8(), arXiv:2208.07339, section 2.1 (vector-wise
  quantisation). Deviation: no outlier columns are kept apart.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sharding
from specjax.shapes import Array, Params

SCHEMES = ('none', 'int8')
_LARGEST = 127  # Symmetric: -128 is not used.


class Int8Weight(NamedTuple):
  """A quantised matrix, where the plain one was in the tree of parameters.

  Attributes:
    int8_OI: int8 [O, I], in -127..127.
    scale_O: float32 [O], > 0.
  """

  int8_OI: Array
  scale_O: Array


def check_scheme(name: str, scheme: str):
  """Raises ValueError unless it is one of `SCHEMES`."""
  if scheme not in SCHEMES:
    raise ValueError(
      f'{name} must be one of {", ".join(SCHEMES)}, got {scheme!r}.'
    )


def quantize(x: Array) -> tuple[Array, Array]:
  """Rounds every row (the last axis) to int8 with a scale of its own.

  `scale = max |x| / 127`, `int8 = round(x / scale)`, so that int8 * scale is
  off by half a scale at most (and some float32 roundings). No row depends on
  another. The scale of a row with a NaN or an infinity is not finite, and so
  is every product with it.

  Args:
    x: [..., I], any float.

  Returns:
    int8 [..., I] and scales float32 [...], > 0 also where a row is zero.

  >>> int8, scale = quantize(jnp.array([[1.0, -2.54, 0.0], [0.0, 0.0, 0.0]]))
  >>> int8.tolist(), round(float(scale[0]), 4)
  ([[50, -127, 0], [0, 0, 0]], 0.02)
  """
  x = x.astype(jnp.float32)
  # `maximum` hands on a NaN, a comparison would not.
  largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
  largest = jnp.maximum(largest, _smallest())
  # Written as compilers rewrite a division by a constant, lest the last bit
  # depend on whether they do.
  scale = largest * (1 / _LARGEST)
  return jnp.round(x * (_LARGEST / largest)).astype(jnp.int8), scale[..., 0]


@jax.jit
def quantize_weight(weight_OI: Array) -> Int8Weight:
  """The matrix with a scale per output channel.

  >>> quantize_weight(jnp.ones((3, 2))).int8_OI.dtype
  dtype('int8')
  """
  return Int8Weight(*quantize(weight_OI))


def quantize_rows(x_OI: Any, int8_OI: Any, scale_O: Any) -> bool:
  """`quantize` on the host: the same bits, written to where they belong.

  Args:
    x_OI: float32 NumPy array.
    int8_OI: takes the rounded rows.
    scale_O: takes their scales.

  Returns:
    Whether all values are finite; if not, nothing is written.
  """
  largest_O = np.maximum(x_OI.max(axis=1), -x_OI.min(axis=1))
  largest_O = np.maximum(largest_O, _smallest())
  if not np.all(np.isfinite(largest_O)):
    return False
  scale_O[...] = largest_O * np.float32(1 / _LARGEST)
  scaled_OI = x_OI * (_LARGEST / largest_O)[:, None]
  np.rint(scaled_OI, out=scaled_OI)
  np.copyto(int8_OI, scaled_OI, casting='unsafe')
  return True


def _smallest() -> np.float32:
  """The bound under `largest`, which keeps a scale a normal number.

  A smaller one may be flushed to zero.
  """
  return _LARGEST * np.finfo(np.float32).tiny


def is_quantized(leaf: Any) -> bool:
  """Whether a parameter, or its spec, is one that int8 replaces."""
  return len(leaf.shape) == 2


def quantize_params(params: Params) -> Params:
  """The tree with `Int8Weight` for every matrix."""
  return jax.tree.map(
    lambda leaf: quantize_weight(leaf) if is_quantized(leaf) else leaf, params
  )


def quantize_specs(specs: Any) -> Any:
  """The declaration of `quantize_params(params)`, from that of `params`.

  It serves restoring, counting and placing; random values are those of the
  float declaration, quantised (`Transformer.init`).
  """

  def declare(spec: sharding.ParamSpec) -> Any:
    if not is_quantized(spec):
      return spec
    return Int8Weight(
      int8_OI=dataclasses.replace(spec, dtype='int8'),
      scale_O=sharding.ParamSpec(
        shape=spec.shape[:1],
        dtype='float32',
        logical_axes=spec.logical_axes[:1],
        init='ones',
        units=spec.axis_units()[:1],
      ),
    )

  return jax.tree.map(declare, specs, is_leaf=sharding.is_spec)

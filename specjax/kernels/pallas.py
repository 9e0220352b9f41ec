"""The int8 product for GPUs and TPUs, in Pallas.

Checked in interpret mode against `products.pure_int8_product`, bit for bit. It
has not been timed on a device, so nothing uses it by default: XLA's own int8
products are what models run there.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from specjax.shapes import Array, check_shape

# Sides of a tile of x, of the weights and of the inputs: whole tiles of a
# TPU's int8 layout (32 x 128) and of a GPU's matrix unit.
_BLOCK_M = 32
_BLOCK_O = 128
_BLOCK_I = 128


def int8_product(
  x_MI: Array, weight_OI: Array, *, interpret: bool = False
) -> Array:
  """`x @ weight.T`, summed exactly.

  One program per tile of the result goes through all inputs. Sizes that are
  not whole tiles are filled up with zeros, which copies the weights: store
  them in whole tiles.

  Args:
    x_MI: int8 [M, I].
    weight_OI: int8 [O, I].
    interpret: runs on any device, slowly, for tests.

  Returns:
    int32 [M, O].

  Raises:
    ValueError: at trace time, if the shapes do not match.
  """
  check_shape('x_MI', x_MI, ('M', 'I'))
  check_shape('weight_OI', weight_OI, ('O', x_MI.shape[1]))
  (m, _), o = x_MI.shape, weight_OI.shape[0]
  x_MI = _fill_up(x_MI, _BLOCK_M)
  weight_OI = _fill_up(weight_OI, _BLOCK_O)
  i = x_MI.shape[1]
  y_MO = pl.pallas_call(
    _tile,
    grid=(x_MI.shape[0] // _BLOCK_M, weight_OI.shape[0] // _BLOCK_O),
    in_specs=(
      pl.BlockSpec((_BLOCK_M, i), lambda row, channel: (row, 0)),
      pl.BlockSpec((_BLOCK_O, i), lambda row, channel: (channel, 0)),
    ),
    out_specs=pl.BlockSpec(
      (_BLOCK_M, _BLOCK_O), lambda row, channel: (row, channel)
    ),
    out_shape=jax.ShapeDtypeStruct(
      (x_MI.shape[0], weight_OI.shape[0]), jnp.int32
    ),
    interpret=interpret,
  )(x_MI, weight_OI)
  return y_MO[:m, :o]


def _fill_up(x: Array, rows: int) -> Array:
  """`x` with zeros behind, to whole tiles."""
  return jnp.pad(x, ((0, -x.shape[0] % rows), (0, -x.shape[1] % _BLOCK_I)))


def _tile(x_ref, weight_ref, y_ref):
  def add_piece(piece, sum_MO):
    inputs = pl.ds(piece * _BLOCK_I, _BLOCK_I)
    return sum_MO + lax.dot_general(
      x_ref[:, inputs],
      weight_ref[:, inputs],
      (((1,), (1,)), ((), ())),
      preferred_element_type=jnp.int32,
    )

  num_pieces = x_ref.shape[1] // _BLOCK_I
  zeros_MO = jnp.zeros(y_ref.shape, jnp.int32)
  y_ref[...] = lax.fori_loop(0, num_pieces, add_piece, zeros_MO)

"""The dimension key, the shared array types and the shape check.

An array's name ends in its axes, in order; one letter is one axis:

  B rows of the batch         L token buffer              T tokens in one call
  S cache slots               K draft tokens per step     N K + 1
  V vocabulary (true ids)     D model width               H query heads
  G key-value heads           C head size                 F feed-forward width
  M tokens of a kept path     J stop ids per row          E captured features
  R ids of a reduced vocabulary                           X parts side by side

A length-one axis is written `1`. Inside an unbatched function the B is gone.
"""

from typing import Any, TypeAlias

import jax

Array: TypeAlias = jax.Array
Key: TypeAlias = jax.Array  # A typed PRNG key, `jax.random.key`, never raw.
Params: TypeAlias = Any  # A pytree of arrays.


def check_shape(name: str, array: Array, expected: tuple[int | str, ...]):
  """Raises unless `array` has the expected shape.

  Args:
    name: the array's name as the caller knows it.
    array: anything with a `.shape`, [...].
    expected: one entry per axis; an int must match, a letter stands for any
      size (and for the same size wherever it is used again).

  Raises:
    ValueError: `tokens_BT must have shape (8, T), got (4, 16).`

  >>> import jax.numpy as jnp
  >>> check_shape('tokens_BT', jnp.zeros((4, 16)), ('B', 'T'))
  >>> check_shape('tokens_BT', jnp.zeros((4, 16)), (8, 'T'))
  Traceback (most recent call last):
  ...
  ValueError: tokens_BT must have shape (8, T), got (4, 16).
  """
  sizes: dict[str, int] = {}
  ok = len(array.shape) == len(expected)
  for size, want in zip(array.shape, expected):
    if isinstance(want, str):
      want = sizes.setdefault(want, size)
    ok = ok and size == want
  if not ok:
    want = ', '.join(str(w) for w in expected)
    raise ValueError(
      f'{name} must have shape ({want}), got {tuple(array.shape)}.'
    )

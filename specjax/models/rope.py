"""Rotary positions: what a config says about them, and the rotation itself."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from specjax.shapes import Array

KINDS = ('default', 'linear', 'llama3')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
  """Which frequencies the positions of a layer turn with.

  Attributes:
    theta: the base, > 0.
    kind: 'default'; 'linear' (all frequencies divided by `factor`); 'llama3'
      (long wavelengths divided by `factor`, short ones kept, a blend between).
    factor: >= 1.
    low_freq_factor: 'llama3' divides wavelengths above
      `original_context / low_freq_factor`.
    high_freq_factor: 'llama3' keeps those below
      `original_context / high_freq_factor`.
    original_context: the context the model had before it was stretched.

  Raises:
    ValueError: naming the setting, the rule and the value.

  Source: Su et al., RoFormer, arXiv:2104.09864; the 'llama3' blend as in
    Meta's Llama 3.1 reference code.
  """

  theta: float
  kind: str = 'default'
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 1.0
  original_context: int = 0

  def __post_init__(self):
    if self.kind not in KINDS:
      raise ValueError(
        f'rope type must be one of {", ".join(KINDS)}, got {self.kind!r}.'
      )
    if not self.theta > 0:
      raise ValueError(f'rope theta must be > 0, got {self.theta}.')
    if not self.factor >= 1:
      raise ValueError(f'rope factor must be >= 1, got {self.factor}.')
    if self.kind == 'llama3' and not (
      0 < self.low_freq_factor < self.high_freq_factor
      and self.original_context > 0
    ):
      raise ValueError(
        'llama3 rope needs 0 < low_freq_factor < high_freq_factor and an '
        f'original context > 0, got {self.low_freq_factor}, '
        f'{self.high_freq_factor} and {self.original_context}.'
      )

  def frequencies(self, head_dim: int) -> np.ndarray:
    """Radians per position, float32 [C / 2], computed in float64.

    >>> Rope(theta=10000.0).frequencies(4)
    array([1.  , 0.01], dtype=float32)
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = self.theta**-exponents
    if self.kind == 'linear':
      frequencies = frequencies / self.factor
    if self.kind == 'llama3':
      turns = self.original_context * frequencies / (2 * math.pi)
      kept = np.clip(
        (turns - self.low_freq_factor)
        / (self.high_freq_factor - self.low_freq_factor),
        0.0,
        1.0,
      )
      frequencies = kept * frequencies + (1 - kept) * frequencies / self.factor
    return frequencies.astype(np.float32)

  def angles(self, positions_BT: Array, head_dim: int) -> tuple[Array, Array]:
    """Cosine and sine for every position, two float32 [B, T, C / 2]."""
    frequency_11c = jnp.asarray(self.frequencies(head_dim))[None, None, :]
    angle_BTc = positions_BT.astype(jnp.float32)[:, :, None] * frequency_11c
    return jnp.cos(angle_BTc), jnp.sin(angle_BTc)


def rotate(x_BTHC: Array, cos_BTc: Array, sin_BTc: Array) -> Array:
  """Turns each head's first half against its second; float32 inside.

  Args:
    x_BTHC: queries or keys; entry i is paired with entry i + C / 2.
    cos_BTc: float32 [B, T, C / 2].
    sin_BTc: float32 [B, T, C / 2].

  Returns:
    The same shape and dtype as `x_BTHC`.
  """
  first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos_BTc[:, :, None, :], sin_BTc[:, :, None, :]
  turned = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return turned.astype(x_BTHC.dtype)

"""The target's hiddens of a text, read once and kept.

A head's step is mostly the target's pass over the text, which is the same in
every epoch. Where a text is small and seen often the hiddens are worth their
memory: of a token (layers captured + 1) * D values in the reader's dtype.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from specjax.models.base import Hidden
from specjax.models.transformer import Transformer
from specjax.shapes import Array, Params
from specjax.sharding import to_host
from specjax.training.data import Packed
from specjax.training.objective import whole


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Remembered:
  """Batches with the hiddens of their tokens; a `Source`.

  Attributes:
    source: with the same windows in every epoch.
    reader: the target as it reads, see `heads.FeatureLoss`.
    reader_params: its parameters.
    capture: the layers that the head reads.
    kept: by window, what has been read of it.

  Raises:
    ValueError: the windows of the source move between epochs.
  """

  source: Packed
  reader: Transformer
  reader_params: Params
  capture: tuple[int, ...]
  kept: dict[int, Hidden] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if self.source.recuts:
      raise ValueError('the windows of the text must stay, recuts is True.')

  def batch(self, position: int, params: Params) -> dict[str, Any]:
    """`Source.batch`, and the hiddens [B, T - 1, D] and [B, T - 1, E]."""
    batch = self.source.batch(position, params)
    windows = self.source.windows(position)
    if not self.kept.keys() >= set(windows):
      read = to_host(
        _read(
          self.reader,
          self.capture,
          self.reader_params,
          batch['tokens_BT'][:, :-1],
        )
      )
      for i, window in enumerate(windows):
        # A copy: a row would hold on to its whole batch.
        self.kept[window] = jax.tree.map(lambda x, i=i: x[i].copy(), read)
    hiddens = [self.kept[window] for window in windows]
    return {
      **batch,
      'last_BTD': np.stack([hidden.last_BTD for hidden in hiddens]),
      'features_BTE': np.stack([hidden.features_BTE for hidden in hiddens]),
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read(
  reader: Transformer,
  capture: tuple[int, ...],
  params: Params,
  tokens_BT: Array,
) -> Hidden:
  return whole(reader, params, tokens_BT, capture)

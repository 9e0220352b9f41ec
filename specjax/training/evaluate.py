"""An objective's figures on text that is not trained on."""

import functools
from collections.abc import Iterable

import jax
import numpy as np

from specjax.shapes import Params
from specjax.training.objective import Batch, Metrics, Objective


def evaluate(
  objective: Objective,
  params: Params,
  frozen_params: Params,
  batches: Iterable[Batch],
) -> dict[str, float]:
  """The objective's figures, averaged over batches; nothing is trained.

  For a draft 'overlap' is the mean of sum min(p, q) over the text's positions:
  the probability that a drawn draft is accepted there.

  Raises:
    ValueError: there is no batch.
  """
  rows = [
    _figures(objective, params, frozen_params, batch) for batch in batches
  ]
  if not rows:
    raise ValueError('there must be at least one batch to evaluate on.')
  rows = jax.device_get(rows)
  return {k: float(np.mean([row[k] for row in rows])) for k in rows[0]}


@functools.partial(jax.jit, static_argnames='objective')
def _figures(
  objective: Objective, params: Params, frozen_params: Params, batch: Batch
) -> Metrics:
  # No noise that would differ between two evaluations.
  key = jax.random.key(0)
  value, figures = objective.loss(params, frozen_params, batch, key)
  return {'loss': value, **figures}

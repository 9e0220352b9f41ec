"""What is trained: parameters, and the loss that judges them.

An objective is all that the training step knows. A language model, a draft that
imitates its target and a head on a frozen target are three objectives; the
step, the loop and the checkpoints are the same for all of them.
"""

import dataclasses
from typing import Any, Protocol

from specjax.mesh import MeshShape, View, place, refine
from specjax.models.transformer import Transformer
from specjax.shapes import Array, Key, Params

# 'tokens_BT': int32 [B, T]. 'mask_BT': bool [B, T], whether the token is one to
# be predicted (from those before it; a row's first token never is). Both are
# split by row over the data axis of a mesh. 'last_BTD', 'features_BTE': the
# target's hiddens of all but the last token, if they are known (`Remembered`).
Batch = dict[str, Array]
# Scalars, float32 []; written to the metrics file under their names.
Metrics = dict[str, Array]


class Objective(Protocol):
  """A loss over parameters; static: a frozen dataclass, hashable, no arrays.

  Models inside come from `trainable`.
  """

  def init(self, key: Key) -> Params:
    """Parameters to start from; consumes the key.

    Their dtypes are those in which `loss` receives them. The trainer keeps
    float32 copies and rounds them for every step.
    """
    ...

  def loss(
    self, params: Params, frozen_params: Params, batch: Batch, key: Key
  ) -> tuple[Array, Metrics]:
    """A mean over the batch's predicted tokens, differentiable in `params`.

    Args:
      params: what is trained, in the dtypes of `init`.
      frozen_params: what is not (a target), as it was given to the trainer; the
        objective sees to it that nothing is differentiated there.
      batch: see `Batch`.
      key: for dropout and the like; another one every step.

    Returns:
      float32 [], and figures to report; 'loss' and 'grad_norm' are added.
    """
    ...


def trainable(model: Transformer, view: View | None = None) -> Transformer:
  """The model in a form that has derivatives: placed on a mesh.

  On one device without a mesh a CPU reads its cache in loops of unknown
  length, which cannot be differentiated. A placed model is plain XLA
  throughout, were the mesh of a single device.

  Args:
    model: of float weights, not fused.
    view: of the mesh; None is one of one device.

  Raises:
    ValueError: the weights are int8 or fused.
  """
  if model.quantize != 'none' or model.is_fused:
    raise ValueError(
      'only float weights that are not fused are trained, got '
      f'quantize {model.quantize} and is_fused {model.is_fused}.'
    )
  if view is None:
    view, _ = refine(MeshShape())
  placement = place(model.param_specs(), view)
  return dataclasses.replace(model, placement=placement)


def whole(
  model: Transformer,
  params: Params,
  tokens_BT: Array,
  capture: tuple[int, ...] = (),
) -> Any:
  """`model.apply` over whole rows, teacher-forced: the hiddens of every token.

  Args:
    model: from `trainable`.
    params: its parameters.
    tokens_BT: int32 [B, T].
    capture: as in `apply`.
  """
  b, t = tokens_BT.shape
  cache = model.init_cache(b, t, max_rewind=0)
  return model.apply(params, tokens_BT, cache, capture=capture)[0]

"""Writes a model as a folder that `safetensors.read_folder` reads.

  config.json   as it was given
  model.safetensors

Names and layout are those of published models, so other programs read it too.
"""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from specjax import atomic, sharding
from specjax.models import transformer
from specjax.models.checkpoints import base, orbax
from specjax.shapes import Params


def write_folder(
  path: str | os.PathLike,
  config: Mapping[str, Any],
  model: transformer.Transformer,
  params: Params,
):
  """Writes the folder, whole or not at all.

  Args:
    path: must not exist, or be an empty folder.
    config: in config.json form; what `model` was made from.
    model: of float weights, not fused, in any placement.
    params: its parameters.

  Raises:
    ValueError: the path holds something, or the model has weights that the
      format does not hold.
  """
  import safetensors.numpy

  if model.quantize != 'none' or model.is_fused:
    raise ValueError(
      'only float weights that are not fused are written, got '
      f'quantize {model.quantize} and is_fused {model.is_fused}.'
    )
  path = pathlib.Path(path).absolute()
  orbax.check_free(path)
  names = jax.tree.leaves(base.hf_names(model))
  values = jax.tree.leaves(sharding.to_host(params))
  tensors = {
    name: np.ascontiguousarray(value)
    for name, value in zip(names, values, strict=True)
  }
  path.parent.mkdir(parents=True, exist_ok=True)
  with atomic.replacing(path) as unfinished:
    unfinished.mkdir()
    safetensors.numpy.save_file(tensors, unfinished / 'model.safetensors')
    text = json.dumps(dict(config), indent=2) + '\n'
    (unfinished / 'config.json').write_text(text, encoding='utf-8')

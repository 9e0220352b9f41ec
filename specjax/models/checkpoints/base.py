"""The one form in which every file format delivers a model."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A published model as its files have it.

  Attributes:
    config: in the form of a config.json.
    shapes: tensor name in Hugging Face form
      ('model.layers.0.self_attn.q_proj.weight') to its shape, [out, in].
    read: reads one tensor by its name; nothing is read before.
    norms_have_one_added: in families whose norms multiply by 1 + w, whether
      the file holds 1 + w (GGUF) and not w.
    stop_ids: the ids that end a text.
  """

  config: dict[str, Any]
  shapes: dict[str, tuple[int, ...]]
  read: Callable[[str], jax.Array | np.ndarray]
  norms_have_one_added: bool = False
  stop_ids: tuple[int, ...] = ()

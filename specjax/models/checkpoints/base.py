"""What every checkpoint reader delivers."""

import dataclasses
from typing import Callable

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  config: dict  # in config.json form
  shapes: dict[
    str, tuple[int, ...]
  ]  # tensor name in Hugging Face form ('model.layers.0.self_attn.q_proj.weight', ...) -> shape [out, in]
  read: Callable[
    [str], jax.Array | np.ndarray
  ]  # reads ONE tensor, lazily
  norms_have_one_added: bool = False  # GGUF files of Gemma store 1 + w
  stop_ids: tuple[int, ...] = ()

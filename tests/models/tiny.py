"""Tiny models, one for each property that families differ in."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sharding
from specjax.models import config as model_config
from specjax.models import transformer
from specjax.models.checkpoints import base
from specjax.shapes import Params

_COMMON = {
  'vocab_size': 40,
  'hidden_size': 16,
  'intermediate_size': 24,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'max_position_embeddings': 64,
  'rms_norm_eps': 1e-5,
  'hidden_act': 'silu',
  'rope_theta': 10000.0,
  'tie_word_embeddings': False,
}

CONFIGS: dict[str, dict[str, Any]] = {
  'llama': {**_COMMON, 'model_type': 'llama'},
  'llama_tied_biased': {
    **_COMMON,
    'model_type': 'llama',
    'tie_word_embeddings': True,
    'attention_bias': True,
    'mlp_bias': True,
  },
  'mistral': {**_COMMON, 'model_type': 'mistral', 'sliding_window': 4},
  'qwen2': {
    **_COMMON,
    'model_type': 'qwen2',
    'use_sliding_window': True,
    'sliding_window': 3,
    'max_window_layers': 1,
  },
  'qwen3': {**_COMMON, 'model_type': 'qwen3', 'head_dim': 10},
  'gemma3': {
    **_COMMON,
    'model_type': 'gemma3_text',
    'num_hidden_layers': 3,
    'head_dim': 8,
    'hidden_activation': 'gelu_pytorch_tanh',
    'query_pre_attn_scalar': 12,
    'sliding_window': 4,
    'sliding_window_pattern': 2,
    'rope_theta': 1000000.0,
    'rope_local_base_freq': 10000.0,
    'tie_word_embeddings': True,
  },
}


def model(
  name: str,
  dtype: str = 'float32',
  vocab_size: int | None = None,
  quantize: str = 'none',
  **changes,
) -> transformer.Transformer:
  made = model_config.config_from_hf(CONFIGS[name], vocab_size, dtype, quantize)
  return dataclasses.replace(made, **changes)


def params_of(model: transformer.Transformer, seed: int = 0) -> Params:
  """Random parameters in which norms and biases are random as well."""
  rng = np.random.default_rng(seed)

  def make(spec: sharding.ParamSpec) -> jax.Array:
    value = rng.normal(0, 0.3, spec.shape) + (spec.init == 'ones')
    return jnp.asarray(value, spec.dtype)

  return jax.tree.map(make, model.param_specs(), is_leaf=sharding.is_spec)


def tensors_of(
  model: transformer.Transformer, params: Params, *, norm_offset: float = 0.0
) -> dict[str, np.ndarray]:
  """The parameters under their names in a published checkpoint."""
  names = jax.tree.leaves(base.hf_names(model))
  return {
    name: np.asarray(leaf)
    - (norm_offset if name.endswith('norm.weight') else 0)
    for name, leaf in zip(names, jax.tree.leaves(params))
  }


def checkpoint_of(
  config: dict[str, Any], tensors: dict[str, np.ndarray], **settings
) -> base.Checkpoint:
  """A checkpoint that lies in memory."""
  shapes = {name: tensor.shape for name, tensor in tensors.items()}
  return base.Checkpoint(config, shapes, tensors.__getitem__, **settings)


def logits_of(model: transformer.Transformer, params: Params) -> np.ndarray:
  """Logits over one short text with every setting of the model in play."""
  tokens_BT = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
  return np.asarray(_logits(model, params, tokens_BT))


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, params, tokens_BT):
  hidden, _ = model.apply(params, tokens_BT, model.init_cache(2, 8, 0))
  return model.unembed(params, hidden.last_BTD)

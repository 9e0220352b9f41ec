"""Tiny configs, one for each property that families differ in."""

from typing import Any

from specjax.models.config import config_from_hf
from specjax.models.transformer import Transformer

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
  name: str, dtype: str = 'float32', vocab_size: int | None = None
) -> Transformer:
  return config_from_hf(CONFIGS[name], vocab_size, dtype)

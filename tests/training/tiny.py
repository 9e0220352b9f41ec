"""Models and texts small enough to train in a test."""

import numpy as np

from specjax.models import config as model_config
from specjax.models.transformer import Transformer
from specjax.tokenizers import ByteTokenizer
from specjax.training import data

TEXT = 'for i in range(10):\n  print(i, i * i)\n' * 12


def shape(num_layers: int, width: int, vocab_size: int = 257) -> dict:
  return {
    'model_type': 'llama',
    'vocab_size': vocab_size,
    'hidden_size': width,
    'intermediate_size': 2 * width,
    'num_hidden_layers': num_layers,
    'num_attention_heads': 2,
    'num_key_value_heads': 1,
    'max_position_embeddings': 256,
    'hidden_act': 'silu',
    'rms_norm_eps': 1e-5,
    'rope_theta': 10000.0,
    'tie_word_embeddings': True,
  }


def model(
  num_layers: int = 1, width: int = 16, dtype: str = 'float32'
) -> Transformer:
  return model_config.config_from_hf(shape(num_layers, width), dtype=dtype)


def packed(batch_size: int = 4, length: int = 17, seed: int = 0) -> data.Packed:
  document = data.from_text(TEXT, ByteTokenizer())
  return data.pack([document], batch_size=batch_size, length=length, seed=seed)


def same(a, b) -> bool:
  """Whether two trees have the same bits."""
  import jax

  return jax.tree.structure(a) == jax.tree.structure(b) and all(
    np.asarray(x).tobytes() == np.asarray(y).tobytes()
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))
  )

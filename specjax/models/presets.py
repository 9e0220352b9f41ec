"""Published shapes by name, in the form of their config.json.

Only what determines the computation is kept. Qwen files also state a sliding
window that `use_sliding_window` switches off; it is left out here.
"""

from typing import Any

from specjax.models import config, transformer


def _llama(
  shape: tuple[int, int, int, int, int],
  *,
  vocab_size: int,
  context: int,
  theta: float,
  tied: bool,
  stretch: float | None = None,
) -> dict[str, Any]:
  """`shape`: layers, width, feed-forward width, heads, key-value heads."""
  settings = {
    'model_type': 'llama',
    **_shape(shape, vocab_size, context, tied),
    'hidden_act': 'silu',
    'rms_norm_eps': 1e-5,
    'rope_theta': theta,
  }
  if stretch is not None:
    settings['rope_scaling'] = {
      'rope_type': 'llama3',
      'factor': stretch,
      'low_freq_factor': 1.0,
      'high_freq_factor': 4.0,
      'original_max_position_embeddings': 8192,
    }
  return settings


def _qwen(
  model_type: str,
  shape: tuple[int, int, int, int, int],
  *,
  context: int,
  tied: bool,
  vocab_size: int = 151936,
  head_dim: int | None = None,
) -> dict[str, Any]:
  settings = {
    'model_type': model_type,
    **_shape(shape, vocab_size, context, tied),
    'hidden_act': 'silu',
    'rms_norm_eps': 1e-6,
    'rope_theta': 1000000.0,
    'use_sliding_window': False,
  }
  if head_dim is not None:
    settings['head_dim'] = head_dim
  return settings


def _gemma3(
  shape: tuple[int, int, int, int, int],
  *,
  context: int,
  window: int,
  vocab_size: int = 262208,
  head_dim: int = 256,
  score_scalar: int = 256,
  stretch: float | None = None,
) -> dict[str, Any]:
  settings = {
    'model_type': 'gemma3_text',
    **_shape(shape, vocab_size, context, True),
    'head_dim': head_dim,
    'hidden_activation': 'gelu_pytorch_tanh',
    'rms_norm_eps': 1e-6,
    'query_pre_attn_scalar': score_scalar,
    'sliding_window': window,
    'sliding_window_pattern': 6,
    'rope_theta': 1000000.0,
    'rope_local_base_freq': 10000.0,
  }
  if stretch is not None:
    settings['rope_scaling'] = {'rope_type': 'linear', 'factor': stretch}
  return settings


def _shape(
  shape: tuple[int, int, int, int, int],
  vocab_size: int,
  context: int,
  tied: bool,
) -> dict[str, Any]:
  num_layers, width, ffn_width, num_heads, num_kv_heads = shape
  return {
    'vocab_size': vocab_size,
    'hidden_size': width,
    'intermediate_size': ffn_width,
    'num_hidden_layers': num_layers,
    'num_attention_heads': num_heads,
    'num_key_value_heads': num_kv_heads,
    'max_position_embeddings': context,
    'tie_word_embeddings': tied,
  }


def _llama3(shape, *, tied: bool, stretch: float) -> dict[str, Any]:
  return _llama(
    shape,
    vocab_size=128256,
    context=131072,
    theta=500000.0,
    tied=tied,
    stretch=stretch,
  )


def _smollm2(shape, theta: float) -> dict[str, Any]:
  return _llama(shape, vocab_size=49152, context=8192, theta=theta, tied=True)


PRESETS: dict[str, dict[str, Any]] = {
  'llama-2-7b': _llama(
    (32, 4096, 11008, 32, 32),
    vocab_size=32000,
    context=4096,
    theta=10000.0,
    tied=False,
  ),
  'llama-3.1-8b': _llama3((32, 4096, 14336, 32, 8), tied=False, stretch=8.0),
  'llama-3.1-70b': _llama3((80, 8192, 28672, 64, 8), tied=False, stretch=8.0),
  'llama-3.2-1b': _llama3((16, 2048, 8192, 32, 8), tied=True, stretch=32.0),
  'llama-3.2-3b': _llama3((28, 3072, 8192, 24, 8), tied=True, stretch=32.0),
  'smollm2-135m': _smollm2((30, 576, 1536, 9, 3), 100000.0),
  'smollm2-360m': _smollm2((32, 960, 2560, 15, 5), 100000.0),
  'smollm2-1.7b': _smollm2((24, 2048, 8192, 32, 32), 130000.0),
  'mistral-7b-v0.1': {
    'model_type': 'mistral',
    **_shape((32, 4096, 14336, 32, 8), 32000, 32768, False),
    'hidden_act': 'silu',
    'rms_norm_eps': 1e-5,
    'rope_theta': 10000.0,
    'sliding_window': 4096,
  },
  'qwen2.5-0.5b': _qwen(
    'qwen2', (24, 896, 4864, 14, 2), context=32768, tied=True
  ),
  'qwen2.5-1.5b': _qwen(
    'qwen2', (28, 1536, 8960, 12, 2), context=131072, tied=True
  ),
  'qwen2.5-7b': _qwen(
    'qwen2',
    (28, 3584, 18944, 28, 4),
    context=131072,
    tied=False,
    vocab_size=152064,
  ),
  'qwen2.5-coder-0.5b': _qwen(
    'qwen2', (24, 896, 4864, 14, 2), context=32768, tied=True
  ),
  'qwen2.5-coder-1.5b': _qwen(
    'qwen2', (28, 1536, 8960, 12, 2), context=32768, tied=True
  ),
  'qwen2.5-coder-7b': _qwen(
    'qwen2',
    (28, 3584, 18944, 28, 4),
    context=32768,
    tied=False,
    vocab_size=152064,
  ),
  'qwen3-0.6b': _qwen(
    'qwen3',
    (28, 1024, 3072, 16, 8),
    context=40960,
    tied=True,
    head_dim=128,
  ),
  'qwen3-1.7b': _qwen(
    'qwen3',
    (28, 2048, 6144, 16, 8),
    context=40960,
    tied=True,
    head_dim=128,
  ),
  'qwen3-4b': _qwen(
    'qwen3',
    (36, 2560, 9728, 32, 8),
    context=40960,
    tied=True,
    head_dim=128,
  ),
  'qwen3-8b': _qwen(
    'qwen3',
    (36, 4096, 12288, 32, 8),
    context=40960,
    tied=False,
    head_dim=128,
  ),
  'qwen3-32b': _qwen(
    'qwen3',
    (64, 5120, 25600, 64, 8),
    context=40960,
    tied=False,
    head_dim=128,
  ),
  'gemma-3-270m': _gemma3(
    (18, 640, 2048, 4, 1), context=32768, window=512, vocab_size=262144
  ),
  'gemma-3-1b': _gemma3(
    (26, 1152, 6912, 4, 1), context=32768, window=512, vocab_size=262144
  ),
  'gemma-3-4b': _gemma3(
    (34, 2560, 10240, 8, 4), context=131072, window=1024, stretch=8.0
  ),
  'gemma-3-27b': _gemma3(
    (62, 5376, 21504, 32, 16),
    context=131072,
    window=1024,
    head_dim=128,
    score_scalar=168,
    stretch=8.0,
  ),
}


def preset(name: str, dtype: str = 'bfloat16') -> transformer.Transformer:
  """A published model's shape, without its weights.

  Raises:
    ValueError: for an unknown name; lists the known ones.

  >>> preset('smollm2-135m').embed_dim
  576
  """
  if name not in PRESETS:
    raise ValueError(
      f'preset must be one of {", ".join(PRESETS)}, got {name!r}.'
    )
  return config.config_from_hf(PRESETS[name], dtype=dtype)

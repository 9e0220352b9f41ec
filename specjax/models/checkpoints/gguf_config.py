"""What a GGUF header says about the model, in config.json form."""

import math
import re
from typing import Any, Mapping

import numpy as np

_ARCHITECTURES = ('llama', 'qwen2', 'qwen3', 'gemma3')
_SHARED_NAMES = {
  'token_embd': 'model.embed_tokens',
  'output_norm': 'model.norm',
  'output': 'lm_head',
}
_LAYER_NAMES = {
  'attn_norm': 'input_layernorm',
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'attn_q_norm': 'self_attn.q_norm',
  'attn_k_norm': 'self_attn.k_norm',
  'ffn_norm': 'post_attention_layernorm',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
}
# Gemma has norms on both sides of each half of a layer.
_GEMMA_NAMES = _LAYER_NAMES | {
  'ffn_norm': 'pre_feedforward_layernorm',
  'post_attention_norm': 'post_attention_layernorm',
  'post_ffw_norm': 'post_feedforward_layernorm',
}
# What Llama 3 was published with; its files hold the resulting factors only.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192
# Gemma 3: every sixth layer is global; local layers rotate at this base.
_GEMMA_PATTERN, _GEMMA_LOCAL_THETA = 6, 10_000.0
# The one Gemma 3 whose attention scale is not its head size (62 layers, 27B).
_GEMMA_27B_LAYERS = 62


class _Settings:
  """Typed look-ups of `<architecture>.<key>`, each error one sentence."""

  def __init__(self, path: str, architecture: str, metadata: Mapping):
    self.path = path
    self.architecture = architecture
    self.metadata = metadata

  def get(self, key: str, default: Any = None) -> Any:
    return self.metadata.get(f'{self.architecture}.{key}', default)

  def integer(self, key: str, default: int | None = None) -> int:
    value = self.get(key, default)
    if isinstance(value, np.ndarray) and len(set(value.tolist())) == 1:
      value = value.tolist()[0]  # One entry per layer, all alike.
    return self._checked(key, value, int, 'an integer')

  def real(self, key: str, default: float | None = None) -> float:
    value = self.get(key, default)
    return self._checked(key, value, (int, float), 'a finite number')

  def _checked(self, key: str, value: Any, kind: Any, words: str) -> Any:
    if value is None:
      raise ValueError(
        f'{self.path} has no metadata {self.architecture}.{key}.'
      )
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not (is_number and 0 < value < math.inf):
      raise ValueError(
        f'{self.path}: metadata {self.architecture}.{key} must be {words} '
        f'> 0, got {value!r}.'
      )
    return value


def _architecture(path: str, metadata: Mapping[str, Any]) -> str:
  architecture = metadata.get('general.architecture')
  if architecture not in _ARCHITECTURES:
    raise ValueError(
      f'{path}: architecture {architecture!r} is not supported; allowed are '
      f'{", ".join(_ARCHITECTURES)}.'
    )
  return architecture


def hugging_face_names(
  path: str, metadata: Mapping[str, Any], shapes: Mapping[str, Any]
) -> dict[str, str]:
  """Hugging Face name to the name in the file, for every tensor.

  Args:
    path: the file, for messages.
    metadata: its key-value part.
    shapes: its tensors.

  Raises:
    ValueError: naming the tensors that the architecture does not have.

  >>> hugging_face_names('x', {'general.architecture': 'llama'},
  ...                    {'blk.3.attn_q.weight': (8, 8)})
  {'model.layers.3.self_attn.q_proj.weight': 'blk.3.attn_q.weight'}
  """
  architecture = _architecture(path, metadata)
  layer_names = _GEMMA_NAMES if architecture == 'gemma3' else _LAYER_NAMES
  names, unknown = {}, []
  for name in shapes:
    layer = re.fullmatch(r'blk\.(\d{1,5})\.(\w+)\.(weight|bias)', name)
    shared = re.fullmatch(r'(\w+)\.(weight|bias)', name)
    if layer and layer[2] in layer_names:
      theirs = f'model.layers.{int(layer[1])}.{layer_names[layer[2]]}'
      names[f'{theirs}.{layer[3]}'] = name
    elif shared and shared[1] in _SHARED_NAMES:
      names[f'{_SHARED_NAMES[shared[1]]}.{shared[2]}'] = name
    else:
      unknown.append(name)
  if unknown:
    some = ', '.join(sorted(unknown)[:8])
    raise ValueError(
      f'{path}: {len(unknown)} tensors do not belong to architecture '
      f'{architecture}: {some}.'
    )
  return names


def llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
  """By what Llama 3 divides each frequency, float64 [head_dim / 2].

  Source: the Llama 3.1 release; Dubey et al., arXiv:2407.21783, section 3.2.

  >>> llama3_factors(5e5, 128, 8.0)[[0, 28, 35, 63]]
  array([1., 1., 8., 8.])
  """
  frequency = theta ** -(np.arange(0, head_dim, 2) / head_dim)
  # Turns within the original context: many are kept, few are slowed down.
  turns = _LLAMA3_ORIGINAL * frequency / (2 * math.pi)
  share = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
  share = np.clip(share, 0.0, 1.0)
  return 1.0 / ((1.0 - share) / factor + share)


def _llama3_scaling(
  path: str, theta: float, head_dim: int, factors: np.ndarray
) -> dict | None:
  factor = round(float(factors.max()), 3)
  if factors.shape == (head_dim // 2,) and factor >= 1.0:
    expected = llama3_factors(theta, head_dim, factor)
    if np.allclose(factors, expected, rtol=1e-3, atol=0.0):
      if factor == 1.0:
        return None
      return {
        'rope_type': 'llama3',
        'factor': factor,
        'low_freq_factor': _LLAMA3_LOW,
        'high_freq_factor': _LLAMA3_HIGH,
        'original_max_position_embeddings': _LLAMA3_ORIGINAL,
      }
  raise ValueError(
    f'{path}: rope_freqs.weight does not follow the Llama 3 rule with '
    f'low_freq_factor {_LLAMA3_LOW}, high_freq_factor {_LLAMA3_HIGH} and '
    f'original context {_LLAMA3_ORIGINAL}, the only one allowed.'
  )


def _rope_scaling(settings: _Settings) -> dict | None:
  kind = settings.get('rope.scaling.type', 'none')
  if settings.get('rope.scale_linear') is not None:  # The key before 2023-10.
    factor = settings.real('rope.scale_linear')
    return None if factor == 1 else {'rope_type': 'linear', 'factor': factor}
  if kind == 'none':
    return None
  if kind == 'linear':
    factor = settings.real('rope.scaling.factor')
    return {'rope_type': 'linear', 'factor': factor}
  if kind == 'yarn':
    return {
      'rope_type': 'yarn',
      'factor': settings.real('rope.scaling.factor'),
      'original_max_position_embeddings': settings.integer(
        'rope.scaling.original_context_length'
      ),
    }
  raise ValueError(
    f'{settings.path}: rope scaling {kind!r} is not supported; allowed are '
    'none, linear, yarn.'
  )


def _gemma3(settings: _Settings, config: dict) -> dict:
  """What only Gemma 3 has; the file does not hold all of it."""
  num_layers = config['num_hidden_layers']
  pattern = settings.integer('attention.sliding_window_pattern', _GEMMA_PATTERN)
  scalar = config['head_dim']
  if num_layers == _GEMMA_27B_LAYERS:
    scalar = config['hidden_size'] // config['num_attention_heads']
  return {
    'model_type': 'gemma3_text',
    'hidden_activation': 'gelu_pytorch_tanh',
    'query_pre_attn_scalar': scalar,
    'sliding_window': settings.integer('attention.sliding_window'),
    'sliding_window_pattern': pattern,
    'layer_types': [
      'sliding_attention' if (i + 1) % pattern else 'full_attention'
      for i in range(num_layers)
    ],
    'rope_local_base_freq': settings.real(
      'rope.freq_base_swa', _GEMMA_LOCAL_THETA
    ),
    'attn_logit_softcapping': settings.get('attn_logit_softcapping'),
    'final_logit_softcapping': settings.get('final_logit_softcapping'),
  }


def read_config(
  path: str,
  metadata: Mapping[str, Any],
  shapes: Mapping[str, tuple[int, ...]],
  rope_factors: np.ndarray | None,
) -> dict[str, Any]:
  """The model's configuration, as its config.json would say it.

  Args:
    path: the file, for messages.
    metadata: its key-value part.
    shapes: its tensors, by their names in the file, [out, in].
    rope_factors: the values of `rope_freqs.weight`, or None.

  Raises:
    ValueError: unknown architecture or scaling, missing or absurd setting.
  """
  architecture = _architecture(path, metadata)
  settings = _Settings(path, architecture, metadata)
  if metadata.get('split.count', 1) not in (0, 1):
    raise ValueError(
      f'{path} is one of {metadata["split.count"]} parts; only GGUF files in '
      'one part are supported.'
    )
  if len(shapes.get('token_embd.weight', ())) != 2:
    raise ValueError(f'{path} has no tensor token_embd.weight with two axes.')
  vocab_size, hidden_size = shapes['token_embd.weight']
  num_heads = settings.integer('attention.head_count')
  config = {
    'model_type': architecture,
    'hidden_size': settings.integer('embedding_length'),
    'num_hidden_layers': settings.integer('block_count'),
    'num_attention_heads': num_heads,
    'num_key_value_heads': settings.integer(
      'attention.head_count_kv', num_heads
    ),
    'head_dim': settings.integer(
      'attention.key_length', max(1, hidden_size // num_heads)
    ),
    'intermediate_size': settings.integer('feed_forward_length'),
    'rms_norm_eps': settings.real('attention.layer_norm_rms_epsilon'),
    'rope_theta': float(settings.real('rope.freq_base')),
    'rope_scaling': _rope_scaling(settings),
    'max_position_embeddings': settings.integer('context_length'),
    'vocab_size': vocab_size,
    'tie_word_embeddings': 'output.weight' not in shapes,
  }
  head_dim = config['head_dim']
  _check(path, 'embedding_length', config['hidden_size'], hidden_size)
  for key in ('attention.value_length', 'rope.dimension_count'):
    _check(path, key, settings.integer(key, head_dim), head_dim)
  if config['num_hidden_layers'] > len(shapes):
    raise ValueError(
      f'{path} claims {config["num_hidden_layers"]} layers, but has '
      f'{len(shapes)} tensors.'
    )
  if architecture == 'gemma3':
    return config | _gemma3(settings, config)
  config['hidden_act'] = 'silu'
  if architecture == 'qwen2':  # Its q, k and v always have biases.
    config['use_sliding_window'] = False
  else:
    config['attention_bias'] = 'blk.0.attn_q.bias' in shapes
  if architecture == 'llama':
    config['mlp_bias'] = 'blk.0.ffn_up.bias' in shapes
    if settings.get('attention.sliding_window') is not None:
      config['model_type'] = 'mistral'
      config['sliding_window'] = settings.integer('attention.sliding_window')
    if rope_factors is not None:
      config['rope_scaling'] = _llama3_scaling(
        path, config['rope_theta'], head_dim, rope_factors
      )
  elif rope_factors is not None:
    raise ValueError(
      f'{path}: rope_freqs.weight does not belong to architecture '
      f'{architecture}.'
    )
  return config


def _check(path: str, key: str, got: int, expected: int):
  if got != expected:
    raise ValueError(
      f'{path}: metadata {key} must be {expected} to fit the other sizes, '
      f'got {got}.'
    )

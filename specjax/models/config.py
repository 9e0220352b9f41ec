"""From a published config.json to a `Transformer`, with nothing guessed.

Every key that changes the computation is either understood or refused with a
sentence that names it. A key may be missing only where published files of the
family leave it out; what then holds is written in `_FAMILIES` and is what
transformers documents: rope_theta 10000 for Llama (not with llama3 scaling);
1000000, and 10000 in sliding layers, for Gemma 3; no default elsewhere.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from specjax.models import layers, rope, transformer

Config = Mapping[str, Any]

_MAX_LAYERS = 1000  # Refused before a list of them is made.
_MAX_INT = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Family:
  """What a `model_type` means beyond the numbers in its config.

  Attributes:
    architecture: the name in `architectures`.
    windows: 'none', 'all' layers, a 'flag' (use_sliding_window), or a
      'pattern' of windowed and full layers.
    qkv_bias: queries, keys and values always have biases.
    biases: the config keys that add biases, of which each may be left out.
    qk_norm, post_norms: see `Transformer`.
    scaled_embedding: embeddings are multiplied by sqrt(D).
    norm_offset: checkpoints hold w where the norm multiplies by 1 + w.
    theta: the base where a config names none; None refuses such a config.
    local_theta: the same for sliding layers that have their own base.
    defaults: what else a config may leave out.
  """

  architecture: str
  windows: str
  qkv_bias: bool = False
  biases: tuple[str, ...] = ()
  qk_norm: bool = False
  post_norms: bool = False
  scaled_embedding: bool = False
  norm_offset: bool = False
  theta: float | None = None
  local_theta: float | None = None
  defaults: tuple[tuple[str, Any], ...] = ()


_FAMILIES = {
  # Llama 1 and 2 were published without rope_theta, Llama 1 without
  # num_key_value_heads.
  'llama': _Family(
    architecture='LlamaForCausalLM',
    windows='none',
    biases=('attention_bias', 'mlp_bias'),
    theta=10000.0,
    defaults=(('num_key_value_heads', None),),
  ),
  'mistral': _Family(architecture='MistralForCausalLM', windows='all'),
  'qwen2': _Family(
    architecture='Qwen2ForCausalLM', windows='flag', qkv_bias=True
  ),
  'qwen3': _Family(
    architecture='Qwen3ForCausalLM',
    windows='flag',
    biases=('attention_bias',),
    qk_norm=True,
  ),
  # The text part of the published Gemma 3 4B states six keys in all.
  'gemma3_text': _Family(
    architecture='Gemma3ForCausalLM',
    windows='pattern',
    biases=('attention_bias',),
    qk_norm=True,
    post_norms=True,
    scaled_embedding=True,
    norm_offset=True,
    theta=1000000.0,
    local_theta=10000.0,
    defaults=(
      ('vocab_size', 262208),
      ('num_attention_heads', 8),
      ('num_key_value_heads', 4),
      ('head_dim', 256),
      ('hidden_activation', 'gelu_pytorch_tanh'),
      ('max_position_embeddings', 131072),
      ('rms_norm_eps', 1e-6),
      ('query_pre_attn_scalar', 256),
      ('sliding_window_pattern', 6),
      ('tie_word_embeddings', True),
    ),
  ),
}
# Gemma 3 with a vision tower: its text model is the `text_config` inside.
_MULTIMODAL = {'gemma3': 'Gemma3ForConditionalGeneration'}

_ROPE_NUMBERS = {
  'default': (),
  'linear': ('factor',),
  'llama3': (
    'factor',
    'low_freq_factor',
    'high_freq_factor',
    'original_max_position_embeddings',
  ),
}
FULL, SLIDING = 'full_attention', 'sliding_attention'


def config_from_hf(
  config: Config,
  vocab_size: int | None = None,
  dtype: str = 'bfloat16',
  quantize: str = 'none',
) -> transformer.Transformer:
  """The model that a config.json describes.

  Args:
    config: the parsed file, of model_type llama, mistral, qwen2, qwen3,
      gemma3_text, or gemma3 (of which the text model is taken).
    vocab_size: how many ids the tokenizer has, where the embedding is padded
      beyond them; None: every row is a token.
    dtype: 'float32' or 'bfloat16', for weights, activations and cache.
    quantize: 'none', or 'int8' for every matrix.

  Raises:
    ValueError: a missing key, or a value that is not supported; it names both
      the value and what is allowed.

  >>> from specjax.models import presets
  >>> model = config_from_hf(presets.PRESETS['qwen3-0.6b'])
  >>> model.num_layers, model.qk_norm, model.num_heads * model.head_dim
  (28, True, 2048)
  """
  config = text_config(config)
  family = _family(config)
  config = {**dict(family.defaults), **config}
  _refuse_unsupported(config)

  embed_dim = _positive_int(config, 'hidden_size')
  num_layers = _positive_int(config, 'num_hidden_layers')
  if num_layers > _MAX_LAYERS:
    raise ValueError(
      f'num_hidden_layers must be at most {_MAX_LAYERS}, got {num_layers}.'
    )
  num_heads = _positive_int(config, 'num_attention_heads')
  num_kv_heads = num_heads
  if _get(config, 'num_key_value_heads') is not None:
    num_kv_heads = _positive_int(config, 'num_key_value_heads')
  head_dim = _head_dim(config, family, embed_dim, num_heads)
  padded_vocab_size = _positive_int(config, 'vocab_size')
  layer_types, window = _layer_types(config, family, num_layers)
  ropes = {t: _rope(config, family, t) for t in dict.fromkeys(layer_types)}
  activation_key = 'hidden_act'
  if 'hidden_activation' in config:
    activation_key = 'hidden_activation'
  activation = _get(config, activation_key)
  if activation not in layers.ACTIVATIONS:
    raise ValueError(
      f'{activation_key} must be one of {", ".join(layers.ACTIVATIONS)}, '
      f'got {activation!r}.'
    )
  score_scale = head_dim**-0.5
  if 'query_pre_attn_scalar' in config:
    score_scale = _positive(config, 'query_pre_attn_scalar') ** -0.5
  has_bias = {key: bool(config.get(key)) for key in family.biases}
  softcap = config.get('final_logit_softcapping')
  return transformer.Transformer(
    vocab_size=padded_vocab_size if vocab_size is None else vocab_size,
    padded_vocab_size=padded_vocab_size,
    context_length=_positive_int(config, 'max_position_embeddings'),
    embed_dim=embed_dim,
    ffn_dim=_positive_int(config, 'intermediate_size'),
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    windows=tuple(window if t == SLIDING else None for t in layer_types),
    ropes=tuple(ropes[t] for t in layer_types),
    activation=activation,
    norm_eps=_positive(config, 'rms_norm_eps'),
    score_scale=score_scale,
    qk_norm=family.qk_norm,
    post_norms=family.post_norms,
    qkv_bias=family.qkv_bias or has_bias.get('attention_bias', False),
    out_bias=has_bias.get('attention_bias', False),
    ffn_bias=has_bias.get('mlp_bias', False),
    embed_scale=embed_dim**0.5 if family.scaled_embedding else None,
    tied=bool(config.get('tie_word_embeddings', False)),
    logit_softcap=softcap if softcap is None else float(softcap),
    dtype=dtype,
    quantize=quantize,
  )


def stop_ids_from_hf(
  config: Config, generation_config: Config | None = None
) -> tuple[int, ...]:
  """The ids that end a text, in the order given.

  `eos_token_id` may be one id or a list; generation_config.json wins over
  config.json, because published chat models name all their stop ids there.

  Raises:
    ValueError: `eos_token_id` is neither an id nor a list of them.

  >>> stop_ids_from_hf({'eos_token_id': 2}, {'eos_token_id': [5, 7, 2]})
  (5, 7, 2)
  """
  for source in (
    generation_config or {},
    config,
    config.get('text_config') or {},
  ):
    value = source.get('eos_token_id')
    if value is None:
      continue
    ids = value if isinstance(value, (list, tuple)) else [value]
    for i in ids:
      if not _is_int(i) or i < 0:
        raise ValueError(
          f'eos_token_id must be an id >= 0 or a list of them, got {value!r}.'
        )
    return tuple(dict.fromkeys(ids))
  return ()


def text_config(config: Config) -> Config:
  """The part that describes the language model.

  Raises:
    ValueError: a multimodal config has no `text_config`.
  """
  if config.get('model_type') not in _MULTIMODAL:
    return config
  inner = config.get('text_config')
  if not isinstance(inner, Mapping):
    raise ValueError(
      f'text_config must be present for model_type {config["model_type"]!r}.'
    )
  inner = {'model_type': f'{config["model_type"]}_text', **inner}
  if 'tie_word_embeddings' in config:
    inner.setdefault('tie_word_embeddings', config['tie_word_embeddings'])
  return inner


def is_multimodal(config: Config) -> bool:
  """Whether the checkpoint holds a vision tower beside the language model."""
  return config.get('model_type') in _MULTIMODAL


def has_norm_offset(config: Config) -> bool:
  """Whether published checkpoints hold w for norms that multiply by 1 + w."""
  return _family(text_config(config)).norm_offset


def _family(config: Config) -> _Family:
  allowed = ', '.join([*_FAMILIES, *_MULTIMODAL])
  model_type = config.get('model_type')
  if model_type is None:
    names = config.get('architectures')
    names = names if isinstance(names, list) else []
    for family in _FAMILIES.values():
      if family.architecture in names:
        return family
    raise ValueError(
      f'model_type must be one of {allowed}, got none '
      f'(architectures {list(names)}).'
    )
  if model_type not in _FAMILIES:
    raise ValueError(
      f'model_type must be one of {allowed}, got {model_type!r}.'
    )
  return _FAMILIES[model_type]


def _refuse_unsupported(config: Config):
  """Keys of these families that would change the result and are not built."""
  for key, neutral in (
    ('quantization_config', None),
    ('attn_logit_softcapping', None),
    ('use_bidirectional_attention', False),
    ('partial_rotary_factor', 1.0),
    ('rope_interleaved', False),
    ('use_mrope', False),
  ):
    value = config.get(key)
    if value is not None and value != neutral:
      raise ValueError(
        f'{key} is not supported: it must be absent or {neutral}, '
        f'got {value!r}.'
      )


def _get(config: Config, key: str) -> Any:
  if key not in config:
    raise ValueError(f'{key} is missing from the config.')
  return config[key]


def _is_int(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _positive_int(config: Config, key: str) -> int:
  value = _get(config, key)
  if not _is_int(value) or value <= 0:
    raise ValueError(f'{key} must be an integer > 0, got {value!r}.')
  if value > _MAX_INT:
    raise ValueError(f'{key} must be at most {_MAX_INT}, got {value}.')
  return value


def _positive(config: Config, key: str) -> float:
  value = _get(config, key)
  is_number = isinstance(value, float) or _is_int(value)
  if not is_number or not 0 < value < math.inf:
    raise ValueError(f'{key} must be a finite number > 0, got {value!r}.')
  return float(value)


def _head_dim(
  config: Config, family: _Family, embed_dim: int, num_heads: int
) -> int:
  if config.get('head_dim') is not None:
    return _positive_int(config, 'head_dim')
  # With norms on queries and keys the head size is a free choice, and D / H
  # would be a guess.
  if family.qk_norm:
    raise ValueError('head_dim is missing from the config.')
  if embed_dim % num_heads:
    raise ValueError(
      f'hidden_size must be a multiple of num_attention_heads = {num_heads} '
      f'where head_dim is absent, got {embed_dim}.'
    )
  return embed_dim // num_heads


def _layer_types(
  config: Config, family: _Family, num_layers: int
) -> tuple[tuple[str, ...], int | None]:
  """Each layer's type, and how far the sliding ones see."""
  window = None
  if family.windows in ('all', 'pattern') or (
    family.windows == 'flag' and config.get('use_sliding_window')
  ):
    window = _get(config, 'sliding_window')
  stated = config.get('layer_types')
  if stated is not None:
    layer_types = tuple(stated)
    if len(layer_types) != num_layers or set(layer_types) - {FULL, SLIDING}:
      raise ValueError(
        f'layer_types must be {num_layers} times {FULL} or {SLIDING}, '
        f'got {list(layer_types)}.'
      )
  elif family.windows == 'pattern':
    period = _positive_int(config, 'sliding_window_pattern')
    layer_types = tuple(
      FULL if (i + 1) % period == 0 else SLIDING for i in range(num_layers)
    )
  elif window is None:
    layer_types = (FULL,) * num_layers
  else:
    num_full = 0
    if family.windows == 'flag':
      num_full = _get(config, 'max_window_layers')
      if not _is_int(num_full) or num_full < 0:
        raise ValueError(
          f'max_window_layers must be an integer >= 0, got {num_full!r}.'
        )
    layer_types = tuple(
      FULL if i < num_full else SLIDING for i in range(num_layers)
    )
  is_window = _is_int(window) and 0 < window <= _MAX_INT
  if SLIDING in layer_types and not is_window:
    raise ValueError(
      f'sliding_window must be an integer > 0 where layers are {SLIDING} '
      '(with use_sliding_window true, in families that have it), '
      f'got {window!r}.'
    )
  return layer_types, window


def _rope(config: Config, family: _Family, layer_type: str) -> rope.Rope:
  """A layer's rotation, from whichever spelling the config uses.

  Spellings: `rope_theta` with `rope_scaling` at the top; `rope_parameters`
  with everything inside; either of the two per layer type. Where sliding
  layers have a base of their own, flat settings speak of the other layers.
  """
  is_local = layer_type == SLIDING and family.local_theta is not None
  theta_key = 'rope_local_base_freq' if is_local else 'rope_theta'
  default = family.local_theta if is_local else family.theta
  stated = config.get(theta_key)
  found = []
  for source in ('rope_scaling', 'rope_parameters'):
    settings = config.get(source)
    if settings is None or settings == {}:
      continue
    if not isinstance(settings, Mapping):
      raise ValueError(f'{source} must be an object, got {settings!r:.60}.')
    if FULL in settings or SLIDING in settings:
      if not isinstance(settings.get(layer_type), Mapping):
        raise ValueError(f'{source} must have settings for {layer_type}.')
      found.append(_rope_from(settings[layer_type], source, stated, None))
    elif not is_local:
      # Files with rope_parameters keep theta inside: one without has lost it.
      fallback = default if source == 'rope_scaling' else None
      found.append(_rope_from(settings, source, stated, fallback))
  if not found:
    return _rope_from({}, theta_key, stated, default)
  if len(set(found)) > 1:
    raise ValueError(
      f'rope_scaling and rope_parameters must agree, got {found[0]} and '
      f'{found[1]}.'
    )
  return found[0]


def _rope_from(
  settings: Config,
  source: str,
  stated_theta: Any,
  default_theta: float | None,
) -> rope.Rope:
  settings = {k: v for k, v in settings.items() if v is not None}
  kind = settings.pop('rope_type', settings.get('type', 'default'))
  settings.pop('type', None)
  if kind not in rope.KINDS:
    raise ValueError(
      f'rope_type must be one of {", ".join(rope.KINDS)}, got {kind!r} in '
      f'{source}.'
    )
  theta = settings.pop('rope_theta', stated_theta)
  if stated_theta is not None and theta != stated_theta:
    raise ValueError(
      f'rope_theta must be the same in {source} and beside it, got {theta} '
      f'and {stated_theta}.'
    )
  # Whoever stretches the context by wavelength states the base as well.
  if theta is None and kind != 'llama3':
    theta = default_theta
  if theta is None:
    raise ValueError('rope_theta is missing from the config.')
  if settings.pop('partial_rotary_factor', 1.0) != 1.0:
    raise ValueError(
      f'partial_rotary_factor must be absent or 1.0 in {source}.'
    )
  names = _ROPE_NUMBERS[kind]
  unknown = sorted(set(settings) - set(names))
  if unknown:
    raise ValueError(
      f'{source} of rope_type {kind!r} may hold rope_theta'
      f'{"".join(", " + name for name in names)}, got {", ".join(unknown)}.'
    )
  numbers = {name: _positive(settings, name) for name in names}
  if 'original_max_position_embeddings' in numbers:
    numbers['original_context'] = int(
      numbers.pop('original_max_position_embeddings')
    )
  theta = _positive({'rope_theta': theta}, 'rope_theta')
  return rope.Rope(theta=theta, kind=kind, **numbers)

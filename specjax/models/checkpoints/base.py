"""The one form in which every file format delivers a model, and its loading.

A reader turns files into a `Checkpoint`: names and shapes at once, values one
tensor at a time. `load_params` then fills a model's parameters, strictly in
both directions: no tensor is left over and no parameter is left out.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sharding
from specjax.models import config as model_config
from specjax.models import quantize, transformer
from specjax.models.checkpoints import convert
from specjax.shapes import Params

_LAYER_NAMES = {
  'attn_norm': 'input_layernorm.weight',
  'q': 'self_attn.q_proj.weight',
  'k': 'self_attn.k_proj.weight',
  'v': 'self_attn.v_proj.weight',
  'o': 'self_attn.o_proj.weight',
  'q_bias': 'self_attn.q_proj.bias',
  'k_bias': 'self_attn.k_proj.bias',
  'v_bias': 'self_attn.v_proj.bias',
  'o_bias': 'self_attn.o_proj.bias',
  'q_norm': 'self_attn.q_norm.weight',
  'k_norm': 'self_attn.k_norm.weight',
  'ffn_norm': 'post_attention_layernorm.weight',
  'gate': 'mlp.gate_proj.weight',
  'up': 'mlp.up_proj.weight',
  'down': 'mlp.down_proj.weight',
  'gate_bias': 'mlp.gate_proj.bias',
  'up_bias': 'mlp.up_proj.bias',
  'down_bias': 'mlp.down_proj.bias',
}
# With norms on both sides of a half block the one after attention takes the
# name that elsewhere belongs to the one before the feed-forward.
_POST_NORM_NAMES = {
  'post_attn_norm': 'post_attention_layernorm.weight',
  'ffn_norm': 'pre_feedforward_layernorm.weight',
  'post_ffn_norm': 'post_feedforward_layernorm.weight',
}
_EMBED, _HEAD = 'model.embed_tokens.weight', 'lm_head.weight'

# Buffers that old files carry and that follow from the config.
_BUFFERS = ('rotary_emb.inv_freq',)
# What a model that also sees images holds beside its language model.
_VISION = ('vision_tower.', 'multi_modal_projector.')

_MAX_NAMES_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A published model as its files have it.

  Attributes:
    config: in the form of a config.json.
    shapes: tensor name in Hugging Face form
      ('model.layers.0.self_attn.q_proj.weight') to its shape, [out, in].
    read: one tensor by its name, an array or something whose rows are read
      when they are asked for; nothing is read before.
    norms_have_one_added: in families whose norms multiply by 1 + w, whether
      the file holds 1 + w (GGUF) and not w.
    stop_ids: the ids that end a text.
  """

  config: dict[str, Any]
  shapes: dict[str, tuple[int, ...]]
  read: Callable[[str], convert.Tensor]
  norms_have_one_added: bool = False
  stop_ids: tuple[int, ...] = ()


def hf_names(model: transformer.Transformer) -> Params:
  """The tree of `model.param_specs()` with tensor names for leaves."""
  layer_names = dict(_LAYER_NAMES)
  if model.post_norms:
    layer_names.update(_POST_NORM_NAMES)
  specs = model.param_specs()
  names = {
    'embed': _EMBED,
    'layers': tuple(
      {key: f'model.layers.{i}.{layer_names[key]}' for key in layer}
      for i, layer in enumerate(specs['layers'])
    ),
    'final_norm': 'model.norm.weight',
  }
  if 'head' in specs:
    names['head'] = _HEAD
  return names


def load_params(
  model: transformer.Transformer, checkpoint: Checkpoint
) -> Params:
  """The checkpoint's tensors as the model's parameters.

  Tensors are read, checked, converted and put into their shards one at a time,
  and each a few rows at a time: the peak is the parameters, and beside a mesh
  or an accelerator one tensor. int8 weights are rounded once, from the file's
  values. A tied model's file may hold the output head as well; it must equal
  the embedding.

  Args:
    model: usually `config_from_hf(checkpoint.config, ...)`; its dtype is the
      dtype of the weights. Norm scales are float32, with the one of 1 + w
      added.
    checkpoint: from a reader.

  Returns:
    A tree like `model.param_specs()`.

  Raises:
    ValueError: before anything is read, if names are missing or unexpected or
      shapes differ; afterwards, if a tensor holds a NaN or an infinity, or a
      tied head is not the embedding.
  """
  own_names = _own_names(checkpoint)
  names = hf_names(model)
  # What the files hold is the float model, whatever becomes of it.
  plain_specs = dataclasses.replace(model, quantize='none').param_specs()
  specs = {
    name: spec
    for name, spec in zip(
      jax.tree.leaves(names),
      jax.tree.leaves(plain_specs, is_leaf=sharding.is_spec),
    )
  }
  has_spare_head = model.tied and _HEAD in own_names
  if has_spare_head:
    specs[_HEAD] = specs[_EMBED]
  _check_names(specs, own_names, model)
  _check_shapes(specs, own_names, checkpoint)

  add_one = (
    model_config.has_norm_offset(checkpoint.config)
    and not checkpoint.norms_have_one_added
  )

  def read(name: str) -> np.ndarray | quantize.Int8Weight:
    spec = specs[name]
    tensor = checkpoint.read(own_names[name])
    if tuple(tensor.shape) != spec.shape:
      raise ValueError(
        f'{name} must have shape {spec.shape}, got {tuple(tensor.shape)}.'
      )
    if not quantize.is_quantized(spec):
      is_norm = name.endswith('norm.weight')
      value = convert.to_float(tensor, spec.dtype, add_one and is_norm)
    elif model.quantize == 'int8':
      value = convert.to_int8(tensor, pool)
    else:
      value = convert.to_matrix(tensor, spec.dtype, pool)
    if value is None:
      raise ValueError(f'{name} must be finite, it has a NaN or an infinity.')
    return value

  def place(name: str, spec: Any) -> Any:
    return sharding.put_params(spec, read(name), model.placement)

  own_specs = model.param_specs()
  with convert.thread_pool() as pool:
    params = jax.tree.map(place, names, own_specs)
    if has_spare_head:
      head = place(_HEAD, own_specs['embed'])
  if has_spare_head and not jax.tree.all(
    jax.tree.map(jnp.array_equal, head, params['embed'])
  ):
    raise ValueError(
      f'{_HEAD} must equal {_EMBED} where tie_word_embeddings is true.'
    )
  return params


def _own_names(checkpoint: Checkpoint) -> dict[str, str]:
  """Our name of every tensor to load, to the checkpoint's own name."""
  is_multimodal = model_config.is_multimodal(checkpoint.config)
  own_names = {}
  for own_name in checkpoint.shapes:
    name = own_name
    if is_multimodal:
      # Two generations of files: 'language_model.model.layers...' and
      # 'model.language_model.layers...'.
      if name.removeprefix('model.').startswith(_VISION):
        continue
      name = name.replace('model.language_model.', 'model.', 1)
      name = name.removeprefix('language_model.')
    if not name.endswith(_BUFFERS):
      own_names[name] = own_name
  return own_names


def _check_names(specs, own_names, model: transformer.Transformer):
  missing = sorted(set(specs) - set(own_names))
  unexpected = sorted(set(own_names) - set(specs))
  if not missing and not unexpected:
    return
  problems = []
  for kind, names in (('missing', missing), ('unexpected', unexpected)):
    if names:
      shown = ', '.join(names[:_MAX_NAMES_SHOWN])
      if len(names) > _MAX_NAMES_SHOWN:
        shown += f' and {len(names) - _MAX_NAMES_SHOWN} more'
      problems.append(f'{kind}: {shown}')
  if _HEAD in missing and not model.tied:
    problems.append(f'{_HEAD} is needed, tie_word_embeddings is false')
  raise ValueError(
    f'the checkpoint must hold exactly the tensors of its config; '
    f'{"; ".join(problems)}.'
  )


def _check_shapes(specs, own_names, checkpoint: Checkpoint):
  wrong = []
  for name, spec in sorted(specs.items()):
    got = tuple(checkpoint.shapes[own_names[name]])
    if got != spec.shape:
      wrong.append(f'{name} must have shape {spec.shape}, got {got}')
  if wrong:
    shown = '; '.join(wrong[:_MAX_NAMES_SHOWN])
    if len(wrong) > _MAX_NAMES_SHOWN:
      shown += f'; and {len(wrong) - _MAX_NAMES_SHOWN} more'
    raise ValueError(f'{shown}.')

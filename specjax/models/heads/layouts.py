"""How authors and serving engines lay heads out: names, and what configs say.

  medusa   0.0.linear.weight 0.0.linear.bias ... 0.1.weight     head 0, block 0
           (before it 'medusa_head.'; or vLLM's blocks.0.layers.0, lm_heads.0)
  eagle    fc.weight fc.bias layers.0.self_attn.q_proj.weight ...
  eagle3   fc.weight midlayer.hidden_norm.weight ... norm lm_head d2t t2d
  mtp      model.layers.N.{enorm,hnorm,eh_proj,shared_head.norm}.weight and a
           block, N behind the target's layers; or MiMo's model.mtp_layers.0;
           with a reduced vocabulary shared_head.head is its own, beside d2t t2d

`d2t[i]` is the target's id of the head's id i, *less i*.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from specjax.models import config as model_config
from specjax.models.checkpoints import base as checkpoints
from specjax.models.heads.build import Head
from specjax.models.heads.eagle import Eagle
from specjax.models.heads.eagle3 import Eagle3, default_layers
from specjax.models.heads.medusa import MedusaHeads
from specjax.models.heads.mtp import MTP
from specjax.models.rope import Rope
from specjax.models.transformer import Transformer
from specjax.shapes import Params

Config = Mapping[str, Any]
# The target's own, which files may hold as well.
EMBED, OUTPUT_HEAD = 'embed_tokens.weight', 'lm_head.weight'
# Of a layer whose attention reads embeddings beside the stream.
_SIDE_NORM = 'input_layernorm.weight'
_MTP_HEAD = 'shared_head.head.weight'
_MAX_HEADS, _MAX_BLOCKS = 64, 16


@dataclasses.dataclass(frozen=True)
class Layout:
  """A head, and what a file calls its parameters.

  Attributes:
    head: as the config and the names of the file say.
    names: a tree like `head.param_specs()` with tensor names for leaves.
    shared: names, here or absent, of what must equal the target's embedding,
      or its output head.
    hidden_first: the joint product reads the feature before the embedding.
  """

  head: Head
  names: Params
  shared: tuple[tuple[str, str], ...] = ()
  hidden_first: bool = False


def common_names(kind: str, file_names: list[str]) -> dict[str, str]:
  """The authors' name of every tensor, to the file's own name.

  Raises:
    ValueError: two of the file's names stand for one tensor.
  """
  found = {}
  is_eagle3 = 'layers.0.hidden_norm.weight' in (
    name.removeprefix('model.') for name in file_names
  )
  for file_name in file_names:
    name = file_name
    if kind == 'medusa':
      name = name.removeprefix('medusa_head.').removeprefix('medusa_heads.')
      name = re.sub(r'^blocks\.(\d+)\.layers\.(\d+)\.', r'\1.\2.linear.', name)
    elif kind == 'eagle':
      name = name.removeprefix('model.')
      if is_eagle3:
        name = re.sub(r'^layers\.0\.', 'midlayer.', name)
    if name in found:
      raise ValueError(
        f'a tensor must be there once, got {found[name]} and {file_name} for '
        f'{name}.'
      )
    found[name] = file_name
  return found


def layout_of(
  kind: str,
  config: Config,
  names: Mapping[str, Any],
  target: Transformer,
  dtype: str,
) -> Layout:
  """What a folder holds.

  Args:
    kind: 'medusa', 'mtp' or 'eagle'; EAGLE-3 is told by its names.
    config: of the head.
    names: from `common_names`.
    target: the model it is to draft for.
    dtype: of the head's weights.

  Raises:
    ValueError: the config does not fit the target or is not supported.
  """
  if kind == 'medusa':
    return _medusa(config, names, target, dtype)
  wanted = target.padded_vocab_size
  vocab_size = config.get('vocab_size', wanted)
  if vocab_size not in (wanted, target.vocab_size):
    raise ValueError(
      f"vocab_size of the head must be {wanted}, the target's, got "
      f'{vocab_size}.'
    )
  make = _mtp
  if kind == 'eagle':
    is_third = any(name.startswith('midlayer.') for name in names)
    make = _eagle3 if is_third else _eagle
  return make(config, names, target, dtype)


def _medusa(config, names, target: Transformer, dtype: str) -> Layout:
  def count(keys: tuple[str, str], most: int) -> int:
    value = next((config[key] for key in keys if key in config), None)
    if type(value) is not int or not 1 <= value <= most:
      raise ValueError(f'{keys[0]} must be in 1..{most}, got {value!r}.')
    return value

  num_heads = count(('medusa_num_heads', 'num_heads'), _MAX_HEADS)
  num_layers = count(('medusa_num_layers', 'num_hidden_layers'), _MAX_BLOCKS)
  heads = MedusaHeads(
    target=target,
    num_heads=num_heads,
    num_layers=num_layers,
    own_heads=not config.get('original_lm_head', False),
    dtype=dtype,
  )
  is_vllm = any(name.startswith('lm_heads.') for name in names)
  return Layout(heads, medusa_names(heads, is_vllm=is_vllm))


def medusa_names(heads: MedusaHeads, *, is_vllm: bool = False) -> Params:
  """Output heads stand behind the blocks, or among themselves."""
  found = []
  for i in range(heads.num_heads):
    blocks = tuple(
      {'w': f'{i}.{j}.linear.weight', 'b': f'{i}.{j}.linear.bias'}
      for j in range(heads.num_layers)
    )
    head = {'blocks': blocks}
    if heads.own_heads:
      last = f'{i}.{heads.num_layers}.weight'
      head['head'] = f'lm_heads.{i}.weight' if is_vllm else last
    found.append(head)
  return tuple(found)


def _block(
  config: Config, target: Transformer, dtype: str, **changes
) -> Transformer:
  block = model_config.config_from_hf(config, None, dtype)
  if block.embed_dim != target.embed_dim:
    raise ValueError(
      f"hidden_size of the head must be {target.embed_dim}, the target's, got "
      f'{block.embed_dim}.'
    )
  if block.num_layers != 1:
    raise ValueError(
      f'num_hidden_layers of the head must be 1, got {block.num_layers}.'
    )
  return dataclasses.replace(
    block,
    vocab_size=target.vocab_size,
    padded_vocab_size=target.padded_vocab_size,
    cache_dtype=target.cache_dtype,
    **changes,
  )


def layer_names(block: Transformer, prefix: str) -> tuple[dict[str, str], ...]:
  """Of the block's one layer, as in a language model."""
  (names,) = checkpoints.hf_names(block)['layers']
  start = 'model.layers.0.'
  return ({key: prefix + name[len(start) :] for key, name in names.items()},)


def _eagle(config, names, target: Transformer, dtype: str) -> Layout:
  block = _block(config, target, dtype, input_norm=False)
  head = Eagle(
    target=target,
    block=block,
    # The authors' default; files state it where it is not so.
    fc_bias=bool(config.get('bias', True)),
    own_embed=EMBED in names,
  )
  return Layout(head, eagle_names(head), ((OUTPUT_HEAD, 'head'),))


def eagle_names(head: Eagle) -> Params:
  """The authors' names of an EAGLE head, in the tree of its parameters."""
  names = {'fc': 'fc.weight', 'layers': layer_names(head.block, 'layers.0.')}
  if head.fc_bias:
    names['fc_bias'] = 'fc.bias'
  if head.own_embed:
    names['embed'] = EMBED
  return names


def _eagle3(config, names, target: Transformer, dtype: str) -> Layout:
  for key, wanted in (
    ('norm_before_residual', False),
    ('target_hidden_size', target.embed_dim),
  ):
    if config.get(key, wanted) != wanted:
      raise ValueError(
        f'{key} of the head must be absent or {wanted}, got {config[key]!r}.'
      )
  head = Eagle3(
    target=target,
    block=_block(config, target, dtype, side_dim=target.embed_dim),
    target_features=_captured(config, target),
    num_ids=_num_ids(config, names, target),
    own_embed=EMBED in names,
  )
  return Layout(head, eagle3_names(head))


def _num_ids(config, names, target: Transformer) -> int | None:
  """R of a reduced vocabulary; None where there is no map."""
  size = config.get('draft_vocab_size')
  if 'd2t' not in names:
    if size not in (None, target.vocab_size, target.padded_vocab_size):
      raise ValueError(
        f'd2t is missing, which says what the {size} ids of the head mean.'
      )
    return None
  if type(size) is not int or not 1 <= size <= target.vocab_size:
    raise ValueError(
      f'draft_vocab_size must be in 1..{target.vocab_size}, the ids of the '
      f'target, got {size!r}.'
    )
  return size


def _captured(config: Config, target: Transformer) -> tuple[int, ...]:
  """The layers, from whichever of two spellings the config uses.

  At the top (vLLM) a layer is what is behind so many blocks; inside
  `eagle_config` (SGLang) the first block has the number 0.
  """
  key, found = 'eagle_aux_hidden_state_layer_ids', []
  inner = config.get('eagle_config') or {}
  for source, offset in ((config, 0), (inner, 1)):
    ids = source.get(key) if isinstance(source, Mapping) else None
    if ids is None:
      continue
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
      raise ValueError(f'{key} must be a list of layers, got {ids!r:.60}.')
    found.append(tuple(i + offset for i in ids))
  if len(set(found)) > 1:
    raise ValueError(
      f'{key} must name the same layers in eagle_config, less one each, got '
      f'{list(found[0])} and {[i - 1 for i in found[1]]}.'
    )
  layers = found[0] if found else default_layers(target.num_layers)
  if len(layers) != 3:
    raise ValueError(f'{key} must have three layers, got {list(layers)}.')
  return layers


def eagle3_names(head: Eagle3) -> Params:
  """The authors' names of an EAGLE-3 head, in the tree of its parameters."""
  (layer,) = layer_names(head.block, 'midlayer.')
  layer['attn_norm'] = 'midlayer.hidden_norm.weight'
  names = {
    'fc': 'fc.weight',
    'embed_norm': f'midlayer.{_SIDE_NORM}',
    'layers': (layer,),
    'norm': 'norm.weight',
    'head': OUTPUT_HEAD,
  }
  if head.num_ids is not None:
    names['ids'] = 'd2t'
  if head.own_embed:
    names['embed'] = EMBED
  return names


def _mtp(config, names, target: Transformer, dtype: str) -> Layout:
  number = config.get('num_nextn_predict_layers', 1)
  if number != 1:
    raise ValueError(f'num_nextn_predict_layers must be 1, got {number!r}.')
  pattern = re.compile(r'(model\.(?:mtp_)?layers\.\d+)\.(?:eh|input)_proj\.')
  prefixes = {m[1] for m in map(pattern.match, names) if m}
  if len(prefixes) != 1:
    raise ValueError(
      'an MTP module must be there once, as model.layers.N.eh_proj.weight or '
      'model.mtp_layers.0.input_proj.weight, it is there '
      f'{len(prefixes)} times.'
    )
  config = {**config, 'num_hidden_layers': 1}
  if config.get('model_type') == 'mimo':
    config['model_type'] = 'qwen2'
  (prefix,) = prefixes
  is_mimo = '.mtp_layers.' in prefix
  head = MTP(
    target=target,
    block=_block(config, target, dtype),
    num_ids=None if is_mimo else _num_ids(config, names, target),
  )
  if is_mimo:
    return Layout(head, mimo_names(head, f'{prefix}.'), hidden_first=True)
  shared = [(f'{prefix}.embed_tokens.weight', 'embed')]
  if head.num_ids is None:
    shared.append((f'{prefix}.{_MTP_HEAD}', 'head'))
  return Layout(head, mtp_names(head, f'{prefix}.'), tuple(shared))


def mtp_names(head: MTP, prefix: str) -> Params:
  """DeepSeek-V3's, of a dense block; of the reduced vocabulary EAGLE-3's."""
  names = {
    'embed_norm': f'{prefix}enorm.weight',
    'hidden_norm': f'{prefix}hnorm.weight',
    'proj': f'{prefix}eh_proj.weight',
    'layers': layer_names(head.block, prefix),
    'norm': f'{prefix}shared_head.norm.weight',
  }
  if head.num_ids is not None:
    names |= {'head': f'{prefix}{_MTP_HEAD}', 'ids': 'd2t'}
  return names


def mimo_names(head: MTP, prefix: str) -> Params:
  """MiMo's names of an MTP module, whose tensors begin with `prefix`."""
  return {
    'embed_norm': f'{prefix}token_layernorm.weight',
    'hidden_norm': f'{prefix}hidden_layernorm.weight',
    'proj': f'{prefix}input_proj.weight',
    'layers': layer_names(head.block, prefix),
    'norm': f'{prefix}final_layernorm.weight',
  }


def written(head: Head) -> tuple[str, dict[str, Any], Params]:
  """A head as it is published: file name, config and names."""
  writers: dict[type, Callable] = {
    MedusaHeads: _written_medusa,
    Eagle: _written_eagle,
    Eagle3: _written_eagle3,
    MTP: _written_mtp,
  }
  return writers[type(head)](head)


def _written_medusa(heads: MedusaHeads):
  config = {
    'architectures': ['MedusaModel'],
    'model_type': 'medusa',
    'medusa_num_heads': heads.num_heads,
    'medusa_num_layers': heads.num_layers,
    'original_lm_head': not heads.own_heads,
    'hidden_size': heads.target.embed_dim,
    'vocab_size': heads.target.vocab_size,
  }
  return 'medusa_lm_head.safetensors', config, medusa_names(heads)


def _written_eagle(head: Eagle):
  config = {
    'architectures': ['EagleLlamaForCausalLM'],
    **block_config(head.block, head.target),
    'bias': head.fc_bias,
  }
  return 'model.safetensors', config, eagle_names(head)


def _written_eagle3(head: Eagle3):
  key = 'eagle_aux_hidden_state_layer_ids'
  config = {
    'architectures': ['LlamaForCausalLMEagle3'],
    **block_config(head.block, head.target),
    'draft_vocab_size': head.num_ids or head.vocab_size,
    key: list(head.target_features),
  }
  if min(head.target_features) > 0:
    config['eagle_config'] = {
      key: [i - 1 for i in head.target_features],
      'use_aux_hidden_state': True,
    }
  return 'model.safetensors', config, eagle3_names(head)


def _written_mtp(head: MTP):
  number = head.target.num_layers
  config = {
    'architectures': ['DeepSeekMTPModel'],
    **block_config(head.block, head.target),
    'num_hidden_layers': number,
    'num_nextn_predict_layers': 1,
  }
  if head.num_ids is not None:
    config['draft_vocab_size'] = head.num_ids
  names = mtp_names(head, f'model.layers.{number}.')
  return 'model.safetensors', config, names


def block_config(block: Transformer, target: Transformer) -> dict[str, Any]:
  """The block in the form of a config.json; read back, it is the same.

  Raises:
    ValueError: the block is not of a form that configs of heads have.
  """
  config = {
    'model_type': 'llama',
    'hidden_size': block.embed_dim,
    'intermediate_size': block.ffn_dim,
    'num_hidden_layers': 1,
    'num_attention_heads': block.num_heads,
    'num_key_value_heads': block.num_kv_heads,
    'head_dim': block.head_dim,
    'hidden_act': block.activation,
    'max_position_embeddings': block.context_length,
    'rms_norm_eps': block.norm_eps,
    'vocab_size': target.padded_vocab_size,
    'attention_bias': block.out_bias,
    'mlp_bias': block.ffn_bias,
    'tie_word_embeddings': False,
    **_rope_config(block.ropes[0]),
  }
  if block.qkv_bias and not block.out_bias:
    config['model_type'] = 'qwen2'
    config['use_sliding_window'] = False
  again = dataclasses.replace(
    model_config.config_from_hf(config, block.vocab_size, block.dtype),
    **{
      name: getattr(block, name)
      for name in (
        'input_norm',
        'side_dim',
        'cache_dtype',
        'placement',
        'padded_vocab_size',
      )
    },
  )
  if again != block:
    raise ValueError(
      "a head's layer must have Llama's form to be written, without norms of "
      'queries and keys, norms behind its halves, and windows.'
    )
  return config


def _rope_config(rope: Rope) -> dict[str, Any]:
  scaling = None
  if rope.kind != 'default':
    scaling = {'rope_type': rope.kind, 'factor': rope.factor}
  if rope.kind == 'llama3':
    scaling |= {
      'low_freq_factor': rope.low_freq_factor,
      'high_freq_factor': rope.high_freq_factor,
      'original_max_position_embeddings': rope.original_context,
    }
  return {'rope_theta': rope.theta, 'rope_scaling': scaling}

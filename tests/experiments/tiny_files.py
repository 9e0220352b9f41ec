"""Tiny model files, written by tests: a Hugging Face folder and a GGUF file."""

import json
import pathlib
from typing import Any

import gguf
import jax
import numpy as np
from safetensors import numpy as safetensors_numpy

from specjax import sharding
from specjax.models.checkpoints import base
from specjax.models.config import config_from_hf

END = '<|endoftext|>'
CONTEXT = 64
# Bytes in the characters that byte-level BPE spells them with.
_KEPT = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _KEPT]
BYTES = [
  chr(byte) if byte in _KEPT else chr(256 + _OTHERS.index(byte))
  for byte in range(256)
]
TOKENS = [*BYTES, BYTES[32] + 'a', END]

CONFIG = {
  'model_type': 'llama',
  'vocab_size': len(TOKENS),
  'hidden_size': 16,
  'intermediate_size': 32,
  'num_hidden_layers': 1,
  'num_attention_heads': 2,
  'num_key_value_heads': 1,
  'head_dim': 8,
  'max_position_embeddings': CONTEXT,
  'rms_norm_eps': 1e-5,
  'hidden_act': 'silu',
  'rope_theta': 10000.0,
  'tie_word_embeddings': False,
  'eos_token_id': len(TOKENS) - 1,
}


def tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
  """Random float32 tensors with their published names."""
  model = config_from_hf(config, dtype='float32')
  names = jax.tree.leaves(base.hf_names(model))
  specs = jax.tree.leaves(sharding.abstract_params(model.param_specs()))
  random = np.random.default_rng(0)
  return {
    name: random.normal(0, 0.2, spec.shape).astype(np.float32)
    for name, spec in zip(names, specs)
  }


def tokenizer_json(tokens: list[str] = TOKENS) -> str:
  """A byte-level BPE with one merge; the last token ends a text."""
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers

  vocab = {token: i for i, token in enumerate(tokens[:-1])}
  backend = tokenizers.Tokenizer(
    models.BPE(vocab=vocab, merges=[(BYTES[32], 'a')])
  )
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens([tokens[-1]])
  return backend.to_str()


def write_folder(
  folder: pathlib.Path,
  *,
  weights: dict[str, np.ndarray] | None = None,
  tokens: list[str] = TOKENS,
  **changes,
) -> pathlib.Path:
  """A folder as on the Hugging Face hub; `changes` go into config.json."""
  folder.mkdir(parents=True)
  config = {**CONFIG, **changes}
  (folder / 'config.json').write_text(json.dumps(config))
  (folder / 'tokenizer.json').write_text(tokenizer_json(tokens))
  (folder / 'tokenizer_config.json').write_text(
    json.dumps({'eos_token': tokens[-1]})
  )
  weights = tensors(CONFIG) if weights is None else weights
  safetensors_numpy.save_file(weights, folder / 'model.safetensors')
  return folder


_GGUF_NAMES = {
  'model.embed_tokens.weight': 'token_embd.weight',
  'model.norm.weight': 'output_norm.weight',
  'lm_head.weight': 'output.weight',
  'input_layernorm': 'attn_norm',
  'self_attn.q_proj': 'attn_q',
  'self_attn.k_proj': 'attn_k',
  'self_attn.v_proj': 'attn_v',
  'self_attn.o_proj': 'attn_output',
  'post_attention_layernorm': 'ffn_norm',
  'mlp.gate_proj': 'ffn_gate',
  'mlp.up_proj': 'ffn_up',
  'mlp.down_proj': 'ffn_down',
}


def _gguf_name(name: str) -> str:
  if name in _GGUF_NAMES:
    return _GGUF_NAMES[name]
  _, _, layer, part = name.split('.', 3)
  return f'blk.{layer}.{_GGUF_NAMES[part.removesuffix(".weight")]}.weight'


def write_gguf(
  path: pathlib.Path,
  *,
  architecture: str = 'llama',
  weights: dict[str, np.ndarray] | None = None,
  tokens: list[str] = TOKENS,
  pre: str = 'qwen2',
  rope_scaling: str | None = None,
) -> pathlib.Path:
  """The same model as a GGUF file (q and k in its own order of rows)."""
  writer = gguf.GGUFWriter(path, architecture)
  writer.add_context_length(CONTEXT)
  writer.add_embedding_length(CONFIG['hidden_size'])
  writer.add_block_count(CONFIG['num_hidden_layers'])
  writer.add_feed_forward_length(CONFIG['intermediate_size'])
  writer.add_head_count(CONFIG['num_attention_heads'])
  writer.add_head_count_kv(CONFIG['num_key_value_heads'])
  writer.add_layer_norm_rms_eps(CONFIG['rms_norm_eps'])
  writer.add_rope_freq_base(CONFIG['rope_theta'])
  if rope_scaling is not None:
    writer.add_string(f'{architecture}.rope.scaling.type', rope_scaling)
  writer.add_tokenizer_model('gpt2')
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(tokens)
  writer.add_token_types([1] * (len(tokens) - 1) + [3])
  writer.add_token_merges([f'{BYTES[32]} a'])
  writer.add_eos_token_id(len(tokens) - 1)
  weights = tensors(CONFIG) if weights is None else weights
  for name, value in weights.items():
    writer.add_tensor(_gguf_name(name), value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path

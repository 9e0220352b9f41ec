"""Models and heads in NumPy, by the names and configs they are published with.

Nothing here is shared with what is tested: arrays are read from the files, in
float32, and every entry is computed anew each time it is looked at.
"""

import json
import pathlib

import numpy as np
import safetensors.numpy


def read(folder) -> tuple[dict, dict]:
  """A folder's tensors in float32 (whole numbers as they are), and config."""
  folder = pathlib.Path(folder)
  (file,) = folder.glob('*.safetensors')
  tensors = {
    name: x if x.dtype.kind in 'iub' else x.astype(np.float32)
    for name, x in safetensors.numpy.load_file(file).items()
  }
  return tensors, json.loads((folder / 'config.json').read_text())


def rms(x, scale, config):
  mean = np.mean(x * x, axis=-1, keepdims=True)
  return scale * x / np.sqrt(mean + config['rms_norm_eps'])


def silu(x):
  return x / (1 + np.exp(-x))


def _turned(x_THC, theta):
  """Rotary positions 0, 1, ...; the halves of a head are pairs."""
  half = x_THC.shape[-1] // 2
  frequency = theta ** (-np.arange(half) / half)
  angle = np.arange(len(x_THC))[:, None, None] * frequency
  a, b = x_THC[..., :half], x_THC[..., half:]
  cos, sin = np.cos(angle), np.sin(angle)
  return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _attention(w, config, prefix, x_TI):
  heads = lambda name: x_TI @ w[f'{prefix}self_attn.{name}_proj.weight'].T
  c, h = config['head_dim'], config['num_attention_heads']
  q, k, v = (heads(name).reshape(len(x_TI), -1, c) for name in 'qkv')
  q, k = (_turned(x, config['rope_theta']) for x in (q, k))
  group = h // config['num_key_value_heads']
  k, v = (np.repeat(x, group, axis=1) for x in (k, v))
  score = np.einsum('thc,shc->hts', q, k) / np.sqrt(c)
  score = np.where(np.tri(len(x_TI)) > 0, score, -np.inf)
  weight = np.exp(score - score.max(axis=-1, keepdims=True))
  weight /= weight.sum(axis=-1, keepdims=True)
  y = np.einsum('hts,shc->thc', weight, v).reshape(len(x_TI), -1)
  return y @ w[f'{prefix}self_attn.o_proj.weight'].T


def _layer(w, config, prefix, x, attention_input):
  x = x + _attention(w, config, prefix, attention_input)
  y = rms(x, w[f'{prefix}post_attention_layernorm.weight'], config)
  gate, up, down = (
    w[f'{prefix}mlp.{name}_proj.weight'].T for name in ('gate', 'up', 'down')
  )
  return x + (silu(y @ gate) * (y @ up)) @ down


def llama(w, config, tokens):
  """The hiddens behind the final norm, the logits, and the output head."""
  embed = w['model.embed_tokens.weight']
  x = embed[tokens]
  for i in range(config['num_hidden_layers']):
    p = f'model.layers.{i}.'
    y = rms(x, w[f'{p}input_layernorm.weight'], config)
    x = _layer(w, config, p, x, y)
  last = rms(x, w['model.norm.weight'], config)
  head = w.get('lm_head.weight', embed)
  return last, last @ head.T, head


# Of the heads: embeddings of tokens t + 1 and what stands for the features of
# tokens t, both [T, D], to what stands for those of tokens t + 1, and logits.


def eagle(w, config, embed, feature, head):
  both = np.concatenate([embed, feature], axis=-1)
  x = both @ w['fc.weight'].T + w['fc.bias']
  x = _layer(w, config, 'layers.0.', x, x)
  return x, x @ head.T


def eagle3(w, config, embed, feature, head):
  """From `eagle3_feature` on; the logits of ids it lacks are -inf."""
  del head
  both = np.concatenate(
    [
      rms(embed, w['midlayer.input_layernorm.weight'], config),
      rms(feature, w['midlayer.hidden_norm.weight'], config),
    ],
    axis=-1,
  )
  x = _layer(w, config, 'midlayer.', feature, both)
  y = rms(x, w['norm.weight'], config)
  return x, _of_all_ids(w, config, y @ w['lm_head.weight'].T)


def _of_all_ids(w, config, own):
  """Logits of the head's own ids, -inf of others."""
  if 'd2t' not in w:
    return own
  logits = np.full((len(own), config['vocab_size']), -np.inf)
  logits[:, np.arange(len(w['d2t'])) + w['d2t']] = own
  return logits


def eagle3_feature(w, layers):
  return layers @ w['fc.weight'].T


def mtp(w, config, embed, feature, head):
  p = f'model.layers.{config["num_hidden_layers"]}.'
  both = np.concatenate(
    [
      rms(embed, w[f'{p}enorm.weight'], config),
      rms(feature, w[f'{p}hnorm.weight'], config),
    ],
    axis=-1,
  )
  x = both @ w[f'{p}eh_proj.weight'].T
  y = rms(x, w[f'{p}input_layernorm.weight'], config)
  x = _layer(w, config, p, x, y)
  x = rms(x, w[f'{p}shared_head.norm.weight'], config)
  own = w.get(f'{p}shared_head.head.weight', head)
  return x, _of_all_ids(w, config, x @ own.T)


def medusa(w, config, last, head):
  """The logits of every head, from hiddens [T, D]."""
  found = []
  for i in range(config['medusa_num_heads']):
    x = last
    for j in range(config['medusa_num_layers']):
      y = x @ w[f'{i}.{j}.linear.weight'].T + w[f'{i}.{j}.linear.bias']
      x = x + silu(y)
    own = w.get(f'{i}.{config["medusa_num_layers"]}.weight', head)
    found.append(x @ own.T)
  return found

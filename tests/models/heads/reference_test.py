"""Heads against NumPy that reads the written files by their published names."""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.models.heads import files
from tests.models import tiny
from tests.models.heads import tiny_heads

T = 7
TARGET = tiny_heads.target_of()
EPS = TARGET.norm_eps


def rms(x, scale):
  return scale * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)


def silu(x):
  return x / (1 + np.exp(-x))


def turned(x_THC):
  """Rotary positions 0, 1, ...; the halves of a head are pairs."""
  half = x_THC.shape[-1] // 2
  frequency = 10000.0 ** (-np.arange(half) / half)
  angle = np.arange(len(x_THC))[:, None, None] * frequency
  a, b = x_THC[..., :half], x_THC[..., half:]
  cos, sin = np.cos(angle), np.sin(angle)
  return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(w, prefix, x_TI):
  heads = lambda name: x_TI @ w[f'{prefix}self_attn.{name}_proj.weight'].T
  c, h = TARGET.head_dim, TARGET.num_heads
  q, k, v = (heads(name).reshape(len(x_TI), -1, c) for name in 'qkv')
  q, k = turned(q), turned(k)
  k, v = (np.repeat(x, h // TARGET.num_kv_heads, axis=1) for x in (k, v))
  score = np.einsum('thc,shc->hts', q, k) / np.sqrt(c)
  score = np.where(np.tri(len(x_TI)) > 0, score, -np.inf)
  weight = np.exp(score - score.max(axis=-1, keepdims=True))
  weight /= weight.sum(axis=-1, keepdims=True)
  y = np.einsum('hts,shc->thc', weight, v).reshape(len(x_TI), -1)
  return y @ w[f'{prefix}self_attn.o_proj.weight'].T


def layer(w, prefix, x, attention_input):
  x = x + attention(w, prefix, attention_input)
  y = rms(x, w[f'{prefix}post_attention_layernorm.weight'])
  gate, up, down = (
    w[f'{prefix}mlp.{name}_proj.weight'].T for name in ('gate', 'up', 'down')
  )
  return x + (silu(y @ gate) * (y @ up)) @ down


def eagle(w, embed, last, features, head):
  del features
  both = np.concatenate([embed, last], axis=-1)
  x = both @ w['fc.weight'].T + w['fc.bias']
  return layer(w, 'layers.0.', x, x) @ head.T


def eagle3(w, embed, last, features, head):
  del last, head
  g = features @ w['fc.weight'].T
  both = np.concatenate(
    [
      rms(embed, w['midlayer.input_layernorm.weight']),
      rms(g, w['midlayer.hidden_norm.weight']),
    ],
    axis=-1,
  )
  x = rms(layer(w, 'midlayer.', g, both), w['norm.weight'])
  logits = np.full((len(x), TARGET.vocab_size), -np.inf)
  ids = np.arange(len(w['d2t'])) + w['d2t']
  logits[:, ids] = x @ w['lm_head.weight'].T
  return logits


def mtp(w, embed, last, features, head):
  del features
  p = 'model.layers.2.'
  both = np.concatenate(
    [rms(embed, w[f'{p}enorm.weight']), rms(last, w[f'{p}hnorm.weight'])],
    axis=-1,
  )
  x = both @ w[f'{p}eh_proj.weight'].T
  x = layer(w, p, x, rms(x, w[f'{p}input_layernorm.weight']))
  return rms(x, w[f'{p}shared_head.norm.weight']) @ head.T


def medusa(w, embed, last, features, head):
  """Of the second head."""
  del embed, features, head
  x = last
  for j in range(2):
    y = x @ w[f'1.{j}.linear.weight'].T + w[f'1.{j}.linear.bias']
    x = x + silu(y)
  return x @ w['1.2.weight'].T


REFERENCES = {
  'eagle': eagle,
  'eagle3_reduced': eagle3,
  'mtp': mtp,
  'medusa_own': medusa,
}


class ReferenceTest(parameterized.TestCase):
  @parameterized.parameters(*REFERENCES)
  def test_logits(self, name):
    head = tiny_heads.head_of(name, TARGET)
    params = tiny_heads.params_of(head)
    if 'fc_bias' in params:
      self.assertGreater(float(jnp.abs(params['fc_bias']).min()), 0)
    target = tiny.params_of(TARGET)
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder, 'head')
      files.save_head(path, head, params)
      (file,) = path.glob('*.safetensors')
      tensors = safetensors.numpy.load_file(file)
    kind = 'medusa' if name.startswith('medusa') else 'feature_fed'
    got, last, features, tokens = apply(
      head, {'target': target, 'proposer': params}, kind
    )
    next_tokens = tokens[1:]
    want = REFERENCES[name](
      tensors,
      np.asarray(target['embed'])[next_tokens],
      last[:-1],
      features[:-1],
      np.asarray(target['head'])[: TARGET.vocab_size],
    )
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def apply(head, params, kind):
  """Logits of our own, and what goes in: of tokens 0..T-1."""
  tokens_1T = jnp.asarray([[3, 1, 4, 1, 5, 9, 2]], jnp.int32)

  @jax.jit
  def run(params):
    hidden, _ = TARGET.apply(
      params['target'],
      tokens_1T,
      TARGET.init_cache(1, T, 0),
      capture=head.target_features,
    )
    normed_1TD = TARGET.final_norm(params['target'], hidden.last_BTD)
    features_1TE = hidden.features_BTE
    if kind == 'medusa':
      logits_1TV = head.logits(params, features_1TE[:, :-1], 2)[1]
    else:
      feature_1TD, _ = head.apply(
        params,
        head.fuse(params, features_1TE[:, :-1]),
        tokens_1T[:, 1:],
        head.block.init_cache(1, T, 0),
      )
      logits_1TV = head.unembed(params, feature_1TD)
      if head.num_ids is not None:
        wide_1TV = jnp.full((1, T - 1, TARGET.vocab_size), -jnp.inf)
        ids = params['proposer']['ids']
        logits_1TV = wide_1TV.at[:, :, ids].set(logits_1TV)
    return logits_1TV[0], normed_1TD[0], features_1TE[0]

  return *map(np.asarray, run(params)), np.asarray(tokens_1T[0])


if __name__ == '__main__':
  absltest.main()

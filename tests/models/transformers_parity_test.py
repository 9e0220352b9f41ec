"""Logits equal those of transformers on tiny random models of every family.

Both sides run in float32. The tolerance, relative to the largest logit, is for
two libraries that sum a few dozen products in another order.
"""

import functools
import tempfile
import unittest

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.models import config as model_config
from specjax.models.checkpoints import base, safetensors

try:
  import torch
  import transformers
except ImportError:
  torch = transformers = None

TOLERANCE = 2e-5

TINY = {
  'vocab_size': 61,
  'hidden_size': 32,
  'intermediate_size': 48,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'max_position_embeddings': 64,
  'rms_norm_eps': 1e-5,
  'initializer_range': 0.3,
}
LLAMA3 = {
  'rope_type': 'llama3',
  'rope_theta': 500.0,
  'factor': 4.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 16,
}
GEMMA_ROPES = {
  'full_attention': {
    'rope_type': 'linear',
    'factor': 2.0,
    'rope_theta': 1e6,
  },
  'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e4},
}


def _rope(theta: float) -> dict:
  return {'rope_parameters': {'rope_type': 'default', 'rope_theta': theta}}


# Name, class prefix in transformers, settings beyond TINY.
FAMILIES_UNDER_TEST = (
  ('llama2', 'Llama', _rope(1e4)),
  ('llama2_tied', 'Llama', {**_rope(1e4), 'tie_word_embeddings': True}),
  ('llama3', 'Llama', {'rope_parameters': LLAMA3}),
  (
    'llama_linear_biases',
    'Llama',
    {
      'rope_parameters': {
        'rope_type': 'linear',
        'factor': 4.0,
        'rope_theta': 1e4,
      },
      'attention_bias': True,
      'mlp_bias': True,
    },
  ),
  (
    'smollm2',
    'Llama',
    {
      **_rope(1e5),
      'tie_word_embeddings': True,
      'num_attention_heads': 3,
      'num_key_value_heads': 1,
      'hidden_size': 24,
    },
  ),
  ('mistral', 'Mistral', {**_rope(1e4), 'sliding_window': 8}),
  ('mistral_no_window', 'Mistral', {**_rope(1e4), 'sliding_window': None}),
  ('qwen2', 'Qwen2', {**_rope(1e6), 'tie_word_embeddings': True}),
  (
    'qwen2_window_off',
    'Qwen2',
    {**_rope(1e6), 'use_sliding_window': False, 'sliding_window': 4},
  ),
  (
    'qwen2_window_on',
    'Qwen2',
    {
      **_rope(1e6),
      'use_sliding_window': True,
      'sliding_window': 4,
      'max_window_layers': 1,
    },
  ),
  ('qwen3', 'Qwen3', {**_rope(1e6), 'head_dim': 16}),
  (
    'qwen3_biased_tied',
    'Qwen3',
    {
      **_rope(1e6),
      'head_dim': 12,
      'attention_bias': True,
      'tie_word_embeddings': True,
    },
  ),
  (
    'gemma3',
    'Gemma3',
    {
      'num_hidden_layers': 7,
      'head_dim': 16,
      'query_pre_attn_scalar': 24,
      'sliding_window': 6,
      'rope_parameters': GEMMA_ROPES,
    },
  ),
  (
    'gemma3_layer_types_untied',
    'Gemma3',
    {
      'head_dim': 16,
      'query_pre_attn_scalar': 16,
      'sliding_window': 5,
      'layer_types': [
        'full_attention',
        'sliding_attention',
        'full_attention',
      ],
      'rope_parameters': GEMMA_ROPES,
      'tie_word_embeddings': False,
      'final_logit_softcapping': 3.0,
    },
  ),
)


def reference(prefix: str, settings: dict):
  """A random transformers model, its norms and biases random as well."""
  name = f'{prefix}TextConfig' if prefix == 'Gemma3' else f'{prefix}Config'
  config = getattr(transformers, name)(**{**TINY, **settings})
  config._attn_implementation = 'eager'
  torch.manual_seed(0)
  model = getattr(transformers, f'{prefix}ForCausalLM')(config)
  with torch.no_grad():
    for parameter in model.parameters():
      if parameter.ndim == 1:
        parameter.add_(0.3 * torch.randn_like(parameter))
  return model.eval()


def load(folder: str):
  checkpoint = safetensors.read_folder(folder)
  model = model_config.config_from_hf(checkpoint.config, dtype='float32')
  return model, base.load_params(model, checkpoint)


@functools.partial(jax.jit, static_argnums=(0, 3))
def logits(model, params, tokens_BT, num_slots: int):
  cache = model.init_cache(tokens_BT.shape[0], num_slots, 0)
  hidden, _ = model.apply(params, jnp.asarray(tokens_BT, jnp.int32), cache)
  return model.unembed(params, hidden.last_BTD)


@unittest.skipIf(
  transformers is None,
  'PARITY WITH TRANSFORMERS IS NOT TESTED: install torch and transformers.',
)
class TransformersParityTest(parameterized.TestCase):
  @parameterized.named_parameters(*FAMILIES_UNDER_TEST)
  def test_logits(self, prefix, settings):
    peer = reference(prefix, settings)
    with tempfile.TemporaryDirectory() as folder:
      peer.save_pretrained(folder)
      model, params = load(folder)
    # Spelled by save_pretrained and by to_dict, it is the same model.
    self.assertEqual(
      model, model_config.config_from_hf(peer.config.to_dict(), None, 'float32')
    )
    # Past every window and past the original context of llama3.
    tokens_BT = np.random.default_rng(0).integers(
      0, TINY['vocab_size'], (2, 40)
    )
    with torch.no_grad():
      want = peer(torch.tensor(tokens_BT)).logits.numpy()
    got = np.asarray(logits(model, params, tokens_BT, 43))
    self.assertEqual(got.shape, want.shape)
    for num_tokens in (4, 40):
      difference = np.max(np.abs(got - want)[:, :num_tokens])
      logging.info(
        '%s, first %d tokens: logits up to %.2f, max difference %.2e',
        self.id().split('.')[-1],
        num_tokens,
        np.max(np.abs(want)),
        difference,
      )
      self.assertLess(difference, TOLERANCE * np.max(np.abs(want)))

  def test_multimodal_gemma3_gives_its_text_model(self):
    settings = {
      'head_dim': 16,
      'sliding_window': 6,
      'rope_parameters': GEMMA_ROPES,
    }
    text = transformers.Gemma3TextConfig(**{**TINY, **settings})
    vision = transformers.SiglipVisionConfig(
      hidden_size=16,
      intermediate_size=16,
      num_hidden_layers=1,
      num_attention_heads=2,
      image_size=28,
      patch_size=14,
    )
    config = transformers.Gemma3Config(
      text_config=text, vision_config=vision, mm_tokens_per_image=1
    )
    torch.manual_seed(0)
    peer = transformers.Gemma3ForConditionalGeneration(config).eval()
    tokens_BT = np.arange(24).reshape(2, 12)
    with torch.no_grad():
      want = peer(torch.tensor(tokens_BT)).logits.numpy()
    with tempfile.TemporaryDirectory() as folder:
      peer.save_pretrained(folder)
      model, params = load(folder)
    got = logits(model, params, tokens_BT, 12)
    self.assertLess(np.max(np.abs(got - want)), TOLERANCE)


if __name__ == '__main__':
  absltest.main()

"""What a config.json says is understood, in every spelling, or refused."""

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.models.config import config_from_hf, stop_ids_from_hf
from specjax.models.rope import Rope
from tests.models import tiny

STRETCH = {
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 16,
}
GEMMA_FULL = Rope(theta=1e6, kind='linear', factor=8.0)
GEMMA_LOCAL = Rope(theta=1e4)


def edited(name: str, *removed: str, **changes) -> dict:
  config = {**tiny.CONFIGS[name], **changes}
  return {k: v for k, v in config.items() if k not in removed}


class RopeSpellingsTest(parameterized.TestCase):
  @parameterized.parameters(
    {'rope_theta': 5e5, 'rope_scaling': {'rope_type': 'llama3', **STRETCH}},
    {'rope_theta': 5e5, 'rope_scaling': {'type': 'llama3', **STRETCH}},
    {
      'rope_theta': 500000,
      'rope_scaling': {'rope_type': 'llama3', 'type': 'llama3', **STRETCH},
    },
    {'rope_parameters': {'rope_theta': 5e5, 'rope_type': 'llama3', **STRETCH}},
    {
      'rope_theta': 5e5,
      'rope_scaling': None,
      'rope_parameters': {
        'rope_theta': 5e5,
        'rope_type': 'llama3',
        'attention_factor': None,
        **STRETCH,
      },
    },
    {
      'rope_parameters': {
        'full_attention': {
          'rope_theta': 5e5,
          'rope_type': 'llama3',
          **STRETCH,
        }
      },
    },
    {
      'rope_theta': 5e5,
      'rope_scaling': {'type': 'llama3', **STRETCH},
      'rope_parameters': {
        'rope_theta': 5e5,
        'rope_type': 'llama3',
        **STRETCH,
      },
    },
  )
  def test_llama3(self, **spelling):
    want = Rope(
      theta=5e5,
      kind='llama3',
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_context=16,
    )
    model = config_from_hf({**edited('llama', 'rope_theta'), **spelling})
    self.assertEqual(model.ropes, (want, want))

  @parameterized.parameters(
    {
      'rope_theta': 1e6,
      'rope_local_base_freq': 1e4,
      'rope_scaling': {'rope_type': 'linear', 'factor': 8.0},
    },
    {'rope_scaling': {'rope_type': 'linear', 'factor': 8.0}},
    {
      'rope_parameters': {
        'full_attention': {
          'rope_type': 'linear',
          'factor': 8.0,
          'rope_theta': 1e6,
        },
        'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e4},
      }
    },
  )
  def test_two_bases(self, **spelling):
    config = edited('gemma3', 'rope_theta', 'rope_local_base_freq')
    model = config_from_hf({**config, **spelling})
    self.assertEqual(model.windows, (4, None, 4))
    self.assertEqual(model.ropes, (GEMMA_LOCAL, GEMMA_FULL, GEMMA_LOCAL))

  def test_base_per_layer_type_is_honoured_in_any_family(self):
    model = config_from_hf(
      edited(
        'qwen2',
        'rope_theta',
        rope_parameters={
          'full_attention': {'rope_theta': 7.0},
          'sliding_attention': {'rope_theta': 9.0},
        },
      )
    )
    self.assertEqual(model.ropes, (Rope(theta=7.0), Rope(theta=9.0)))

  def test_defaults_where_published_files_rely_on_them(self):
    llama = config_from_hf(edited('llama', 'rope_theta'))
    self.assertEqual(llama.ropes[0], Rope(theta=10000.0))
    gemma = config_from_hf(
      edited('gemma3', 'rope_theta', 'rope_local_base_freq')
    )
    self.assertEqual(gemma.ropes[:2], (GEMMA_LOCAL, Rope(theta=1e6)))

  @parameterized.parameters(
    ('mistral', {}),
    ('qwen2', {}),
    ('qwen3', {}),
    ('llama', {'rope_scaling': {'rope_type': 'llama3', **STRETCH}}),
    ('llama', {'rope_parameters': {'rope_type': 'default'}}),
    (
      'gemma3',
      {
        'rope_parameters': {
          'full_attention': {'rope_type': 'default'},
          'sliding_attention': {'rope_theta': 1e4},
        }
      },
    ),
  )
  def test_missing_theta_raises(self, name, changes):
    config = edited(name, 'rope_theta', **changes)
    with self.assertRaisesRegex(ValueError, 'rope_theta is missing'):
      config_from_hf(config)

  @parameterized.parameters(
    ({'rope_type': 'yarn', 'factor': 2.0}, 'default, linear, llama3.*yarn'),
    ({'type': 'dynamic', 'factor': 2.0}, "got 'dynamic'"),
    ({'rope_type': 'linear'}, 'factor is missing'),
    ({'rope_type': 'linear', 'factor': 0.5}, 'factor must be >= 1, got 0.5'),
    (
      {'rope_type': 'linear', 'factor': '2'},
      "factor must be a finite number.*'2'",
    ),
    ({'rope_type': 'default', 'beta_fast': 2}, 'got beta_fast'),
    ({'rope_type': 'default', 'partial_rotary_factor': 0.5}, 'or 1.0'),
    ({'rope_type': 'default', 'rope_theta': 5.0}, 'same.*5.0 and 10000.0'),
  )
  def test_refuses(self, scaling, message):
    with self.assertRaisesRegex(ValueError, message):
      config_from_hf(edited('llama', rope_scaling=scaling))

  def test_refuses_two_spellings_that_differ(self):
    config = edited(
      'llama',
      rope_scaling={'rope_type': 'linear', 'factor': 2.0},
      rope_parameters={'rope_type': 'default', 'rope_theta': 10000.0},
    )
    with self.assertRaisesRegex(ValueError, 'must agree'):
      config_from_hf(config)


class WindowsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('all', edited('mistral'), (4, 4)),
    ('null', edited('mistral', sliding_window=None), (None, None)),
    ('from_the_flagged_layer', edited('qwen2'), (None, 3)),
    (
      'flag_off',
      edited('qwen2', use_sliding_window=False),
      (None, None),
    ),
    ('flag_absent', edited('qwen2', 'use_sliding_window'), (None, None)),
    (
      'layer_types_win',
      edited('qwen2', layer_types=['sliding_attention', 'full_attention']),
      (3, None),
    ),
    ('none_in_llama', edited('llama', sliding_window=4), (None, None)),
    (
      'pattern_of_six',
      edited('gemma3', 'sliding_window_pattern', num_hidden_layers=7),
      (4, 4, 4, 4, 4, None, 4),
    ),
  )
  def test_windows(self, config, windows):
    self.assertEqual(config_from_hf(config).windows, windows)

  @parameterized.named_parameters(
    ('missing', edited('mistral', 'sliding_window'), 'sliding_window is miss'),
    ('zero', edited('mistral', sliding_window=0), 'integer > 0.*got 0'),
    ('null', edited('gemma3', sliding_window=None), 'integer > 0.*got None'),
    (
      'unknown_type',
      edited('qwen2', layer_types=['full_attention', 'chunked_attention']),
      'full_attention or sliding_attention, got.*chunked_attention',
    ),
    (
      'wrong_number',
      edited('qwen2', layer_types=['full_attention']),
      'must be 2 times',
    ),
    (
      'sliding_but_off',
      edited(
        'qwen2',
        use_sliding_window=False,
        layer_types=['sliding_attention'] * 2,
      ),
      'use_sliding_window true',
    ),
  )
  def test_refuses(self, config, message):
    with self.assertRaisesRegex(ValueError, message):
      config_from_hf(config)


class ConfigTest(parameterized.TestCase):
  def test_families_differ_in_properties(self):
    flags = {
      name: (m.qk_norm, m.post_norms, m.qkv_bias, m.out_bias, m.ffn_bias)
      for name in tiny.CONFIGS
      for m in [tiny.model(name)]
    }
    self.assertEqual(
      flags,
      {
        'llama': (False, False, False, False, False),
        'llama_tied_biased': (False, False, True, True, True),
        'mistral': (False, False, False, False, False),
        'qwen2': (False, False, True, False, False),
        'qwen3': (True, False, False, False, False),
        'gemma3': (True, True, False, False, False),
      },
    )
    gemma = tiny.model('gemma3')
    self.assertEqual(gemma.embed_scale, 4.0)
    self.assertAlmostEqual(gemma.score_scale, 12**-0.5)
    self.assertTrue(gemma.tied)

  def test_published_text_part_relies_on_defaults(self):
    model = config_from_hf(
      {
        'model_type': 'gemma3',
        'eos_token_id': [1, 106],
        'text_config': {
          'hidden_size': 2560,
          'intermediate_size': 10240,
          'model_type': 'gemma3_text',
          'num_hidden_layers': 34,
          'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'},
          'sliding_window': 1024,
        },
      }
    )
    self.assertEqual(
      (model.num_heads, model.num_kv_heads, model.head_dim), (8, 4, 256)
    )
    self.assertEqual(model.vocab_size, 262208)
    self.assertEqual(model.windows[4:7], (1024, None, 1024))
    self.assertTrue(model.tied)

  def test_model_type_may_come_from_architectures(self):
    config = edited('qwen3', 'model_type', architectures=['Qwen3ForCausalLM'])
    self.assertEqual(config_from_hf(config), config_from_hf(edited('qwen3')))

  def test_heads(self):
    absent = edited('llama', 'num_key_value_heads')
    self.assertEqual(config_from_hf(absent).num_kv_heads, 4)
    null = edited('qwen2', num_key_value_heads=None)
    self.assertEqual(config_from_hf(null).num_kv_heads, 4)
    self.assertEqual(config_from_hf(edited('llama')).head_dim, 4)
    self.assertEqual(config_from_hf(edited('qwen3')).head_dim, 10)

  def test_vocab_size_is_the_true_one(self):
    model = config_from_hf(edited('llama'), 37)
    self.assertEqual((model.vocab_size, model.padded_vocab_size), (37, 40))

  @parameterized.named_parameters(
    ('type', edited('llama', model_type='gpt2'), "llama, mistral.*'gpt2'"),
    (
      'architecture',
      edited('llama', 'model_type', architectures=['GPT2LMHeadModel']),
      'GPT2LMHeadModel',
    ),
    ('activation', edited('llama', hidden_act='relu'), "silu.*got 'relu'"),
    ('no_width', edited('llama', 'hidden_size'), 'hidden_size is missing'),
    ('no_heads', edited('qwen2', 'num_key_value_heads'), 'heads is missing'),
    ('no_head_dim', edited('qwen3', 'head_dim'), 'head_dim is missing'),
    ('no_eps', edited('llama', 'rms_norm_eps'), 'rms_norm_eps is missing'),
    ('zero', edited('llama', num_hidden_layers=0), 'integer > 0, got 0'),
    ('true', edited('llama', hidden_size=True), 'integer > 0, got True'),
    ('ratio', edited('llama', num_key_value_heads=3), 'multiple of.*3, got 4'),
    ('odd', edited('llama', head_dim=5), 'even, got 5'),
    (
      'quantized',
      edited('llama', quantization_config={'bits': 4}),
      'quantization_config is not supported',
    ),
    (
      'score_softcap',
      edited('gemma3', attn_logit_softcapping=50.0),
      'attn_logit_softcapping is not supported.*got 50.0',
    ),
    (
      'bidirectional',
      edited('gemma3', use_bidirectional_attention=True),
      'use_bidirectional_attention is not supported',
    ),
  )
  def test_refuses(self, config, message):
    with self.assertRaisesRegex(ValueError, message):
      config_from_hf(config)

  def test_refuses_more_ids_than_rows(self):
    with self.assertRaisesRegex(ValueError, 'at most 40.*got 41'):
      config_from_hf(edited('llama'), 41)

  def test_refuses_unknown_dtype(self):
    with self.assertRaisesRegex(ValueError, "bfloat16, got 'float16'"):
      config_from_hf(edited('llama'), dtype='float16')


class StopIdsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({}, None, ()),
    ({'eos_token_id': None}, {}, ()),
    ({'eos_token_id': 2}, None, (2,)),
    ({'eos_token_id': [2]}, None, (2,)),
    ({'eos_token_id': 2}, {'eos_token_id': [5, 7, 2]}, (5, 7, 2)),
    ({'eos_token_id': [5, 7]}, {'eos_token_id': 3}, (3,)),
    ({'eos_token_id': 2}, {'eos_token_id': None}, (2,)),
    ({'text_config': {'eos_token_id': 1}}, None, (1,)),
    (
      {'eos_token_id': [1, 106], 'text_config': {'eos_token_id': 1}},
      None,
      (1, 106),
    ),
  )
  def test_stop_ids(self, config, generation_config, want):
    self.assertEqual(stop_ids_from_hf(config, generation_config), want)

  @parameterized.parameters(-1, 'x', True, ([[1]],))
  def test_refuses(self, value):
    with self.assertRaisesRegex(ValueError, 'eos_token_id must be'):
      stop_ids_from_hf({'eos_token_id': value})


if __name__ == '__main__':
  absltest.main()

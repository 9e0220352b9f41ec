"""Presets have exactly the published numbers of parameters."""

import math

import jax
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import sharding
from specjax.models import presets

# As the model cards' safetensors count them; a tied head counts once.
NUM_PARAMETERS = {
  'llama-2-7b': 6738415616,
  'llama-3.1-8b': 8030261248,
  'llama-3.1-70b': 70553706496,
  'llama-3.2-1b': 1235814400,
  'llama-3.2-3b': 3212749824,
  'smollm2-135m': 134515008,
  'smollm2-360m': 361821120,
  'smollm2-1.7b': 1711376384,
  'mistral-7b-v0.1': 7241732096,
  'qwen2.5-0.5b': 494032768,
  'qwen2.5-1.5b': 1543714304,
  'qwen2.5-7b': 7615616512,
  'qwen2.5-coder-0.5b': 494032768,
  'qwen2.5-coder-1.5b': 1543714304,
  'qwen2.5-coder-7b': 7615616512,
  'qwen3-0.6b': 596049920,
  'qwen3-1.7b': 1720574976,
  'qwen3-4b': 4022468096,
  'qwen3-8b': 8190735360,
  'qwen3-32b': 32762123264,
  'gemma-3-270m': 268098176,
  'gemma-3-1b': 999885952,
  # Of these the language model alone.
  'gemma-3-4b': 3880263168,
  'gemma-3-27b': 27009346304,
}


class PresetsTest(parameterized.TestCase):
  def test_every_preset_is_counted(self):
    self.assertEqual(sorted(NUM_PARAMETERS), sorted(presets.PRESETS))

  @parameterized.parameters(*NUM_PARAMETERS.items())
  def test_num_parameters(self, name, want):
    specs = presets.preset(name).param_specs()
    leaves = jax.tree.leaves(specs, is_leaf=sharding.is_spec)
    self.assertEqual(sum(math.prod(spec.shape) for spec in leaves), want)

  def test_windows_of_gemma(self):
    windows = presets.preset('gemma-3-270m').windows
    full = [i for i, window in enumerate(windows) if window is None]
    self.assertEqual(full, [5, 11, 17])

  def test_refuses_unknown(self):
    with self.assertRaisesRegex(ValueError, "llama-2-7b.*got 'gpt-2'"):
      presets.preset('gpt-2')


if __name__ == '__main__':
  absltest.main()

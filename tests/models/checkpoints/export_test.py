"""A folder that is written is the folder that is read."""

import json
import os
import pathlib
import tempfile

import jax
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import tokenizer_files
from specjax.models import config as model_config
from specjax.models import load, quantize
from specjax.models.checkpoints import export, safetensors
from specjax.tokenizers import ByteTokenizer
from tests.training import tiny


class ExportTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name) / 'model'

  def model(self, dtype: str = 'bfloat16', tied: bool = True):
    config = {**tiny.shape(2, 16), 'tie_word_embeddings': tied}
    return config, model_config.config_from_hf(config, dtype=dtype)

  @parameterized.product(dtype=['float32', 'bfloat16'], tied=[True, False])
  def test_bit_for_bit(self, dtype, tied):
    config, model = self.model(dtype, tied)
    params = model.init(jax.random.key(0))
    export.write_folder(self.folder, config, model, params)
    tokenizer_files.save_tokenizer(self.folder, ByteTokenizer())
    again = load.load(str(self.folder), dtype)
    self.assertEqual(again.model, model)
    self.assertEqual(again.config, config)
    self.assertEqual(again.tokenizer, ByteTokenizer())
    self.assertEqual(again.stop_ids, (256,))
    self.assertTrue(tiny.same(again.params, params))

  def test_names_and_shapes_are_those_of_published_models(self):
    config, model = self.model()
    params = model.init(jax.random.key(0))
    export.write_folder(self.folder, config, model, params)
    shapes = safetensors.read_folder(self.folder).shapes
    self.assertEqual(shapes['model.embed_tokens.weight'], (257, 16))
    self.assertEqual(shapes['model.layers.1.mlp.down_proj.weight'], (16, 32))
    self.assertNotIn('lm_head.weight', shapes)
    # Read without the library: a header in JSON, then the bytes.
    data = (self.folder / 'model.safetensors').read_bytes()
    size = int.from_bytes(data[:8], 'little')
    entry = json.loads(data[8 : 8 + size])['model.norm.weight']
    begin, end = entry['data_offsets']
    values = np.frombuffer(data[8 + size :][begin:end], np.float32)
    np.testing.assert_array_equal(values, np.asarray(params['final_norm']))

  def test_what_is_refused_leaves_nothing(self):
    config, model = self.model()
    params = model.init(jax.random.key(0))
    _, int8 = self.model()
    with self.assertRaisesRegex(ValueError, 'quantize int8'):
      export.write_folder(
        self.folder,
        config,
        model_config.config_from_hf(config, dtype='bfloat16', quantize='int8'),
        quantize.quantize_params(params),
      )
    self.assertFalse(self.folder.exists())
    export.write_folder(self.folder, config, model, params)
    with self.assertRaisesRegex(ValueError, 'absent or empty'):
      export.write_folder(self.folder, config, int8, params)
    self.assertEqual(os.listdir(self.folder.parent), ['model'])

  def test_another_tokenizer_is_not_taken_for_bytes(self):
    self.folder.mkdir()
    config = self.folder / 'tokenizer_config.json'
    config.write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with self.assertRaises((ValueError, OSError)):
      tokenizer_files.read_tokenizer(self.folder)
    config.write_text('{')
    with self.assertRaisesRegex(ValueError, 'must be JSON'):
      tokenizer_files.read_tokenizer(self.folder)


if __name__ == '__main__':
  absltest.main()

"""Folders in one file or in shards; broken ones get one sentence."""

import json
import pathlib
import tempfile
import unittest

import jax
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.models.checkpoints import base, safetensors
from tests.models import tiny

try:
  from safetensors.numpy import save_file
except ImportError:
  save_file = None

INDEX = 'model.safetensors.index.json'
SHARDS = tuple(f'model-0000{i}-of-00002.safetensors' for i in (1, 2))


@unittest.skipIf(
  save_file is None, 'SAFETENSORS ARE NOT TESTED: install safetensors.'
)
class ReadFolderTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    temporary = tempfile.TemporaryDirectory()
    self.addCleanup(temporary.cleanup)
    self.folder = pathlib.Path(temporary.name)
    self.model = tiny.model('llama')
    self.params = tiny.params_of(self.model)
    self.tensors = tiny.tensors_of(self.model, self.params)
    self.write_json('config.json', tiny.CONFIGS['llama'])

  def write_json(self, name: str, value):
    (self.folder / name).write_text(json.dumps(value))

  def write_one(self, name='model.safetensors'):
    save_file(self.tensors, self.folder / name)
    return self.folder / name

  def write_shards(self, *, index: bool = True):
    names = sorted(self.tensors)
    parts = dict(zip(SHARDS, (names[::2], names[1::2])))
    for file, part in parts.items():
      save_file({n: self.tensors[n] for n in part}, self.folder / file)
    if index:
      weight_map = {n: file for file, part in parts.items() for n in part}
      self.write_json(INDEX, {'weight_map': weight_map})

  def assert_loads(self):
    checkpoint = safetensors.read_folder(self.folder)
    params = base.load_params(self.model, checkpoint)
    jax.tree.map(np.testing.assert_array_equal, params, self.params)

  def assert_refused(self, message: str):
    with self.assertRaisesRegex(ValueError, message) as caught:
      safetensors.read_folder(self.folder)
    self.assertNotIn('\n', str(caught.exception))

  def test_one_file(self):
    self.write_one()
    # Other formats beside it are not looked at.
    (self.folder / 'pytorch_model.bin').write_bytes(b'junk')
    self.assert_loads()

  @parameterized.parameters(True, False)
  def test_two_shards_equal_one_file(self, index):
    self.write_shards(index=index)
    self.assert_loads()

  def test_stop_ids(self):
    self.write_one()
    self.write_json('config.json', {**tiny.CONFIGS['llama'], 'eos_token_id': 2})
    self.assertEqual(safetensors.read_folder(self.folder).stop_ids, (2,))
    self.write_json('generation_config.json', {'eos_token_id': [5, 2]})
    self.assertEqual(safetensors.read_folder(self.folder).stop_ids, (5, 2))

  def test_missing_folder(self):
    self.folder = self.folder / 'nowhere'
    self.assert_refused('nowhere does not exist')

  def test_missing_config(self):
    self.write_one()
    (self.folder / 'config.json').unlink()
    self.assert_refused('config.json is missing')

  @parameterized.parameters(
    (b'{"model_type":', 'must be JSON'),
    (b'\xff\xfe', 'must be JSON'),
    (b'[1]', 'must hold a JSON object'),
  )
  def test_broken_config(self, data, message):
    self.write_one()
    (self.folder / 'config.json').write_bytes(data)
    self.assert_refused(message)

  def test_no_weights(self):
    self.assert_refused('must hold .safetensors files')

  def test_pickles_are_not_read(self):
    (self.folder / 'pytorch_model.bin').write_bytes(b'junk')
    self.assert_refused('.safetensors files; pytorch_model.bin is not read')

  @parameterized.parameters(0, 4, 100, -1)
  def test_truncated(self, size):
    file = self.write_one()
    data = file.read_bytes()
    file.write_bytes(data[:size])
    self.assert_refused('model.safetensors is not a whole safetensors file')

  @parameterized.parameters(2**63, 2**40, 2**31)
  def test_absurd_header_size(self, size):
    file = self.write_one()
    data = file.read_bytes()
    file.write_bytes(size.to_bytes(8, 'little') + data[8:])
    self.assert_refused('is not a whole safetensors file')

  def test_header_that_promises_more_than_there_is(self):
    file = self.write_one()
    data = file.read_bytes()
    file.write_bytes(data.replace(b'[40,16]', b'[99,16]', 1))
    self.assert_refused('is not a whole safetensors file')

  @parameterized.parameters(True, False)
  def test_missing_shard(self, index):
    self.write_shards(index=index)
    (self.folder / SHARDS[1]).unlink()
    self.assert_refused(f'lacks the shards {SHARDS[1]}')

  def test_index_and_files_disagree(self):
    self.write_shards()
    index = json.loads((self.folder / INDEX).read_text())
    del index['weight_map']['model.norm.weight']
    self.write_json(INDEX, index)
    self.assert_refused('must agree, they differ in model.norm.weight')

  @parameterized.parameters(
    ({'weight_map': {'a': '../x.safetensors'}}, "files of its folder, got '.."),
    ({'weight_map': {'a': 3}}, 'files of its folder, got 3'),
    ({'weight_map': {}}, 'must have a weight_map'),
    ({}, 'must have a weight_map'),
  )
  def test_broken_index(self, index, message):
    self.write_json(INDEX, index)
    self.assert_refused(message)

  def test_one_name_in_two_files(self):
    self.write_one('a.safetensors')
    self.write_one('b.safetensors')
    self.assert_refused('must be in one file')

  def test_integer_weights(self):
    name = 'model.norm.weight'
    self.tensors[name] = self.tensors[name].astype(np.int8)
    self.write_one()
    self.assert_refused(f'{name} must have a dtype of F64.*got I8')


if __name__ == '__main__':
  absltest.main()

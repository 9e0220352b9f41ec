"""--cache_dir: the same model, found by content, and never a wrong one."""

import contextlib
import io
import os
import pathlib
import shutil
import tempfile
from unittest import mock

import jax
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import conversions
from specjax.models import load
from tests.experiments import tiny_files


class ConversionsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.cache = self.folder / 'cache'
    self.model = tiny_files.write_folder(self.folder / 'model')

  def load(self, dtype='float32', quantize='none', model=None):
    """The model, the names that were really loaded, and what was said."""
    names, err = [], io.StringIO()
    really = load.load

    def spy(name, *args):
      names.append(name)
      return really(name, *args)

    with (
      mock.patch.object(load, 'load', spy),
      contextlib.redirect_stderr(err),
    ):
      loaded = conversions.load_model(
        str(model or self.model),
        dtype,
        quantize,
        None,
        cache_dir=str(self.cache),
      )
    return loaded, names, err.getvalue()

  def entries(self):
    return sorted(self.cache.iterdir()) if self.cache.exists() else []

  def assert_same(self, got, want):
    for name in ('name', 'model', 'stop_ids', 'config'):
      self.assertEqual(getattr(got, name), getattr(want, name), name)
    self.assertEqual(got.tokenizer.tokens, want.tokenizer.tokens)
    jax.tree.map(np.testing.assert_array_equal, got.params, want.params)

  @parameterized.parameters(
    ('float32', 'none'), ('bfloat16', 'none'), ('bfloat16', 'int8')
  )
  def test_the_second_time_it_comes_from_the_folder(self, dtype, quantize):
    want, names, err = self.load(dtype, quantize)
    self.assertEqual((names, err), ([str(self.model)], ''))
    (entry,) = self.entries()
    got, names, err = self.load(dtype, quantize)
    self.assertEqual((names, err), ([str(entry)], ''))
    self.assert_same(got, want)

  def test_a_gguf_file_too(self):
    model = tiny_files.write_gguf(self.folder / 'model.gguf')
    want, _, _ = self.load(model=model)
    moved = model.rename(self.folder / 'other.gguf')
    got, names, _ = self.load(model=moved)
    self.assertEqual(names, list(map(str, self.entries())))
    self.assertEqual(got.name, str(moved))
    jax.tree.map(np.testing.assert_array_equal, got.params, want.params)

  def test_whatever_changes_the_model_changes_the_entry(self):
    self.load()
    self.load('bfloat16')
    self.load('bfloat16', 'int8')
    self.assertLen(self.entries(), 3)
    path = self.model / 'model.safetensors'
    data = bytearray(path.read_bytes())
    data[-3] ^= 1  # A mantissa.
    path.write_bytes(data)
    self.load()
    self.assertLen(self.entries(), 4)
    (self.model / 'generation_config.json').write_text('{"eos_token_id": 3}')
    self.assertIn(3, self.load()[0].stop_ids)
    self.assertLen(self.entries(), 5)
    with mock.patch.object(conversions, '_VERSION', 2):
      self.load()
    self.assertLen(self.entries(), 6)

  def test_every_chunk_counts(self):
    path = self.folder / 'file'
    path.write_bytes(bytes(range(100)))
    name = lambda: conversions.entry_name([path], 'float32', 'none')
    with mock.patch.object(conversions, '_CHUNK_BYTES', 16):
      names = {name()}
      for i in (0, 15, 16, 99):
        data = bytearray(range(100))
        data[i] += 1
        path.write_bytes(data)
        names.add(name())
    self.assertLen(names, 5)

  @parameterized.parameters('missing', 'cut', 'changed', 'unhashed')
  def test_a_broken_entry_is_said_and_made_anew(self, how):
    want, _, _ = self.load()
    (entry,) = self.entries()
    files = [path for path in entry.rglob('*') if path.is_file()]
    largest = max(
      (path for path in files if 'params' in path.parts),
      key=lambda path: path.stat().st_size,
    )
    if how == 'missing':
      shutil.rmtree(entry / 'params')
    elif how == 'cut':
      os.truncate(largest, largest.stat().st_size // 2)
    elif how == 'changed':
      data = bytearray(largest.read_bytes())
      data[len(data) // 2] ^= 255
      largest.write_bytes(data)
    else:
      (entry / 'sha256').unlink()
    got, names, err = self.load()
    self.assertEqual(names, [str(self.model)])
    self.assertRegex(err, r'^--cache_dir: [^\n]* is made anew: [^\n]+\.\n$')
    self.assert_same(got, want)
    self.assertEqual(self.load()[1], [str(entry)])

  def test_a_folder_that_cannot_be_written_is_no_error(self):
    with mock.patch.object(load.orbax, 'save', side_effect=OSError('full')):
      loaded, _, err = self.load()
    self.assertIsNotNone(loaded.params)
    self.assertRegex(err, r'^--cache_dir: .* cannot be kept in .*: full\.\n$')
    self.assertEqual(self.entries(), [])

  def test_another_process_that_is_faster_is_no_error(self):
    want, _, _ = self.load()
    (entry,) = self.entries()
    away = entry.rename(self.folder / 'away')
    really = load.load

    def slow(*args):
      away.rename(entry)
      return really(*args)

    with mock.patch.object(load, 'load', slow):
      _, _, err = self.load()
    self.assertEqual((self.entries(), err), ([entry], ''))
    got, names, _ = self.load()
    self.assertEqual(names, [str(entry)])
    self.assert_same(got, want)

  def test_what_is_not_converted_goes_past(self):
    converted = self.folder / 'converted'
    load.save(converted, load.load(str(self.model), 'float32'))
    for model in ('demo:target', converted):
      self.assertEqual(self.load(model=model)[1], [str(model)])
    self.assertEqual(self.entries(), [])


if __name__ == '__main__':
  absltest.main()

"""Result files: whole or as they were."""

import dataclasses
import json
import os
import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

import tests.setup_jax  # noqa: F401
from experiments import text_files


@dataclasses.dataclass(frozen=True)
class Config:
  name: str
  sizes: tuple[int, ...]


class FilesTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)
    self.path = str(self.folder / 'result.json')

  def names(self):
    return sorted(p.name for p in self.folder.iterdir())

  def test_write_json_accepts_what_results_hold(self):
    text_files.write_json(
      self.path,
      {
        'config': Config(name='é', sizes=(1, 2)),
        'nan': float('nan'),
        'inf': [np.float32('inf'), 1.5],
        'int': np.int64(3),
        'flag': np.bool_(True),
        'array': np.arange(4).reshape(2, 2),
        'jax': jnp.array([0.5, jnp.nan]),
        'half': jnp.array(0.5, jnp.bfloat16),
        'path': self.folder,
        'none': None,
        3: 'key',
      },
    )
    with open(self.path, encoding='utf-8') as file:
      self.assertEqual(
        json.load(file),
        {
          'config': {'name': 'é', 'sizes': [1, 2]},
          'nan': None,
          'inf': [None, 1.5],
          'int': 3,
          'flag': True,
          'array': [[0, 1], [2, 3]],
          'jax': [0.5, None],
          'half': 0.5,
          'path': str(self.folder),
          'none': None,
          '3': 'key',
        },
      )
    self.assertEqual(self.names(), ['result.json'])

  def test_a_failed_write_leaves_the_old_file_and_nothing_else(self):
    text_files.write_json(self.path, {'old': 1})
    with self.assertRaisesRegex(TypeError, 'object cannot be written'):
      text_files.write_json(self.path, {'new': object()})
    with absltest.mock.patch.object(os, 'replace', side_effect=OSError('full')):
      with self.assertRaisesRegex(OSError, 'full'):
        text_files.write_json(self.path, {'new': 2})
    self.assertEqual(text_files.read_text(self.path), '{\n  "old": 1\n}\n')
    self.assertEqual(self.names(), ['result.json'])

  def test_a_link_stays_a_link_and_a_pipe_a_pipe(self):
    link = self.folder / 'link.json'
    link.symlink_to('result.json')
    text_files.write_json(str(link), 1)
    self.assertTrue(link.is_symlink())
    self.assertEqual(text_files.read_text(self.path), '1\n')
    text_files.write_json(os.devnull, 1)
    self.assertFalse(os.path.isfile(os.devnull))

  def test_check_writable_creates_nothing(self):
    text_files.check_writable(self.path)
    text_files.check_writable(os.devnull)
    self.assertEqual(self.names(), [])
    text_files.write_json(self.path, 1)
    text_files.check_writable(self.path)

  def test_check_writable_refuses(self):
    text_files.write_json(self.path, 1)
    for path, reason in (
      ('', 'the path is empty'),
      (str(self.folder), 'it is a folder'),
      (str(self.folder / 'no' / 'x'), 'is not an existing folder'),
      (self.path + '/x', 'is not an existing folder'),
    ):
      with self.subTest(path), self.assertRaisesRegex(ValueError, reason):
        text_files.check_writable(path)
    with absltest.mock.patch.object(os, 'access', return_value=False):
      with self.assertRaisesRegex(ValueError, 'cannot write .*read-only'):
        text_files.check_writable(self.path)
      with self.assertRaisesRegex(ValueError, 'folder .* is read-only'):
        text_files.check_writable(str(self.folder / 'new'))

  def test_read_text_names_file_and_byte(self):
    pathlib.Path(self.path).write_bytes(b'abc\xff')
    with self.assertRaisesRegex(ValueError, 'json. is not valid .* 0xff at 3'):
      text_files.read_text(self.path)


if __name__ == '__main__':
  absltest.main()

"""Versions, device and commit of a result."""

import json
import pathlib
import subprocess
import tempfile

import jax
from absl.testing import absltest

import tests.setup_jax  # noqa: F401
from experiments import surroundings


class EnvironmentTest(absltest.TestCase):
  def test_names_versions_device_and_revision(self):
    found = surroundings.environment()
    self.assertEqual(found['jax'], jax.__version__)
    self.assertEqual(found['platform'], 'cpu')
    self.assertEqual(found['device_count'], 8)
    json.dumps(found, allow_nan=False)

  def test_without_git(self):
    with absltest.mock.patch.object(subprocess, 'run', side_effect=OSError):
      found = surroundings.environment()
    self.assertIsNone(found['git_revision'])
    self.assertIsNone(found['git_clean'])

  def test_inside_a_foreign_repository(self):
    with tempfile.TemporaryDirectory() as folder:
      subprocess.run(('git', 'init', '-q', folder), check=True)
      inner = pathlib.Path(folder, 'inner')
      inner.mkdir()
      with absltest.mock.patch.object(surroundings, 'ROOT', inner.resolve()):
        self.assertIsNone(surroundings.environment()['git_revision'])


if __name__ == '__main__':
  absltest.main()

"""A real file on one device, on eight, and on eight of two processes."""

from absl.testing import absltest

import tests.setup_jax  # noqa: F401
from tests.experiments import mesh_runs
from tests.real_models import files


class SmolLM2Test(absltest.TestCase):
  def test_processes_and_devices_do_not_change_the_text(self):
    argv = [f'--target={files.find(files.SMOLLM2)}', '--proposer=ngram']
    mesh = '--mesh=data:2,model:4'
    one_device = mesh_runs.tokens(argv, 1, 1)
    self.assertEqual(mesh_runs.tokens([*argv, mesh], 2, 4), one_device)
    self.assertEqual(mesh_runs.tokens([*argv, mesh], 1, 8), one_device)


if __name__ == '__main__':
  absltest.main()

"""A real file on one device, on eight, and on eight of two processes."""

from absl.testing import absltest

import tests.setup_jax  # noqa: F401
from tests.experiments import mesh_runs
from tests.real_models import files


class SmolLM2Test(absltest.TestCase):
  def test_processes_and_devices_do_not_change_the_text(self):
    target = f'--target={files.find(files.SMOLLM2)}'
    lookup = [target, '--proposer=ngram']
    mesh = '--mesh=data:2,model:4'
    one_device = mesh_runs.tokens(lookup, 1, 1)
    self.assertEqual(mesh_runs.tokens([*lookup, mesh], 2, 4), one_device)
    self.assertEqual(mesh_runs.tokens([*lookup, mesh], 1, 8), one_device)
    # Coupled text does not depend on the proposer either: here the target
    # drafts for itself, lying elsewhere.
    twins = [target, target.replace('target', 'draft', 1), mesh]
    twins.append('--draft_mesh=model:2')
    self.assertEqual(mesh_runs.tokens(twins, 1, 8), one_device)


if __name__ == '__main__':
  absltest.main()

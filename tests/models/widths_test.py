"""A token's logits have the same bits in a pass of any width."""

import os
import subprocess
import sys

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401


class WidthsTest(parameterized.TestCase):
  @parameterized.parameters(('1', 'none'), ('3', 'int8'), ('attention',))
  def test_rows_do_not_depend_on_the_width(self, *what):
    environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
    ran = subprocess.run(
      [sys.executable, '-m', 'tests.models.widths', *what],
      env=environment,
      capture_output=True,
      text=True,
    )
    self.assertEqual(ran.returncode, 0, ran.stderr)
    if ran.stdout == 'rows depend on the width\n':
      self.skipTest('kernels were not built: bfloat16 rows depend on the width')
    self.assertEqual(ran.stdout, 'equal\n')


if __name__ == '__main__':
  absltest.main()

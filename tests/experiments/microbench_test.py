"""Every micro-benchmark runs and says what it did; no time is asserted."""

import contextlib
import io
import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import microbench, script


def run(*argv):
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    code = script.run_main(microbench.main, microbench.FLAG_GROUPS, argv)
  return code, out.getvalue(), err.getvalue()


class MicrobenchTest(parameterized.TestCase):
  def test_quick(self):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / 'x.json'
      code, out, err = run('--quick', f'--json_out={path}')
      self.assertEqual(code, 0, err)
      rows = json.loads(path.read_text())['rows']
    # Kernels may not be installed; everything else is there.
    self.assertContainsSubset(
      {'products', 'attention', 'layer', 'sampling', 'cache'},
      {row['part'] for row in rows},
    )
    for row in rows:
      self.assertGreater(row['milliseconds'], 0)
      self.assertBetween(row['milliseconds'], row['least'], row['most'])
      self.assertIn(row['name'], out)

  @parameterized.parameters(
    ('--parts=magic', "--parts must be some of products, .*'magic'"),
    ('--parts=', '--parts must be some of'),
    ('--json_out=nowhere/x', "cannot write 'nowhere/x'"),
  )
  def test_bad_input(self, argument, message):
    code, out, err = run(argument)
    self.assertEqual((code, out), (2, ''), err)
    self.assertRegex(err, rf'^microbench\.py: .*{message}.*\.$')


if __name__ == '__main__':
  absltest.main()

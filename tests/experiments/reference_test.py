"""The API reference: what is done to docstrings, and what is refused."""

import contextlib
import importlib.util
import io
import pathlib
import tempfile

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import reference, script


def run(*args: str) -> tuple[int, str, str]:
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    code = script.run_main(
      reference.main, reference.FLAG_GROUPS, args, keeps_compiled=False
    )
  return code, out.getvalue(), err.getvalue()


class ReferenceTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  @parameterized.parameters(
    # A drawing of several lines, at the end.
    ('A.\n\n  x y\n    z', 'A.\n\n```text\n  x y\n    z\n```\n'),
    # Sections are left to pdoc, as are second paragraphs of prose.
    ('A.\n\nArgs:\n  x: [B].\n\nB.', 'A.\n\nArgs:\n  x: [B].\n\nB.'),
    ('A.\nLossy: b.\n', 'A.\n\n**Lossy**: b.\n'),
    ('nothing Lossless here', 'nothing Lossless here'),
  )
  def test_readable(self, docstring, expected):
    self.assertEqual(reference.readable(docstring), expected)

  def test_a_folder_that_holds_something_is_refused(self):
    (self.folder / 'x').write_text('mine')
    code, _, err = run(f'--out={self.folder}')
    self.assertEqual(code, script.BAD_INPUT)
    self.assertIn('must be a folder that is absent or empty', err)
    self.assertEqual((self.folder / 'x').read_text(), 'mine')

  def test_without_pdoc_it_says_what_to_install(self):
    if importlib.util.find_spec('pdoc') is not None:
      self.skipTest('pdoc is installed: make docs builds the pages.')
    code, _, err = run(f'--out={self.folder / "docs"}')
    self.assertEqual(code, script.BAD_INPUT)
    self.assertIn("pip install 'specjax[docs]'", err)
    self.assertEmpty(list(self.folder.iterdir()))


if __name__ == '__main__':
  absltest.main()

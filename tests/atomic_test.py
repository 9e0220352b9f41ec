"""Whatever happens, a file is the old one or the new one, never half of one."""

import pathlib
import tempfile

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import atomic


def write_file(path: pathlib.Path, text: str):
  path.write_text(text, encoding='utf-8')


def write_folder(path: pathlib.Path, text: str):
  (path / 'deep').mkdir(parents=True)
  (path / 'deep' / 'x').write_text(text, encoding='utf-8')


def contents(folder: pathlib.Path) -> dict[str, str]:
  files = (path for path in folder.rglob('*') if path.is_file())
  return {str(p.relative_to(folder)): p.read_text() for p in files}


class ReplacingTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def test_a_file_takes_the_place_of_the_old_one(self):
    path = self.folder / 'a'
    write_file(path, 'old')
    with atomic.replacing(path) as unfinished:
      self.assertFalse(unfinished.exists())
      self.assertEqual(unfinished.parent, self.folder)
      write_file(unfinished, 'new')
      self.assertEqual(path.read_text(), 'old')
    self.assertEqual(contents(self.folder), {'a': 'new'})

  @parameterized.parameters(True, False)
  def test_a_folder_takes_the_place_of_none_and_of_an_empty_one(self, is_there):
    path = self.folder / 'a'
    if is_there:
      path.mkdir()
    with atomic.replacing(path) as unfinished:
      write_folder(unfinished, 'new')
      self.assertEqual(contents(path), {})
    self.assertEqual(contents(self.folder), {'a/deep/x': 'new'})

  @parameterized.product(
    write=(write_file, write_folder, None),
    error=(ValueError, KeyboardInterrupt),
  )
  def test_an_error_leaves_what_was_there(self, write, error):
    path = self.folder / 'a'
    write_file(path, 'old')
    with self.assertRaises(error):
      with atomic.replacing(path) as unfinished:
        if write is not None:
          write(unfinished, 'new')
        raise error
    self.assertEqual(contents(self.folder), {'a': 'old'})

  def test_a_folder_that_holds_something_is_not_replaced(self):
    write_folder(self.folder / 'a', 'old')
    with self.assertRaises(OSError):
      with atomic.replacing(self.folder / 'a') as unfinished:
        write_folder(unfinished, 'new')
    self.assertEqual(contents(self.folder), {'a/deep/x': 'old'})


if __name__ == '__main__':
  absltest.main()

"""Files and folders that are there whole, or not at all."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
  """A name beside `path`, which takes its place in one step.

  Under that name the caller writes a file, or makes a folder and fills it. When
  the block ends, it is renamed to `path`; when it raises, whatever stands there
  is removed, and `path` is as it was. A process that is killed leaves the other
  name behind: it begins with a dot, has the process id, and ends in
  '.unfinished'.

  Args:
    path: where a file is replaced; a folder there must be empty.

  Yields:
    The absolute path to write to; nothing is there yet.

  Raises:
    OSError: the renaming is not possible.

  >>> import tempfile
  >>> folder = pathlib.Path(tempfile.mkdtemp())
  >>> with replacing(folder / 'a.txt') as unfinished:
  ...   _ = unfinished.write_text('all of it')
  >>> [(p.name, p.read_text()) for p in folder.iterdir()]
  [('a.txt', 'all of it')]
  """
  path = pathlib.Path(path).absolute()
  unfinished = path.with_name(f'.{path.name}.{os.getpid()}.unfinished')
  try:
    yield unfinished
    os.replace(unfinished, path)
  except BaseException:
    if unfinished.is_dir():
      shutil.rmtree(unfinished, ignore_errors=True)
    else:
      unfinished.unlink(missing_ok=True)
    raise

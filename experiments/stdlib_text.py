"""Python's standard library as a text to train on, and what is kept from it.

It lies on every machine that runs specjax, is openly licensed (PSF), and
changes little from one Python to the next.
"""

import pathlib
import sysconfig

# Never trained on: prompts and measurements come from here.
HELD_OUT = (
  'asyncio/queues.py',
  'calendar.py',
  'cmd.py',
  'csv.py',
  'email/utils.py',
  'fnmatch.py',
  'graphlib.py',
  'heapq.py',
  'json/encoder.py',
  'netrc.py',
  'sched.py',
  'shlex.py',
  'statistics.py',
  'textwrap.py',
  'tomllib/_parser.py',
  'zipapp.py',
)

# Tests and tables, other people's packages, and programs that come along.
_LEFT_OUT = frozenset(
  (
    '__pycache__',
    'encodings',
    'ensurepip',
    'idlelib',
    'lib2to3',
    'pydoc_data',
    'site-packages',
    'test',
    'tests',
    'turtledemo',
  )
)


def _root() -> pathlib.Path:
  return pathlib.Path(sysconfig.get_paths()['stdlib'])


def training_files() -> list[pathlib.Path]:
  """The modules to train on, in an order that no file system changes."""
  root = _root()
  found = (path.relative_to(root) for path in root.rglob('*.py'))
  return [
    root / path
    for path in sorted(found, key=lambda path: path.as_posix())
    if not _LEFT_OUT.intersection(path.parts)
    and path.as_posix() not in HELD_OUT
  ]


def held_out_files() -> list[pathlib.Path]:
  """The modules that are kept, those of them that this Python has."""
  root = _root()
  return [root / name for name in HELD_OUT if (root / name).is_file()]

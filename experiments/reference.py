"""Writes the API reference, made from the docstrings, as web pages.

  reference.py --out=build/docs      (what `make docs` does)

Needs the extra `docs`. What pdoc warns of is an error and ends with a
traceback: a module that cannot be imported, a name in `__all__` that is not
there.
"""

import pathlib
import pkgutil
import re
import sys
import warnings

from absl import flags

import specjax
from experiments import script
from specjax import atomic


def define_flags(values: flags.FlagValues):
  flags.DEFINE_string(
    'out', '', 'Folder to write, absent or empty.', flag_values=values
  )


FLAG_GROUPS = (('Output', define_flags),)

# A formula or a drawing: indented, and behind an empty line.
_BLOCK = re.compile(r'(?<=\n\n)(?: +\S.*(?:\n|\Z))+')
# Lines that begin a paragraph, whether or not an empty line is before them.
_LABEL = re.compile(r'^(Source|Lossless|Lossy)\b', re.MULTILINE)
_PAPER = re.compile(r'arXiv:(\d{4}\.\d{4,5})')


def readable(docstring: str) -> str:
  """A docstring as Markdown: drawings stay drawings, papers become links.

  >>> readable('One.\\n\\n  a -> b\\n\\nSource: X, arXiv:2211.17192.')
  'One.\\n\\n```text\\n  a -> b\\n```\\n\\n\\n**Source**: X, \
[arXiv:2211.17192](https://arxiv.org/abs/2211.17192).'
  """
  docstring = _BLOCK.sub(
    lambda m: f'```text\n{m[0].rstrip()}\n```\n', docstring
  )
  docstring = _LABEL.sub(r'\n**\1**', docstring)
  return _PAPER.sub(r'[arXiv:\1](https://arxiv.org/abs/\1)', docstring)


def write(folder: pathlib.Path):
  """One page per module of specjax."""
  import pdoc
  from pdoc import render, render_helpers

  render.configure(docformat='google')
  render.env.filters['to_markdown'] = render_helpers.pass_context(
    lambda context, text: render_helpers.to_markdown(
      readable(text), context['module'], context['docformat']
    )
  )
  with warnings.catch_warnings():
    warnings.simplefilter('error', UserWarning)
    pdoc.pdoc(*_roots(), output_directory=folder)


def _roots() -> list[str]:
  """The modules that pdoc does not find by itself.

  It looks into a package unless `__all__` says what is in it.
  """
  roots = ['specjax']
  for module in pkgutil.walk_packages(specjax.__path__, 'specjax.'):
    package = sys.modules[module.name.rpartition('.')[0]]
    if hasattr(package, '__all__'):
      roots.append(module.name)
  return [*roots, r'!.*\._']


def main(values: flags.FlagValues):
  folder = pathlib.Path(values.out)
  is_free = not folder.exists() or (
    folder.is_dir() and not any(folder.iterdir())
  )
  if not values.out or not is_free:
    raise ValueError(
      f'--out must be a folder that is absent or empty, got {values.out!r}.'
    )
  folder.parent.mkdir(parents=True, exist_ok=True)
  with atomic.replacing(folder) as unfinished:
    write(unfinished)
  print(folder / 'index.html')


if __name__ == '__main__':
  sys.exit(script.run_main(main, FLAG_GROUPS))

"""Writes the API reference, made from the docstrings, as web pages.

  python docs/reference.py build/docs      (what `make docs` does)

Needs the extra `docs`. What pdoc warns of is an error: a module that cannot be
imported, a name in `__all__` that is not there.
"""

import pathlib
import pkgutil
import re
import sys
import warnings

import pdoc
import pdoc.render
import pdoc.render_helpers

import specjax

# A formula or a drawing: indented, and behind an empty line.
_BLOCK = re.compile(r'(?<=\n\n)(?: +\S.*(?:\n|\Z))+')
# Lines that begin a paragraph, whether or not an empty line is before them.
_LABEL = re.compile(r'^(Source|Lossless|Lossy)\b', re.MULTILINE)
_PAPER = re.compile(r'arXiv:(\d{4}\.\d{4,5})')


def readable(docstring: str) -> str:
  """A docstring as pdoc's Markdown wants it."""
  docstring = _BLOCK.sub(
    lambda m: f'```text\n{m[0].rstrip()}\n```\n', docstring
  )
  docstring = _LABEL.sub(r'\n**\1**', docstring)
  return _PAPER.sub(r'[arXiv:\1](https://arxiv.org/abs/\1)', docstring)


def write(folder: pathlib.Path) -> None:
  """One page per module of specjax; the folder is made if it is missing."""
  to_markdown = pdoc.render_helpers.to_markdown
  pdoc.render.configure(docformat='google')
  pdoc.render.env.filters['to_markdown'] = pdoc.render_helpers.pass_context(
    lambda context, text: to_markdown(
      readable(text), context['module'], context['docformat']
    )
  )
  with warnings.catch_warnings():
    warnings.simplefilter('error')
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


if __name__ == '__main__':
  if len(sys.argv) != 2:
    sys.exit('usage: python docs/reference.py FOLDER')
  write(pathlib.Path(sys.argv[1]))

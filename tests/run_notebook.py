"""Runs a notebook top to bottom in a process of its own, without Jupyter.

  python -m tests.run_notebook notebooks/1_the_scribes_apprentice.ipynb

What a cell ends with is shown as Jupyter would show it: the name of its type,
and for a figure or a page that it was drawn.
"""

import ast
import json
import pathlib
import sys
from typing import Any


def code_cells(path: pathlib.Path) -> list[str]:
  """The sources of a notebook's code cells."""
  cells = json.loads(path.read_text(encoding='utf-8'))['cells']
  return [''.join(c['source']) for c in cells if c['cell_type'] == 'code']


def show(value: Any) -> str:
  """What Jupyter would make of a cell's last value, in a line or more."""
  for method in ('_repr_png_', '_repr_html_', '_repr_markdown_'):
    if hasattr(value, method):
      size = len(getattr(value, method)())
      return f'<{type(value).__name__}: {method} of {size}>'
  return repr(value)


def run(path: pathlib.Path):
  """Executes every cell; prints what they print and show."""
  namespace = {'__name__': '__main__'}
  for i, source in enumerate(code_cells(path), 1):
    name = f'{path.name}, code cell {i}'
    body = ast.parse(source, name).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), name, 'exec'), namespace)
    if last is not None:
      value = eval(compile(ast.Expression(last.value), name, 'eval'), namespace)
      if value is not None:
        print(show(value))


if __name__ == '__main__':
  run(pathlib.Path(sys.argv[1]))

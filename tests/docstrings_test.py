"""Public names say what they are: shapes, errors, what is lossless, and where
it comes from. Read off the syntax trees: nothing is imported.

That a sentence is true no test sees; that it is missing, this one does.
"""

import ast
import dataclasses
import pathlib
import re
from collections.abc import Iterator

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = sorted((ROOT / 'specjax').rglob('*.py'))
SCRIPTS = sorted(
  path
  for folder in ('experiments', 'docs')
  for path in (ROOT / folder).rglob('*.py')
)

SUFFIX = re.compile(r'\w_[A-Z1-9]+\b')  # tokens_BT
SHAPE = re.compile(r'\[(?:|\.\.\.|[A-Za-z0-9_ +*]+)(?:, ?[A-Za-z0-9_. +*]+)*\]')


@dataclasses.dataclass(frozen=True)
class Public:
  """A module, a class, a function or a method that others may use.

  Attributes:
    name: where it is found.
    node: its syntax tree.
  """

  name: str
  node: ast.Module | ast.ClassDef | ast.FunctionDef

  @property
  def doc(self) -> str:
    return ast.get_docstring(self.node) or ''


def public(path: pathlib.Path) -> Iterator[Public]:
  """What a file offers, itself first; special methods are not counted."""
  tree = ast.parse(path.read_text(encoding='utf-8'))
  name = str(path.relative_to(ROOT))
  yield Public(name, tree)
  yield from _members(name, tree)


def _members(name: str, node: ast.Module | ast.ClassDef) -> Iterator[Public]:
  for child in node.body:
    is_ours = isinstance(child, (ast.ClassDef, ast.FunctionDef))
    if is_ours and (child.name[0] != '_' or child.name == '__call__'):
      yield Public(f'{name}:{child.lineno} {child.name}', child)
    if isinstance(child, ast.ClassDef) and child.name[0] != '_':
      yield from _members(name, child)


def is_array(annotation: ast.expr | None) -> bool:
  text = '' if annotation is None else ast.unparse(annotation)
  return re.search(r'(?<![\w.])(jax\.|jnp\.)?Array\b', text) is not None


def raises(node: ast.AST, error: str) -> bool:
  """Whether it raises such an error itself, not by way of another function."""
  for child in ast.iter_child_nodes(node):
    if isinstance(child, ast.Raise) and error in ast.unparse(child):
      return True
    is_other = isinstance(child, (ast.FunctionDef, ast.ClassDef, ast.Lambda))
    if not is_other and raises(child, error):
      return True
  return False


def says_shape(name: str, doc: str) -> bool:
  """Whether the name ends in axes, or the entry of the name has a shape."""
  entry = re.search(rf'\b{name}:(.*?)(?=\n *\w+:|\Z)', doc, re.S)
  return bool(SUFFIX.search(name) or (entry and SHAPE.search(entry[1])))


EVERYTHING = [item for path in PACKAGE for item in public(path)]
FUNCTIONS = [i for i in EVERYTHING if isinstance(i.node, ast.FunctionDef)]
CLASSES = [i for i in EVERYTHING if isinstance(i.node, ast.ClassDef)]


class DocstringsTest(parameterized.TestCase):
  def test_everything_public_has_one(self):
    scripts = [next(public(path)) for path in SCRIPTS]
    found = [i.name for i in (*EVERYTHING, *scripts) if i.node.body]
    self.assertGreater(len(found), 500)
    missing = [i.name for i in (*EVERYTHING, *scripts) if not i.doc.strip()]
    self.assertEqual(missing, [], '\n'.join(missing))

  def test_arrays_that_are_taken_have_a_shape(self):
    missing = []
    for item in FUNCTIONS:
      arguments = item.node.args
      for a in (*arguments.args, *arguments.kwonlyargs):
        if is_array(a.annotation) and not says_shape(a.arg, item.doc):
          missing.append(f'{item.name}: {a.arg}')
    self.assertEqual(missing, [], '\n'.join(missing))

  def test_arrays_that_are_fields_have_a_shape(self):
    missing = []
    for item in CLASSES:
      for f in item.node.body:
        if isinstance(f, ast.AnnAssign) and is_array(f.annotation):
          if not says_shape(f.target.id, item.doc):
            missing.append(f'{item.name}: {f.target.id}')
    self.assertEqual(missing, [], '\n'.join(missing))

  def test_arrays_that_are_returned_have_a_shape(self):
    missing = []
    for item in FUNCTIONS:
      if is_array(item.node.returns):
        if not (SHAPE.search(item.doc) or SUFFIX.search(item.doc)):
          missing.append(item.name)
    self.assertEqual(missing, [], '\n'.join(missing))

  def test_errors_are_announced(self):
    missing = []
    for item in EVERYTHING:
      node = item.node
      if isinstance(node, ast.ClassDef):
        node = next(
          (x for x in node.body if getattr(x, 'name', '') == '__post_init__'),
          None,
        )
      for error in ('ValueError',):
        if node and not isinstance(node, ast.Module) and raises(node, error):
          if not re.search(rf'[Rr]aises:?\s+{error}', item.doc):
            missing.append(item.name)
    self.assertEqual(missing, [], '\n'.join(missing))

  def test_strategies_say_what_they_keep_and_where_they_come_from(self):
    missing = []
    for item in CLASSES:
      names = {getattr(x, 'name', '') for x in item.node.body}
      bases = [ast.unparse(base) for base in item.node.bases]
      room = item.name.split('/')[1]
      is_strategy = (
        (room == 'verify' and '__call__' in names)
        or (room == 'proposers' and names & {'propose', 'goes_on'})
      ) and 'Protocol' not in bases
      if is_strategy and not re.search(r'^Loss(less|y)\b', item.doc, re.M):
        missing.append(f'{item.name}: Lossless or Lossy')
      if is_strategy and not re.search(r'^Source: ', item.doc, re.M):
        missing.append(f'{item.name}: Source')
    self.assertEqual(missing, [], '\n'.join(missing))


if __name__ == '__main__':
  absltest.main()

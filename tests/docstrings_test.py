"""Public names say what they are: shapes, errors, what is lossless, and where
it comes from. Read off the syntax trees: nothing is imported.

Whether a sentence is true no test sees; whether it is there, this one does.
"""

import ast
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / 'experiments').rglob('*.py'))

_SUFFIX = re.compile(r'_[A-Z1-9]+$')  # tokens_BT
_AXIS = r'[\w *+/-]+|\.\.\.'
_SHAPE = re.compile(rf'\[(?:(?:{_AXIS})(?:, (?:{_AXIS}))*)?\]')  # [B, T, C / 2]


class Public(NamedTuple):
  """A module, a class, a function or a method that others may use.

  Attributes:
    name: where it is found.
    node: its syntax tree.
    promised: what protocols say of methods of that name: an implementation
      need not repeat it.
  """

  name: str
  node: ast.Module | ast.ClassDef | ast.FunctionDef
  promised: str = ''

  @property
  def doc(self) -> str:
    return ast.get_docstring(self.node) or ''

  @property
  def full_doc(self) -> str:
    return f'{self.doc}\n{self.promised}'


def public(sources: dict[str, str]) -> list[Public]:
  """What some files offer: themselves, classes, functions and methods.

  Special methods are not counted, but for calls.

  Args:
    sources: texts by their names.
  """
  found = []
  for name, text in sources.items():
    tree = ast.parse(text)
    found += [Public(name, tree), *_members(name, tree)]
  promised = {}
  for item in found:
    if is_protocol(item.node):
      for method in _members(item.name, item.node):
        old = promised.get(method.node.name, '')
        promised[method.node.name] = f'{old}\n{method.doc}'
  return [
    item._replace(promised=promised.get(getattr(item.node, 'name', ''), ''))
    for item in found
  ]


def _members(name: str, node: ast.Module | ast.ClassDef) -> Iterator[Public]:
  for child in node.body:
    if not isinstance(child, (ast.ClassDef, ast.FunctionDef)):
      continue
    if child.name[0] != '_' or child.name == '__call__':
      own_name = f'{name}:{child.lineno} {child.name}'
      yield Public(own_name, child)
      if isinstance(child, ast.ClassDef):
        yield from _members(name, child)


def is_protocol(node: ast.AST) -> bool:
  bases = node.bases if isinstance(node, ast.ClassDef) else ()
  return 'Protocol' in map(ast.unparse, bases)


def is_array(annotation: ast.expr | None) -> bool:
  """Whether it is an array, or holds one; a function of arrays is none."""
  text = '' if annotation is None else ast.unparse(annotation)
  return bool(re.search(r'\bArray\b', re.sub(r'Callable\[.*\]', '', text)))


def raises_error(node: ast.AST) -> bool:
  """Whether it does so itself, or calls something that is named after it."""
  for child in ast.iter_child_nodes(node):
    if isinstance(child, ast.Raise) and 'ValueError' in ast.unparse(child):
      return True
    if isinstance(child, ast.Call):
      called = ast.unparse(child.func).rpartition('.')[2]
      if called.startswith(('check_', '_check')):
        return True
    is_other = isinstance(child, (ast.FunctionDef, ast.ClassDef, ast.Lambda))
    if not is_other and raises_error(child):
      return True
  return False


def has_shape(name: str, doc: str) -> bool:
  """Whether the name ends in its axes, or has an entry with a shape."""
  entry = re.search(rf'\b{name}: (.*?)(?=\n *\w+: |\n\n|\Z)', doc, re.S)
  return bool(_SUFFIX.search(name) or (entry and _SHAPE.search(entry[1])))


def undocumented(items: Iterable[Public]) -> list[str]:
  return [item.name for item in items if not item.doc.strip()]


def shapeless(items: Iterable[Public]) -> list[str]:
  """Arrays that are taken, kept or returned, and nobody knows their shape."""
  found = []
  for item in items:
    node = item.node
    arrays = []
    if isinstance(node, ast.FunctionDef):
      arguments = (*node.args.args, *node.args.kwonlyargs)
      arrays = [a.arg for a in arguments if is_array(a.annotation)]
      if is_array(node.returns) and not _SHAPE.search(item.full_doc):
        found.append(f'{item.name}: what it returns')
    if isinstance(node, ast.ClassDef):
      fields = (f for f in node.body if isinstance(f, ast.AnnAssign))
      arrays = [f.target.id for f in fields if is_array(f.annotation)]
    found += [
      f'{item.name}: {array}'
      for array in arrays
      if not has_shape(array, item.full_doc)
    ]
  return found


def unannounced(items: Iterable[Public]) -> list[str]:
  """Functions and classes that refuse something and do not say what."""
  found = []
  for item in items:
    node = item.node
    if isinstance(node, ast.ClassDef):
      made = [x for x in node.body if getattr(x, 'name', '') == '__post_init__']
      node = made[0] if made else None
    is_announced = re.search(r'[Rr]aises:?\s+\w+Error', item.doc)
    if isinstance(node, ast.FunctionDef) and raises_error(node):
      found += [] if is_announced else [item.name]
  return found


def unfounded(items: Iterable[Public]) -> list[str]:
  """Strategies: is the law kept, and whose idea is it.

  Strategies are verification rules, proposers and stopping rules.
  """
  found = []
  for item in items:
    if not isinstance(item.node, ast.ClassDef) or is_protocol(item.node):
      continue
    methods = {getattr(child, 'name', '') for child in item.node.body}
    is_rule = '/verify/' in item.name and '__call__' in methods
    is_proposer = '/proposers/' in item.name and methods & {
      'propose',
      'goes_on',
    }
    if is_rule or is_proposer:
      for label, pattern in (
        ('Lossless or Lossy', r'^(Lossless|Lossy)\b'),
        ('Source', r'^Source: '),
      ):
        if not re.search(pattern, item.doc, re.M):
          found.append(f'{item.name}: {label}')
  return found


PACKAGE = public(
  {
    str(path.relative_to(ROOT)): path.read_text(encoding='utf-8')
    for path in sorted((ROOT / 'specjax').rglob('*.py'))
  }
)

BAD = '''
"""A module."""
class Kind(Protocol):
  """A protocol."""
  def given(self, logits: Array) -> Array:
    """Args:
      logits: [B, V].
    """
class Own:
  def given(self, logits: Array) -> Array:
    """As promised."""
  def taken(self, logits: Array, i_B: Array) -> tuple[Array, int]:
    """Of logits: what it says."""
  def _hidden(self): ...
  def __post_init__(self):
    if self.x:
      raise ValueError('x')
class Guess:
  """Guesses.

  Lossless: yes.

  Attributes:
    kept: int32.
    row_B: int32.
  """
  kept: Array
  row_B: Array
  def propose(self, f: Callable[[Array], Array]) -> int:
    """Says one."""
    def inside():
      raise ValueError('no')
def check(x):
  """Checks it."""
  raise ValueError('x')
def checked(x):
  """Raises ValueError unless it is good."""
  raise ValueError('x')
def caller(x):
  """Has it checked."""
  return base.check_it(x)
'''


class DocstringsTest(parameterized.TestCase):
  @parameterized.parameters(undocumented, shapeless, unannounced, unfounded)
  def test_package(self, find):
    self.assertGreater(len(PACKAGE), 500)
    self.assertEqual(find(PACKAGE), [], '\n'.join(find(PACKAGE)))

  def test_every_script_says_what_it_does(self):
    for path in SCRIPTS:
      with self.subTest(str(path.relative_to(ROOT))):
        tree = ast.parse(path.read_text(encoding='utf-8'))
        self.assertTrue(ast.get_docstring(tree))

  @parameterized.parameters(
    (undocumented, ['Own']),
    (
      shapeless,
      ['taken: what it returns', 'taken: logits', 'Guess: kept'],
    ),
    (unannounced, ['Own', 'check', 'caller']),
    (unfounded, ['Guess: Source']),
  )
  def test_what_is_missing_is_found(self, find, expected):
    found = find(public({'specjax/proposers/bad.py': BAD}))
    self.assertEqual([name.split(' ', 1)[1] for name in found], expected)


if __name__ == '__main__':
  absltest.main()

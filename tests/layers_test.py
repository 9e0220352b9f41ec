"""The rules of the layout, read off the syntax trees: nothing is imported.

A module of specjax imports from rooms above its own only, a room being the
first name below the package (`specjax/verify/chain.py` is in `verify`).
"""

import ast
import pathlib
import sys
from collections.abc import Iterator

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parents[1]

# From top to bottom; rooms in one line do not see each other.
ROOMS = (
  ('shapes', 'atomic'),
  ('sharding', 'kernels'),
  ('noise', 'ranking', 'tokenizers', 'mesh'),
  ('sampling', 'gguf_tokenizer', 'tokenizer_files', 'detokenize', 'chat'),
  ('models',),
  ('proposers',),
  ('verify',),
  ('state',),
  ('metrics', 'commit'),
  ('decode', 'requests', 'text_drafts'),
  ('generation',),
  ('training', 'pictures'),
  ('testing',),
)
LEVELS = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}

CORE = ('jax', 'flax', 'optax', 'orbax', 'numpy', 'absl')
BAD_NAMES = ('utils.py', 'types.py', 'typing.py')

# Calls that make an array or start the backend; a test could no longer ask
# for fake devices after it. The exceptions only describe a dtype.
STARTERS = (
  'jnp.',
  'jax.numpy.',
  'jax.random.',
  'jax.device',
  'jax.local_device',
  'jax.default_backend',
)
HARMLESS = ('dtype', 'finfo', 'iinfo')

PACKAGE = sorted((ROOT / 'specjax').rglob('*.py'))


def room_of(module: str) -> str | None:
  """'decode' of 'specjax.decode'; None for specjax itself."""
  return (module.split('.') + [None])[1]


def imported(node: ast.AST) -> list[str]:
  """The full names that an import statement may bind."""
  if isinstance(node, ast.Import):
    return [alias.name for alias in node.names]
  if isinstance(node, ast.ImportFrom):
    module = '.' * node.level + (node.module or '')
    return [f'{module}.{alias.name}' for alias in node.names]
  return []


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
  """The nodes below that are evaluated when the module is imported.

  Bodies of functions are left out; their decorators and defaults are not.
  """
  for child in ast.iter_child_nodes(node):
    if isinstance(child, ast.Lambda):
      continue
    yield child
    if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
      for part in (*child.decorator_list, child.args):
        yield part
        yield from run_at_import(part)
    else:
      yield from run_at_import(child)


def violations(source: str, room: str | None) -> list[str]:
  """What the source of a module in `room` does that it must not.

  >>> violations('from specjax import decode', 'verify')
  ['line 1: verify must not import decode']
  """
  tree = ast.parse(source)
  found = []
  for node in ast.walk(tree):
    for name in imported(node):
      other = room_of(name)
      if room is None or name.split('.')[0] != 'specjax' or other == room:
        continue
      if other not in LEVELS:
        # A name of the package itself, which imports every room.
        found.append(f'line {node.lineno}: {name} is in no room')
      elif LEVELS[other] >= LEVELS[room]:
        found.append(f'line {node.lineno}: {room} must not import {other}')
  allowed = (*CORE, 'specjax', *sys.stdlib_module_names)
  for node in run_at_import(tree):
    for name in imported(node):
      if name.split('.')[0] not in allowed:
        found.append(f'line {node.lineno}: {name} at module level')
    if isinstance(node, ast.Call):
      name = ast.unparse(node.func)
      is_harmless = name.split('.')[-1] in HARMLESS
      if name.startswith(STARTERS) and not is_harmless:
        found.append(f'line {node.lineno}: {name}() at module level')
  return found


class LayersTest(parameterized.TestCase):
  def test_the_package_keeps_the_rules(self):
    self.assertNotEmpty(PACKAGE)
    for path in PACKAGE:
      module = path.relative_to(ROOT).with_suffix('').as_posix()
      room = room_of(module.replace('/', '.').removesuffix('.__init__'))
      with self.subTest(module):
        self.assertTrue(room is None or room in LEVELS, f'{room} has no level')
        source = path.read_text(encoding='utf-8')
        self.assertEqual(violations(source, room), [])

  @parameterized.parameters(
    ('from specjax import verify', 'line 1: models must not import verify'),
    ('import specjax.decode', 'line 1: models must not import decode'),
    (
      'def f():\n  from specjax.testing import x',
      'line 2: models must not import testing',
    ),
    ('from specjax import Decoder', 'line 1: specjax.Decoder is in no room'),
    ('import specjax', 'line 1: specjax is in no room'),
    ('from . import base', 'line 1: ..base at module level'),
    ('import tokenizers', 'line 1: tokenizers at module level'),
    ('from gguf import x', 'line 1: gguf.x at module level'),
    ('X = jnp.zeros(3)', 'line 1: jnp.zeros() at module level'),
    ('class A:\n  x = jnp.int32(3)', 'line 2: jnp.int32() at module level'),
    ('def f(x=jnp.ones(2)): pass', 'line 1: jnp.ones() at module level'),
    ('N = jax.device_count()', 'line 1: jax.device_count() at module level'),
    ('K = jax.random.key(0)', 'line 1: jax.random.key() at module level'),
  )
  def test_breaking_a_rule_is_seen(self, source, message):
    self.assertEqual(violations(source, 'models'), [message])

  @parameterized.parameters(
    'import jax, flax.struct, os',
    'from specjax.models import base',
    'from specjax import sampling',
    'def f():\n  import gguf\n  return jnp.zeros(3)',
    'F = lambda: jnp.zeros(3)',
    'D = jnp.dtype("int8")',
    'D = jnp.float32',
    '@jax.jit\ndef f(x): return x',
  )
  def test_keeping_the_rules_is_not(self, source):
    self.assertEqual(violations(source, 'models'), [])

  def test_kernels_know_shapes_only(self):
    self.assertEqual(violations('from specjax import shapes', 'kernels'), [])
    for room in LEVELS.keys() - {*ROOMS[0], 'kernels'}:
      self.assertLen(violations(f'from specjax import {room}', 'kernels'), 1)

  def test_no_catch_all_names(self):
    names = {path.name for path in PACKAGE}
    self.assertEmpty(names.intersection(BAD_NAMES))

  def test_every_test_file_is_found_and_sets_jax_up(self):
    for path in sorted((ROOT / 'tests').rglob('*_test.py')):
      with self.subTest(path.relative_to(ROOT).as_posix()):
        self.assertTrue((path.parent / '__init__.py').exists())
        tree = ast.parse(path.read_text(encoding='utf-8'))
        names = [name for node in tree.body for name in imported(node)]
        self.assertIn('tests.setup_jax', names)


if __name__ == '__main__':
  absltest.main()

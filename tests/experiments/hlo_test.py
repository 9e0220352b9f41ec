"""Collectives are found in compiled programs, once each, and where they are."""

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tests.setup_jax  # noqa: F401
from experiments import hlo


def entry(*lines):
  """A program whose entry computation has these instructions."""
  body = '\n'.join(f'  {line}' for line in lines)
  return f'HloModule m\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n'


class CompiledTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.mesh = jax.make_mesh(
      (1, 8), ('one', 'x'), axis_types=(AxisType.Auto,) * 2
    )

  def compiled(self, f, *specs) -> str:
    """f(x [4, 16], w [32, 16]), sharded so."""
    shapes = ((4, 16), (32, 16))
    arguments = [
      jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(self.mesh, spec)
      )
      for shape, spec in zip(shapes, specs)
    ]
    compiled = jax.jit(
      f, out_shardings=NamedSharding(self.mesh, PartitionSpec())
    )
    return compiled.lower(*arguments).compile().as_text()

  def found(self, f, *specs):
    """Its collectives."""
    return hlo.collectives(self.compiled(f, *specs))

  def test_a_split_contraction_is_summed_once(self):
    split = PartitionSpec(None, 'x')
    (collective,) = self.found(lambda x, w: x @ w.T, split, split)
    self.assertEqual(collective.kind, 'all-reduce')
    self.assertEqual(collective.arrays, (hlo.Array('f32', (4, 32)),))
    self.assertEqual(collective.num_bytes, 4 * 32 * 4)
    self.assertEqual(collective.path, ())
    self.assertIn('dot_general', collective.op_name)

  def test_a_split_result_is_gathered(self):
    (collective,) = self.found(
      lambda x, w: x @ w.T, PartitionSpec(), PartitionSpec('x')
    )
    self.assertEqual(collective.kind, 'all-gather')
    self.assertIn(32, collective.arrays[0].shape)

  def test_an_axis_of_one_device_needs_none(self):
    split = PartitionSpec(None, 'one')
    self.assertEmpty(self.found(lambda x, w: x @ w.T, split, split))

  def test_what_runs_beside_a_branch_is_found(self):
    split = PartitionSpec(None, 'x')

    def branch(x):
      return jax.lax.cond(x[0, 0] > 0, lambda y: y.sum(0), lambda y: y[0], x.T)

    def beside(x, w):
      return branch(x), w.max(1)

    def behind(x, w):
      y = branch(x)
      return y, (w + y[0]).max(1)

    for f, is_found in ((beside, True), (behind, False)):
      with self.subTest(f.__name__):
        pairs = hlo.beside_branches(self.compiled(f, split, split))
        self.assertEqual(bool(pairs), is_found, pairs)

  def test_loops_and_branches_are_told_apart(self):
    def f(x, w):
      def body(_, x):
        y = x @ w.T @ w
        return jax.lax.cond(
          jnp.max(x) > 9, lambda: y, lambda: jnp.tanh(y @ w.T @ w)
        )

      return jax.lax.fori_loop(0, 3, body, x)

    found = self.found(f, PartitionSpec(), PartitionSpec('x'))
    paths = [c.path for c in found if c.kind == 'all-reduce']
    self.assertIn(('while',), paths)
    self.assertIn(('while', 'conditional'), paths)
    self.assertNotIn((), paths)


class TextTest(parameterized.TestCase):
  @parameterized.parameters(
    ('replica_groups={{0,1},{2,3}}', 1),
    ('replica_groups={{0},{1}}', 0),
    ('replica_groups={}', 1),
    ('replica_groups=[2,4]<=[8]', 1),
    ('replica_groups=[8,1]<=[8]', 0),
    ('replica_groups=[4,2]<=[2,4]T(1,0)', 1),
    ("replica_groups=mesh['a'=1,'b'=8] {'a','b'}", 1),
    ("replica_groups=mesh['a'=1,'b'=8] {'a'}", 0),
    ("replica_groups=mesh['a'=8] {'a':(1)2}", 1),
    ("replica_groups=mesh['a'=8] {'a':(2)1}", 0),
  )
  def test_groups_of_one_device_move_nothing(self, groups, num):
    text = entry(
      f'%r = f32[8]{{0}} all-reduce(%p), channel_id=1, {groups}, '
      'use_global_device_ids=true, to_apply=%add'
    )
    self.assertLen(hlo.collectives(text), num)

  @parameterized.parameters(('{{0,1},{1,0}}', 1), ('{{0,0},{1,1}}', 0))
  def test_permutations(self, pairs, num):
    text = entry(
      f'ROOT %c = bf16[8,2]{{1,0:T(8,128)(2,1)}} collective-permute(%p), '
      f'channel_id=1, source_target_pairs={pairs}'
    )
    self.assertLen(hlo.collectives(text), num)

  def test_a_start_and_its_done_are_one(self):
    text = entry(
      '%s = (f32[2]{0}, f32[8]{0}) all-gather-start(%p), channel_id=1, '
      'replica_groups=[1,4]<=[4], dimensions={0}',
      '%d = f32[8]{0} all-gather-done(%s)',
      '%t = f32[8]{0} all-reduce-start(%d), channel_id=2, '
      'replica_groups=[1,4]<=[4], to_apply=%add',
      'ROOT %e = f32[8]{0} all-reduce-done(%t)',
    )
    gathered, reduced = hlo.collectives(text)
    self.assertEqual(gathered.kind, 'all-gather')
    self.assertEqual(gathered.num_bytes, 32)
    self.assertEqual(reduced.kind, 'all-reduce')
    self.assertEqual(reduced.num_bytes, 32)

  def test_a_wrapped_collective_is_found_in_its_computation(self):
    text = (
      'HloModule m\n\n%inner (q: f32[8]) -> f32[2] {\n'
      '  ROOT %r = f32[2]{0} reduce-scatter(%q), channel_id=1, '
      'replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%add\n}\n\n'
    ) + entry(
      '%s = ((f32[8]{0}), f32[2]{0}, u32[]) async-start(%p), calls=%inner',
      'ROOT %d = f32[2]{0} async-done(%s), calls=%inner',
    )
    (collective,) = hlo.collectives(text)
    self.assertEqual(collective.kind, 'reduce-scatter')

  def test_results_in_a_tuple(self):
    text = entry(
      '%r = (f32[5]{0:T(128)S(1)}, /*index=1*/pred[1,4]{1,0:T(1,128)S(1)}) '
      'all-reduce(%a, %b), channel_id=1, replica_groups=[1,4]<=[4], '
      'to_apply=%add, metadata={op_name="jit(f)/reduce_max" stack_frame_id=1}'
    )
    (collective,) = hlo.collectives(text)
    self.assertEqual(collective.num_bytes, 5 * 4 + 4)
    self.assertEqual(collective.op_name, 'jit(f)/reduce_max')
    self.assertEqual(
      str(collective), 'all-reduce of f32[5], pred[1,4] (jit(f)/reduce_max)'
    )

  @parameterized.parameters(
    ('s4', (8,), 4),
    ('bf16', (3, 2), 12),
    ('pred', (), 1),
    ('f8e4m3fn', (4,), 4),
  )
  def test_bytes(self, dtype, shape, num_bytes):
    self.assertEqual(hlo.Array(dtype, shape).num_bytes, num_bytes)

  def test_what_is_no_program(self):
    with self.assertRaisesRegex(ValueError, 'must have an ENTRY'):
      hlo.collectives('nothing')


if __name__ == '__main__':
  absltest.main()

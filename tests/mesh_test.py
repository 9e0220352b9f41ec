"""How meshes are named, cut and shared, and what happens to odd sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec

import tests.setup_jax  # noqa: F401
from specjax import mesh, sharding
from specjax.models import presets
from tests.models import tiny


def views(target: str, draft: str | None = None, **kwargs):
  draft = draft and mesh.parse_mesh(draft, '--draft_mesh')
  return mesh.refine(mesh.parse_mesh(target), draft, **kwargs)


def axes_of(view: mesh.View) -> dict[str, tuple[str, ...]]:
  return dict(view.axes)


class MeshTest(parameterized.TestCase):
  def test_one_mesh_serves_both(self):
    target, draft = views('data:2,model:4', 'model:2')
    self.assertIs(target.mesh, draft.mesh)
    self.assertEqual(dict(target.mesh.shape), {'d0': 2, 'd1': 2, 'd2': 2})
    self.assertEqual(axes_of(target), {'data': ('d0',), 'model': ('d1', 'd2')})
    self.assertEqual(
      axes_of(draft), {'data': (), 'model': ('d0',), 'copies': ('d1', 'd2')}
    )
    devices = [device.id for device in target.mesh.devices.flat]
    self.assertEqual(devices, list(range(8)))

  def test_axes_are_cut_down_to_primes(self):
    self.assertEqual(dict(views('model:6')[0].mesh.shape), {'d0': 2, 'd1': 3})
    self.assertEqual(dict(views('data:1')[0].mesh.shape), {'d0': 1})

  @parameterized.named_parameters(
    ('unknown', 'tensor:2', "--mesh must be sizes of the axes .* 'tensor:2'"),
    ('twice', 'data:2,data:2', 'must be sizes of the axes'),
    ('zero', 'data:0', 'must be sizes of the axes'),
    ('no_size', 'model', 'must be sizes of the axes'),
    ('huge', 'model:9999999', 'must be sizes of the axes'),
    ('reserved', 'expert:2', 'must have expert:1, the axis is reserved'),
    ('too_many', 'data:3,model:3', 'at most 8 devices .* data:3,model:3'),
  )
  def test_a_mesh_is_refused(self, text, message):
    with self.assertRaisesRegex(ValueError, message):
      mesh.refine(mesh.parse_mesh(text))

  @parameterized.named_parameters(
    ('more', 'model:4', 'model:8', "must divide the target's 4 devices"),
    ('odd', 'model:8', 'model:3', "must divide the target's 8 devices"),
    ('askew', 'data:2,model:3', 'model:3', 'common factors'),
  )
  def test_a_draft_mesh_is_refused(self, target, draft, message):
    with self.assertRaisesRegex(ValueError, message):
      views(target, draft)

  @parameterized.named_parameters(
    # What is split, how it comes apart, and into how many parts.
    ('heads_in_groups', 'llama-3.1-70b', 'model:8', (8, 8, 8, 8)),
    ('fewer_kv_heads', 'qwen2.5-1.5b', 'model:8', (4, 2, 8, 8)),
    ('two_groups_of_seven', 'qwen2.5-0.5b', 'model:8', (2, 2, 8, 8)),
    ('nine_heads', 'smollm2-135m', 'model:8', (1, 1, 8, 8)),
    ('three_ways', 'smollm2-135m', 'model:3', (3, 3, 3, 3)),
    ('five_ways', 'smollm2-135m', 'model:5', (1, 1, 1, 1)),
  )
  def test_what_does_not_divide_is_copied(self, name, text, parts):
    specs = presets.preset(name).param_specs()
    view, _ = views(text)
    placement = mesh.place(specs, view)
    names = ('heads', 'kv_heads', 'ffn', 'vocab')
    self.assertEqual(tuple(map(placement.num_shards, names)), parts)
    told = {fact.split()[0] for fact in mesh.copied(specs, view)}
    num = mesh.parse_mesh(text).num_devices
    copied = {n for n, p in zip(names, parts) if p < num}
    self.assertEqual(told, copied)

  def test_query_heads_never_leave_their_group(self):
    # 12 heads in 3 groups of 4: two parts would cut the second group.
    specs = sharding.ParamSpec(
      shape=(24, 4),
      dtype='float32',
      logical_axes=('heads', 'embed'),
      units=((3, 4), None),
    )
    self.assertEqual(
      mesh.place(specs, views('model:2')[0]).num_shards('heads'), 1
    )
    self.assertEqual(
      mesh.place(specs, views('model:6')[0]).num_shards('heads'), 1
    )
    self.assertEqual(
      mesh.place(specs, views('model:3')[0]).num_shards('heads'), 3
    )

  def test_a_collision_is_refused(self):
    rules = {**mesh.TENSOR_PARALLEL, 'embed': 'model'}
    view, _ = views('model:8', rules=rules)
    with self.assertRaisesRegex(ValueError, 'split over different mesh axes'):
      mesh.place(presets.preset('llama-3.2-1b').param_specs(), view)

  def test_fully_sharded_is_a_product(self):
    view, _ = views('data:2,model:4', rules=mesh.FULLY_SHARDED)
    specs = presets.preset('llama-3.2-1b').param_specs()
    placement = mesh.place(specs, view)
    parts = placement.partition(*specs['layers'][0]['down'].logical_axes)
    self.assertEqual(parts, PartitionSpec(('d0',), ('d1', 'd2')))

  def test_parameters_do_not_depend_on_the_mesh(self):
    model = tiny.model('llama')
    whole = model.init(jax.random.key(3))
    view, _ = views('data:2,model:4', rules=mesh.FULLY_SHARDED)
    placement = mesh.place(model.param_specs(), view)
    placed = dataclasses.replace(model, placement=placement)
    split = placed.init(jax.random.key(3))
    self.assertEqual(split['layers'][0]['down'].sharding.num_devices, 8)
    jax.tree.map(np.testing.assert_array_equal, whole, split)

  def test_put_and_back(self):
    view, _ = views('data:2,model:4')
    spec = sharding.ParamSpec(
      shape=(8, 4), dtype='float32', logical_axes=('ffn', 'embed')
    )
    value = np.arange(32, dtype=np.float32).reshape(8, 4)
    placed = sharding.put_params(spec, value, mesh.place(spec, view))
    self.assertEqual(placed.addressable_shards[0].data.shape, (2, 4))
    np.testing.assert_array_equal(sharding.to_host(placed), value)
    kept = sharding.put_params(spec, value, None)
    self.assertIsInstance(kept, jnp.ndarray)


if __name__ == '__main__':
  absltest.main()

"""A saved model comes back, in either dtype, or not at all."""

import json
import pathlib
import shutil
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import mesh, sharding
from specjax.models import quantize
from specjax.models.checkpoints import orbax
from tests.models import tiny

CONFIG = tiny.CONFIGS['gemma3']


class OrbaxTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    temporary = tempfile.TemporaryDirectory()
    self.addCleanup(temporary.cleanup)
    self.folder = pathlib.Path(temporary.name)
    self.path = self.folder / 'model'

  def save(self, dtype='float32', **settings):
    params = tiny.params_of(tiny.model('gemma3', dtype))
    orbax.save(self.path, CONFIG, params, **settings)
    return params

  @parameterized.product(
    saved=('float32', 'bfloat16'), restored=('float32', 'bfloat16')
  )
  def test_round_trip(self, saved, restored):
    params = self.save(saved, vocab_size=37, stop_ids=(5, 2))
    got = orbax.restore(self.path, restored)
    self.assertEqual(got.model, tiny.model('gemma3', restored, 37))
    self.assertEqual(got.stop_ids, (5, 2))
    self.assertEqual(got.config, CONFIG)
    specs = got.model.param_specs()
    want = jax.tree.map(lambda x, s: x.astype(s.dtype), params, specs)
    self.assertEqual(jax.tree.structure(got.params), jax.tree.structure(want))
    jax.tree.map(np.testing.assert_array_equal, got.params, want)

  def assert_trees_equal(self, got, want):
    self.assertEqual(jax.tree.structure(got), jax.tree.structure(want))
    jax.tree.map(np.testing.assert_array_equal, got, want)

  @parameterized.parameters('float32', 'bfloat16')
  def test_int8_stays_int8(self, dtype):
    params = quantize.quantize_params(tiny.params_of(tiny.model('gemma3')))
    orbax.save(self.path, CONFIG, params, quantize='int8')
    got = orbax.restore(self.path, dtype, 'int8')
    self.assertEqual(got.model, tiny.model('gemma3', dtype, quantize='int8'))
    self.assert_trees_equal(got.params, params)
    self.assertEqual(got.params['embed'].int8_OI.dtype, jnp.int8)
    with self.assertRaisesRegex(
      ValueError, 'holds int8 weights: quantize must be int8, got none'
    ):
      orbax.restore(self.path, dtype)

  @parameterized.product(
    saved=('float32', 'bfloat16'), restored=('float32', 'bfloat16')
  )
  def test_float_becomes_int8_rounded_once(self, saved, restored):
    params = self.save(saved)
    # A folder of before int8 weights does not say that it has none.
    self.edit(quantize='removed')
    got = orbax.restore(self.path, restored, 'int8')
    self.assertEqual(got.model, tiny.model('gemma3', restored, quantize='int8'))
    self.assert_trees_equal(got.params, quantize.quantize_params(params))

  def test_refuses_int8_parameters_that_are_not_said_to_be(self):
    params = quantize.quantize_params(tiny.params_of(tiny.model('gemma3')))
    with self.assertRaisesRegex(ValueError, 'embed.int8_OI'):
      orbax.save(self.path, CONFIG, params)
    self.assertFalse(self.path.exists())

  def test_refuses_scales_that_are_not_finite(self):
    params = quantize.quantize_params(tiny.params_of(tiny.model('gemma3')))
    up = params['layers'][2]['up']
    broken = up._replace(scale_O=up.scale_O.at[1].set(np.nan))
    params['layers'][2]['up'] = broken
    orbax.save(self.path, CONFIG, params, quantize='int8')
    message = 'layers.2.up.scale_O must be finite'
    with self.assertRaisesRegex(ValueError, message):
      orbax.restore(self.path, quantize='int8')

  @parameterized.product(
    saved=(None, 'model:8', 'data:4,model:2'),
    restored=(None, 'model:2', 'data:2,model:4'),
    scheme=('none', 'int8'),
  )
  def test_any_mesh_to_any_other(self, saved, restored, scheme):
    def view(text):
      return (
        text and mesh.refine(mesh.parse_mesh(text), rules=mesh.FULLY_SHARDED)[0]
      )

    model = tiny.model('gemma3', quantize=scheme)
    specs = model.param_specs()
    params = tiny.params_of(tiny.model('gemma3'))
    if scheme == 'int8':
      params = quantize.quantize_params(params)
    place = lambda text: text and mesh.place(specs, view(text))
    sharded = sharding.put_params(specs, params, place(saved))
    orbax.save(self.path, CONFIG, sharded, quantize=scheme)
    got = orbax.restore(self.path, 'float32', scheme, view(restored))
    self.assert_trees_equal(got.params, params)
    self.assertEqual(got.model.placement, place(restored))
    for leaf, spec in zip(
      jax.tree.leaves(got.params),
      jax.tree.leaves(specs, is_leaf=sharding.is_spec),
    ):
      if restored is None:
        self.assertLen(leaf.devices(), 1)
      else:
        want = got.model.placement.sharding(*spec.logical_axes)
        self.assertEqual(leaf.sharding, want)

  def test_leaves_nothing_but_the_checkpoint(self):
    self.path.mkdir()
    self.save()
    self.assertEqual([p.name for p in self.folder.iterdir()], ['model'])

  def test_failed_save_leaves_nothing(self):
    full = OSError('disk full')
    with mock.patch.object(pathlib.Path, 'write_text', side_effect=full):
      with self.assertRaisesRegex(OSError, 'disk full'):
        self.save()
    self.assertEmpty(list(self.folder.iterdir()))

  @parameterized.parameters('folder', 'file')
  def test_never_overwrites(self, kind):
    other = self.path
    if kind == 'folder':
      self.path.mkdir()
      other = self.path / 'thesis.txt'
    other.write_text('mine')
    with self.assertRaisesRegex(ValueError, 'must be absent or empty'):
      self.save()
    self.assertEqual(other.read_text(), 'mine')

  def test_says_at_once_where_no_folder_can_be(self):
    (self.folder / 'file').write_text('mine')
    for path in ('file/model', 'file/deeper/model'):
      with self.assertRaisesRegex(ValueError, 'file is no writable folder'):
        orbax.check_free(self.folder / path)
    orbax.check_free(self.folder / 'new/deeper/model')
    self.assertEqual([p.name for p in self.folder.iterdir()], ['file'])
    (self.folder / 'link').symlink_to('nowhere')
    with self.assertRaisesRegex(ValueError, 'must be absent or empty'):
      orbax.check_free(self.folder / 'link')

  def test_refuses_parameters_of_another_config(self):
    params = tiny.params_of(tiny.model('gemma3'))
    params['layers'][1]['q'] = jnp.zeros((3, 16))
    message = r'layers.1.q \(expected \(32, 16\), got \(3, 16\)\)'
    with self.assertRaisesRegex(ValueError, message):
      orbax.save(self.path, CONFIG, params)
    self.assertFalse(self.path.exists())

  def test_refuses_values_that_are_not_finite(self):
    params = tiny.params_of(tiny.model('gemma3'))
    params['layers'][2]['up'] = params['layers'][2]['up'].at[0, 0].set(np.nan)
    orbax.save(self.path, CONFIG, params)
    with self.assertRaisesRegex(ValueError, 'layers.2.up must be finite'):
      orbax.restore(self.path)

  def edit(self, **changes):
    file = self.path / orbax.SETTINGS_FILE
    settings = {**json.loads(file.read_text()), **changes}
    settings = {k: v for k, v in settings.items() if v != 'removed'}
    file.write_text(json.dumps(settings))

  @parameterized.parameters(
    ({'version': 99}, 'version 1, got 99'),
    ({'format': 'other'}, "must say format 'specjax checkpoint'"),
    ({'config': 'removed'}, 'lacks config'),
    ({'config': {**CONFIG, 'intermediate_size': 32}}, r'layers.0.down \(exp'),
    ({'config': {**CONFIG, 'num_hidden_layers': 4}}, 'got None'),
    ({'quantize': 'int8'}, 'quantize must be int8, got none'),
    ({'quantize': 'int4'}, "quantize must be what save wrote, got 'int4'"),
    ({'quantize': ['int8']}, 'quantize must be what save wrote'),
    ({'stop_ids': 'x'}, 'stop_ids must be what save wrote'),
    ({'vocab_size': '12'}, 'vocab_size must be what save wrote'),
  )
  def test_refuses_settings(self, changes, message):
    self.save()
    self.edit(**changes)
    with self.assertRaisesRegex(ValueError, message):
      orbax.restore(self.path)

  def test_refuses_foreign_folders(self):
    for path in (self.folder, self.folder / 'nowhere'):
      with self.assertRaisesRegex(ValueError, 'with specjax.json'):
        orbax.restore(path)

  @parameterized.parameters('params', 'params/_METADATA')
  def test_refuses_incomplete_folders(self, name):
    self.save()
    part = self.path / name
    if part.is_dir():
      shutil.rmtree(part)
    else:
      part.unlink()
    with self.assertRaisesRegex(ValueError, 'params must hold whole orbax'):
      orbax.restore(self.path)


if __name__ == '__main__':
  absltest.main()

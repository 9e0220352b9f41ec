"""Loading is strict: every tensor is used once and every parameter filled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import mesh, sharding
from specjax.models import quantize
from specjax.models.checkpoints import base
from tests.models import tiny

HEAD = 'lm_head.weight'
EMBED = 'model.embed_tokens.weight'


def prepared(name: str):
  """A tiny model, its parameters, and its tensors as files hold them."""
  model = tiny.model(name)
  params = tiny.params_of(model)
  norm_offset = 1.0 if name == 'gemma3' else 0.0
  return model, params, tiny.tensors_of(model, params, norm_offset=norm_offset)


def load(name: str, tensors, model=None, **settings):
  checkpoint = tiny.checkpoint_of(tiny.CONFIGS[name], tensors, **settings)
  return base.load_params(model or tiny.model(name), checkpoint)


class LoadTest(parameterized.TestCase):
  def assert_trees_equal(self, got, want):
    self.assertEqual(jax.tree.structure(got), jax.tree.structure(want))
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), got, want
    )
    types = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
    self.assertEqual(types(got), types(want))

  @parameterized.parameters(*tiny.CONFIGS)
  def test_every_tensor_is_read_once(self, name):
    model, params, tensors = prepared(name)
    reads = []

    def read(tensor_name: str) -> np.ndarray:
      reads.append(tensor_name)
      return tensors[tensor_name]

    checkpoint = tiny.checkpoint_of(tiny.CONFIGS[name], tensors)
    checkpoint = dataclasses.replace(checkpoint, read=read)
    self.assert_trees_equal(base.load_params(model, checkpoint), params)
    self.assertEqual(sorted(reads), sorted(tensors))

  @parameterized.parameters('none', 'int8')
  def test_tensors_go_straight_into_their_shards(self, scheme):
    view, _ = mesh.refine(mesh.parse_mesh('data:2,model:4'))
    model = tiny.model('qwen2', quantize=scheme)
    placement = mesh.place(model.param_specs(), view)
    placed = dataclasses.replace(model, placement=placement)
    _, _, tensors = prepared('qwen2')
    alive = []

    def read(name: str) -> np.ndarray:
      # What was read before has left the default device whole.
      whole = [x for x in jax.live_arrays() if len(x.devices()) == 1]
      alive.append(sum(x.nbytes for x in whole))
      return tensors[name]

    checkpoint = tiny.checkpoint_of(tiny.CONFIGS['qwen2'], tensors)
    checkpoint = dataclasses.replace(checkpoint, read=read)
    params = base.load_params(placed, checkpoint)
    self.assert_trees_equal(params, base.load_params(model, checkpoint))
    for leaf, spec in zip(
      jax.tree.leaves(params),
      jax.tree.leaves(model.param_specs(), is_leaf=sharding.is_spec),
    ):
      self.assertEqual(leaf.sharding, placement.sharding(*spec.logical_axes))
    largest = max(tensor.nbytes for tensor in tensors.values())
    self.assertLessEqual(max(alive[: len(tensors)]) - alive[0], 2 * largest)

  @parameterized.parameters(*tiny.CONFIGS)
  def test_every_tensor_matters(self, name):
    model, params, tensors = prepared(name)
    want = tiny.logits_of(model, params)
    for tensor_name, tensor in tensors.items():
      # Every entry changes: one alone may weigh too little to be seen.
      changed = {**tensors, tensor_name: tensor + 0.3 * np.cos(tensor)}
      got = tiny.logits_of(model, load(name, changed))
      self.assertGreater(
        np.max(np.abs(got - want)), 1e-5, f'{tensor_name} changes nothing.'
      )

  @parameterized.parameters(*tiny.CONFIGS)
  def test_each_missing_tensor_is_named(self, name):
    _, _, tensors = prepared(name)
    for tensor_name in tensors:
      left = {k: v for k, v in tensors.items() if k != tensor_name}
      with self.assertRaisesRegex(ValueError, f'missing: {tensor_name}'):
        load(name, left)

  def test_missing_and_unexpected_come_sorted_in_one_error(self):
    _, _, tensors = prepared('llama')
    tensors['b.weight'] = tensors['a.weight'] = np.zeros(3)
    del tensors['model.norm.weight']
    del tensors['model.layers.1.mlp.up_proj.weight']
    with self.assertRaisesRegex(
      ValueError,
      'missing: model.layers.1.mlp.up_proj.weight, model.norm.weight; '
      'unexpected: a.weight, b.weight',
    ):
      load('llama', tensors)

  def test_long_lists_are_cut(self):
    _, _, tensors = prepared('llama')
    with self.assertRaisesRegex(ValueError, 'and 1 more'):
      load('llama', {**tensors, **{f'x{i}': np.zeros(1) for i in range(21)}})

  def test_biases_of_a_config_without_them_are_unexpected(self):
    model, _, tensors = prepared('qwen2')
    without = dataclasses.replace(model, qkv_bias=False)
    with self.assertRaisesRegex(ValueError, 'unexpected: .*k_proj.bias'):
      load('qwen2', tensors, without)

  def test_shapes_are_compared_before_reading(self):
    model, _, tensors = prepared('llama')
    name = 'model.layers.0.self_attn.k_proj.weight'
    shapes = {k: v.shape for k, v in tensors.items()}
    shapes[name] = (16, 8)

    def read(tensor_name: str):
      self.fail(f'{tensor_name} was read.')

    checkpoint = base.Checkpoint(tiny.CONFIGS['llama'], shapes, read)
    message = rf'{name} must have shape \(8, 16\), got \(16, 8\)'
    with self.assertRaisesRegex(ValueError, message):
      base.load_params(model, checkpoint)

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_values_that_are_not_finite_are_refused(self, value):
    _, _, tensors = prepared('llama')
    name = 'model.layers.1.mlp.down_proj.weight'
    tensors[name] = tensors[name].copy()
    tensors[name][3, 5] = value
    with self.assertRaisesRegex(ValueError, f'{name} must be finite'):
      load('llama', tensors)

  def test_old_buffers_are_ignored(self):
    _, params, tensors = prepared('llama')
    tensors['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.zeros(2)
    self.assert_trees_equal(load('llama', tensors), params)

  def test_norms_with_one_added_already(self):
    model = tiny.model('gemma3')
    params = tiny.params_of(model)
    tensors = tiny.tensors_of(model, params)
    got = load('gemma3', tensors, norms_have_one_added=True)
    self.assert_trees_equal(got, params)

  @parameterized.parameters(np.float16, np.float32, np.float64, jnp.bfloat16)
  def test_any_float_becomes_the_models(self, dtype):
    model = tiny.model('gemma3', 'bfloat16')
    params = tiny.params_of(model)
    tensors = tiny.tensors_of(model, params, norm_offset=1.0)
    stored = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    got = load('gemma3', stored, model)
    self.assertEqual(got['layers'][0]['q'].dtype, jnp.bfloat16)
    self.assertEqual(got['layers'][0]['q_norm'].dtype, jnp.float32)
    np.testing.assert_allclose(
      got['final_norm'], params['final_norm'], atol=1e-2
    )

  @parameterized.product(
    name=('llama_tied_biased', 'qwen3'), dtype=('float32', 'bfloat16')
  )
  def test_int8_is_rounded_once_from_what_the_file_holds(self, name, dtype):
    _, params, tensors = prepared(name)
    got = load(name, tensors, tiny.model(name, dtype, quantize='int8'))
    # Not from bfloat16; only the biases are in the dtype.
    specs = tiny.model(name, dtype, quantize='int8').param_specs()
    want = jax.tree.map(
      lambda x, spec: x.astype(spec.dtype),
      quantize.quantize_params(params),
      specs,
    )
    self.assert_trees_equal(got, want)

  def test_int8_holds_one_float_tensor_at_a_time(self):
    _, _, tensors = prepared('llama')
    others = {id(array) for array in jax.live_arrays()}
    most = []

    def read(tensor_name: str) -> np.ndarray:
      matrices = [
        array
        for array in jax.live_arrays()
        if id(array) not in others and array.ndim == 2
      ]
      most.append(sum(a.nbytes for a in matrices if a.dtype != jnp.int8))
      return tensors[tensor_name]

    checkpoint = tiny.checkpoint_of(tiny.CONFIGS['llama'], tensors)
    checkpoint = dataclasses.replace(checkpoint, read=read)
    base.load_params(tiny.model('llama', quantize='int8'), checkpoint)
    largest = max(tensor.nbytes for tensor in tensors.values())
    self.assertLessEqual(max(most), 2 * largest)

  @parameterized.parameters(np.nan, np.inf)
  def test_int8_refuses_values_that_are_not_finite(self, value):
    _, _, tensors = prepared('llama')
    name = 'model.layers.1.mlp.down_proj.weight'
    tensors[name] = tensors[name].copy()
    tensors[name][3, 5] = value
    with self.assertRaisesRegex(ValueError, f'{name} must be finite'):
      load('llama', tensors, tiny.model('llama', quantize='int8'))

  @parameterized.parameters('language_model.{}', 'model.language_model.{}')
  def test_text_model_inside_a_multimodal_one(self, form):
    model, params, tensors = prepared('gemma3')
    if form.startswith('model.'):
      rename = lambda name: form.format(name.removeprefix('model.'))
    else:
      rename = form.format
    tensors = {rename(name): tensor for name, tensor in tensors.items()}
    prefix = 'model.' if form.startswith('model.') else ''
    tensors[f'{prefix}vision_tower.encoder.weight'] = np.zeros(3)
    tensors[f'{prefix}multi_modal_projector.weight'] = np.zeros(3)
    config = {'model_type': 'gemma3', 'text_config': tiny.CONFIGS['gemma3']}
    checkpoint = tiny.checkpoint_of(config, tensors)
    self.assert_trees_equal(base.load_params(model, checkpoint), params)


class TieTest(parameterized.TestCase):
  """The tie flag against what the file holds."""

  def test_tied_and_absent_loads(self):
    model, params, tensors = prepared('llama_tied_biased')
    self.assertNotIn(HEAD, tensors)
    self.assertNotIn('head', load('llama_tied_biased', tensors))

  def test_tied_and_present_loads_if_equal(self):
    _, params, tensors = prepared('llama_tied_biased')
    tensors[HEAD] = tensors[EMBED].copy()
    got = load('llama_tied_biased', tensors)
    self.assertEqual(jax.tree.structure(got), jax.tree.structure(params))
    tensors[HEAD][0, 0] += 1
    with self.assertRaisesRegex(ValueError, f'{HEAD} must equal {EMBED}'):
      load('llama_tied_biased', tensors)

  def test_tied_int8_and_present_loads_if_equal(self):
    _, params, tensors = prepared('llama_tied_biased')
    model = tiny.model('llama_tied_biased', quantize='int8')
    tensors[HEAD] = tensors[EMBED].copy()
    got = load('llama_tied_biased', tensors, model)
    want = quantize.quantize_weight(params['embed'])
    jax.tree.map(np.testing.assert_array_equal, got['embed'], want)
    tensors[HEAD][0, 0] += 1
    with self.assertRaisesRegex(ValueError, f'{HEAD} must equal {EMBED}'):
      load('llama_tied_biased', tensors, model)

  def test_untied_and_present_loads(self):
    _, params, tensors = prepared('llama')
    np.testing.assert_array_equal(load('llama', tensors)['head'], tensors[HEAD])

  def test_untied_and_absent_raises(self):
    _, _, tensors = prepared('llama')
    del tensors[HEAD]
    with self.assertRaisesRegex(ValueError, f'missing: {HEAD}.*is false'):
      load('llama', tensors)


if __name__ == '__main__':
  absltest.main()

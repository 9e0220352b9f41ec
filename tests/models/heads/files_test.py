"""Heads in the layouts of their authors and of serving engines."""

import dataclasses
import json
import pathlib
import re
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import mesh
from specjax.models import quantize
from specjax.models.heads import build, files
from specjax.models.rope import Rope
from specjax.models.toy import ToyModel
from tests.models import tiny
from tests.models.heads import tiny_heads

_ATTENTION = [f'self_attn.{x}_proj.weight' for x in 'qkvo']
_BLOCK = [
  *_ATTENTION,
  *(f'mlp.{x}_proj.weight' for x in ('gate', 'up', 'down')),
  'post_attention_layernorm.weight',
]
# What published files hold.
NAMES = {
  'eagle': ['fc.weight', 'fc.bias', *(f'layers.0.{x}' for x in _BLOCK)],
  'eagle3_reduced': [
    'fc.weight',
    'norm.weight',
    'lm_head.weight',
    'd2t',
    't2d',
    'midlayer.hidden_norm.weight',
    'midlayer.input_layernorm.weight',
    *(f'midlayer.{x}' for x in _BLOCK),
  ],
  'mtp': [
    *(f'model.layers.2.{x}.weight' for x in ('enorm', 'hnorm', 'eh_proj')),
    'model.layers.2.shared_head.norm.weight',
    'model.layers.2.input_layernorm.weight',
    *(f'model.layers.2.{x}' for x in _BLOCK),
  ],
  'mtp_reduced': [
    *(f'model.layers.2.{x}.weight' for x in ('enorm', 'hnorm', 'eh_proj')),
    *(f'model.layers.2.shared_head.{x}.weight' for x in ('norm', 'head')),
    'model.layers.2.input_layernorm.weight',
    *(f'model.layers.2.{x}' for x in _BLOCK),
    'd2t',
    't2d',
  ],
  'medusa_own': [
    f'{i}.{x}'
    for i in range(3)
    for x in (
      '0.linear.weight',
      '0.linear.bias',
      '1.linear.weight',
      '1.linear.bias',
      '2.weight',
    )
  ],
}
TARGET = tiny_heads.target_of()
TARGET = dataclasses.replace(TARGET, padded_vocab_size=20)


def kind_of(name: str) -> str:
  return re.match('[a-z]+', name)[0]


class FilesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    temporary = tempfile.TemporaryDirectory()
    self.addCleanup(temporary.cleanup)
    self.folder = pathlib.Path(temporary.name) / 'head'
    self.target_params = tiny.params_of(TARGET)

  def save(self, name: str):
    head = tiny_heads.head_of(name, TARGET)
    params = tiny_heads.params_of(head)
    files.save_head(self.folder, head, params)
    return head, params

  def load(self, name: str, target=TARGET, **options):
    return files.load_head(
      self.folder, kind_of(name), target, self.target_params, **options
    )

  def tensors(self) -> dict[str, np.ndarray]:
    (file,) = self.folder.glob('*.safetensors')
    return safetensors.numpy.load_file(file)

  def rewrite(self, tensors=None, **config):
    """Other tensors, or other lines of the config; None deletes one."""
    if tensors is not None:
      (file,) = self.folder.glob('*.safetensors')
      tensors = {k: np.ascontiguousarray(x) for k, x in tensors.items()}
      safetensors.numpy.save_file(tensors, file)
    file = self.folder / 'config.json'
    values = {**json.loads(file.read_text()), **config}
    values = {k: x for k, x in values.items() if x is not None}
    file.write_text(json.dumps(values))

  def assert_refused(self, name: str, message: str, target=TARGET):
    with self.assertRaisesRegex(ValueError, message) as caught:
      self.load(name, target)
    self.assertNotIn('\n', str(caught.exception))

  def assert_same(self, got, wanted):
    self.assertEqual(got[0], wanted[0])
    jax.tree.map(np.testing.assert_array_equal, got[1], wanted[1])

  @parameterized.parameters(*NAMES, 'eagle3', 'medusa')
  def test_what_is_written_is_read(self, name):
    wanted = self.save(name)
    self.assert_same(self.load(name), wanted)
    if name in NAMES:
      self.assertCountEqual(self.tensors(), NAMES[name])
    self.assertFalse(list(self.folder.parent.glob('.*')))

  def test_in_bfloat16_and_on_a_mesh(self):
    target = dataclasses.replace(TARGET, dtype='bfloat16')
    head = build.build('eagle3', target, 'bfloat16', num_ids=6)
    params = head.init(jax.random.key(0))
    files.save_head(self.folder, head, params)
    view, _ = mesh.refine(mesh.parse_mesh('data:2,model:2'))
    got, got_params = self.load('eagle3', target, view=view)
    self.assertEqual(got.block.placement.num_shards('heads'), 2)
    self.assertEqual(self.tensors()['fc.weight'].dtype, jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, got_params, params)

  def test_ropes_that_are_stretched(self):
    rope = Rope(
      theta=5e5,
      kind='llama3',
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_context=8192,
    )
    head = tiny_heads.head_of('mtp', TARGET)
    block = dataclasses.replace(head.block, ropes=(rope,))
    head = dataclasses.replace(head, block=block)
    params = tiny_heads.params_of(head)
    files.save_head(self.folder, head, params)
    self.assert_same(self.load('mtp'), (head, params))

  @parameterized.parameters(
    'eagle', 'eagle3_reduced', 'mtp', 'mtp_reduced', 'medusa_own'
  )
  def test_every_tensor_is_needed_and_none_is_left_over(self, name):
    self.save(name)
    tensors = self.tensors()
    for missing in tensors:
      if missing == 't2d':
        continue
      rest = {k: x for k, x in tensors.items() if k != missing}
      self.rewrite(rest)
      # What says that there is a module at all is named differently.
      is_mark = missing in ('d2t', 'model.layers.2.eh_proj.weight') or (
        missing == 'midlayer.hidden_norm.weight'
      )
      message = 'missing' if is_mark else f'missing: {re.escape(missing)}'
      if missing == 'model.layers.2.eh_proj.weight':
        message = 'it is there 0 times'
      self.assert_refused(name, message)
    self.rewrite({**tensors, 'extra.weight': np.zeros(2, np.float32)})
    self.assert_refused(name, 'unexpected: extra.weight')
    name_0 = NAMES[name][0]
    self.rewrite({**tensors, name_0: tensors[name_0][:-1]})
    self.assert_refused(name, f'{re.escape(name_0)} must have shape')
    broken = {**tensors, name_0: tensors[name_0] * np.nan}
    self.rewrite(broken)
    self.assert_refused(name, f'{re.escape(name_0)} must be finite')

  def test_names_of_serving_engines(self):
    wanted = self.save('eagle3_reduced')
    tensors = self.tensors()
    self.rewrite(
      {
        k
        if k in ('d2t', 't2d', 'lm_head.weight')
        else 'model.' + k.replace('midlayer.', 'layers.0.'): x
        for k, x in tensors.items()
      }
    )
    self.assert_same(self.load('eagle3'), wanted)

  def test_two_names_of_one_tensor(self):
    self.save('eagle')
    tensors = self.tensors()
    self.rewrite({**tensors, 'model.fc.weight': tensors['fc.weight'] + 1})
    self.assert_refused('eagle', 'there once, got .* for fc.weight')

  def test_medusa_as_vllm_has_it(self):
    wanted = self.save('medusa_own')
    tensors = {}
    for name, x in self.tensors().items():
      name = re.sub(r'(\d)\.(\d)\.linear', r'blocks.\1.layers.\2', name)
      tensors[re.sub(r'^(\d)\.2\.', r'lm_heads.\1.', name)] = x
    self.rewrite(
      tensors,
      medusa_num_heads=None,
      medusa_num_layers=None,
      num_heads=3,
      num_hidden_layers=2,
    )
    self.assert_same(self.load('medusa_own'), wanted)

  def test_medusa_with_the_prefix_of_a_whole_model(self):
    wanted = self.save('medusa_own')
    tensors = self.tensors()
    self.rewrite({f'medusa_head.{k}': x for k, x in tensors.items()})
    self.assert_same(self.load('medusa_own'), wanted)

  def test_mtp_as_mimo_has_it(self):
    """Other names, and the feature before the embedding."""
    head, params = self.save('mtp')
    renamed = {
      'enorm': 'token_layernorm',
      'hnorm': 'hidden_layernorm',
      'eh_proj': 'input_proj',
      'shared_head.norm': 'final_layernorm',
    }
    tensors = {}
    for name, x in self.tensors().items():
      rest = name.removeprefix('model.layers.2.').removesuffix('.weight')
      rest = renamed.get(rest, rest)
      if rest == 'input_proj':
        x = np.concatenate([x[:, 16:], x[:, :16]], axis=1)
      tensors[f'model.mtp_layers.0.{rest}.weight'] = x
    bias = {
      f'model.mtp_layers.0.self_attn.{x}_proj.bias': np.ones(n, np.float32)
      for x, n in (('q', 16), ('k', 8), ('v', 8))
    }
    self.rewrite(
      {**tensors, **bias}, model_type='mimo', use_sliding_window=False
    )
    got, got_params = self.load('mtp')
    self.assertTrue(got.block.qkv_bias)
    np.testing.assert_array_equal(got_params['proj'], params['proj'])
    np.testing.assert_array_equal(got_params['layers'][0]['q_bias'], 1)
    # It is written in DeepSeek's layout and read again.
    self.folder = self.folder.with_name('again')
    files.save_head(self.folder, got, got_params)
    self.assert_same(self.load('mtp'), (got, got_params))

  def test_an_mtp_module_among_the_target_s_own_tensors(self):
    wanted = self.save('mtp')
    tensors = self.tensors()
    shared = {
      'model.layers.2.embed_tokens.weight': self.target_params['embed'],
      'model.layers.2.shared_head.head.weight': self.target_params['head'],
    }
    own = tiny.tensors_of(TARGET, self.target_params)
    self.rewrite(
      {**tensors, **own, **{k: np.asarray(x) for k, x in shared.items()}}
    )
    self.assert_same(self.load('mtp'), wanted)
    name = 'model.layers.2.shared_head.head.weight'
    self.rewrite({**tensors, name: np.asarray(shared[name]) + 1})
    self.assert_refused('mtp', f"{name} must equal the target's head")

  @parameterized.parameters('none', 'int8')
  def test_an_embedding_that_is_the_target_s_is_shared(self, scheme):
    wanted, target = self.save('eagle'), TARGET
    embed = np.asarray(self.target_params['embed'])
    if scheme == 'int8':
      target = dataclasses.replace(TARGET, quantize='int8')
      self.target_params = quantize.quantize_params(self.target_params)
    tensors = self.tensors()
    self.rewrite({**tensors, 'embed_tokens.weight': embed})
    head, params = self.load('eagle', target)
    self.assertFalse(head.own_embed)
    jax.tree.map(np.testing.assert_array_equal, params, wanted[1])
    self.rewrite({**tensors, 'embed_tokens.weight': embed[::-1]})
    head, params = self.load('eagle', target)
    self.assertTrue(head.own_embed)
    np.testing.assert_array_equal(params['embed'], embed[::-1])

  def test_the_map_of_a_reduced_vocabulary(self):
    _, params = self.save('eagle3_reduced')
    tensors = self.tensors()
    np.testing.assert_array_equal(tensors['d2t'], np.arange(8))
    self.assertEqual(
      np.flatnonzero(tensors['t2d']).tolist(), [*range(0, 16, 2)]
    )
    for d2t, message in (
      # Ids in place of what they are more than their index.
      (np.asarray(params['ids']), 'd2t.* must be in 0..15, .* got 18'),
      (tensors['d2t'][::-1], 'must name every id once'),
      (tensors['d2t'] + 1, 'd2t and t2d must name the same ids'),
    ):
      self.rewrite({**tensors, 'd2t': d2t.astype(np.int64)})
      self.assert_refused('eagle3', message)
    for t2d, message in (
      (tensors['t2d'][None], r't2d must say .* got shape \(1, 20\)'),
      (tensors['t2d'].astype(np.float32), 't2d must hold truth .* float32'),
    ):
      self.rewrite({**tensors, 't2d': t2d})
      self.assert_refused('eagle3', message)
    self.rewrite(tensors, draft_vocab_size=7)
    self.assert_refused('eagle3', r'd2t must have shape \(7,\), got \(8,\)')
    self.rewrite(tensors, draft_vocab_size=17)
    self.assert_refused('eagle3', 'draft_vocab_size must be in 1..16')

  def test_which_layers_eagle3_reads(self):
    self.save('eagle3')
    key = 'eagle_aux_hidden_state_layer_ids'
    for config, layers in (
      ({key: [0, 1, 2], 'eagle_config': None}, (0, 1, 2)),
      ({key: None, 'eagle_config': {key: [0, 0, 1]}}, (1, 1, 2)),
      ({key: [1, 1, 2], 'eagle_config': {key: [0, 0, 1]}}, (1, 1, 2)),
      ({key: None, 'eagle_config': None}, (1, 1, 1)),
    ):
      self.rewrite(**config)
      self.assertEqual(self.load('eagle3')[0].target_features, layers)
    self.rewrite(**{key: [0, 1, 2], 'eagle_config': {key: [0, 1, 2]}})
    self.assert_refused('eagle3', 'must name the same layers')
    self.rewrite(**{key: [0, 1, 3], 'eagle_config': None})
    self.assert_refused('eagle3', 'layers 0..2, got 3')
    self.rewrite(**{key: [0, 1]})
    self.assert_refused('eagle3', 'must have three layers')

  @parameterized.parameters(
    ('eagle', {'hidden_size': 32}, "hidden_size .* 16, the target's, got 32"),
    ('eagle', {'num_hidden_layers': 2}, 'must be 1, got 2'),
    ('eagle', {'vocab_size': 99}, "vocab_size .* 20, the target's, got 99"),
    ('eagle', {'bias': False}, 'unexpected: fc.bias'),
    ('eagle3', {'norm_before_residual': True}, 'absent or False, got True'),
    ('mtp', {'num_nextn_predict_layers': 2}, 'must be 1, got 2'),
    ('medusa', {'medusa_num_heads': 10**9}, 'in 1..64, got 1000000000'),
    ('medusa', {'medusa_num_heads': None}, 'in 1..64, got None'),
    ('medusa', {'medusa_num_heads': 4}, 'missing: 3.0.linear.bias'),
    ('medusa', {'original_lm_head': None}, 'missing: 0.1.weight'),
  )
  def test_a_config_that_does_not_fit(self, name, config, message):
    self.save(name)
    self.rewrite(**config)
    self.assert_refused(name, message)

  def test_pickles_are_refused_and_it_is_said_how_they_are_converted(self):
    self.save('medusa')
    (file,) = self.folder.glob('*.safetensors')
    file.rename(self.folder / 'medusa_lm_head.pt')
    message = 'medusa_lm_head.pt is not read, .* weights_only=True'
    self.assert_refused('medusa', message)

  def test_a_target_without_hiddens(self):
    self.save('medusa')
    self.assert_refused('medusa', 'got a ToyModel', ToyModel(vocab_size=16))

  def test_nothing_is_overwritten(self):
    self.save('mtp')
    with self.assertRaisesRegex(ValueError, 'must be absent or empty'):
      self.save('mtp')

  def test_a_layer_that_configs_of_heads_cannot_say(self):
    target = tiny_heads.target_of('qwen3')
    head = tiny_heads.head_of('mtp', target)
    with self.assertRaisesRegex(ValueError, "must have Llama's form"):
      files.save_head(self.folder, head, tiny_heads.params_of(head))
    self.assertFalse(self.folder.exists())


if __name__ == '__main__':
  absltest.main()

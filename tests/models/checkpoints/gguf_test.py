"""GGUF files: tiny ones of every architecture, broken ones, real ones."""

import dataclasses
import importlib.util
import os
import pathlib
import struct
import tempfile
import tracemalloc
import unittest

import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.models.checkpoints import gguf as gguf_reader
from specjax.models.checkpoints import gguf_config

_MODELS = pathlib.Path(
  os.environ.get('SPECJAX_MODELS', '~/.cache/specjax/models')
).expanduser()
_D, _F, _H, _G, _C, _V, _LAYERS = 32, 64, 4, 2, 8, 24, 2


def setUpModule():
  if importlib.util.find_spec('gguf') is None:
    raise unittest.SkipTest('the gguf package, which writes the test files')


def _interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
  """What llama files do to q and k, written out row by row."""
  half = rows.shape[0] // num_heads // 2
  out = []
  for head in range(num_heads):
    for i in range(half):
      out.append(rows[head * 2 * half + i])
      out.append(rows[head * 2 * half + half + i])
  return np.stack(out)


@dataclasses.dataclass(frozen=True)
class TinyModel:
  """Random weights by their Hugging Face names, and their GGUF names."""

  architecture: str

  def tensors(self) -> dict[str, tuple[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    gemma = self.architecture == 'gemma3'
    shapes = {
      'model.embed_tokens.weight': ('token_embd.weight', (_V, _D)),
      'model.norm.weight': ('output_norm.weight', (_D,)),
    }
    if self.architecture == 'llama':
      shapes['lm_head.weight'] = ('output.weight', (_V, _D))
    for i in range(_LAYERS):
      parts = {
        'input_layernorm.weight': ('attn_norm.weight', (_D,)),
        'self_attn.q_proj.weight': ('attn_q.weight', (_H * _C, _D)),
        'self_attn.k_proj.weight': ('attn_k.weight', (_G * _C, _D)),
        'self_attn.v_proj.weight': ('attn_v.weight', (_G * _C, _D)),
        'self_attn.o_proj.weight': ('attn_output.weight', (_D, _H * _C)),
        'mlp.gate_proj.weight': ('ffn_gate.weight', (_F, _D)),
        'mlp.up_proj.weight': ('ffn_up.weight', (_F, _D)),
        'mlp.down_proj.weight': ('ffn_down.weight', (_D, _F)),
      }
      if self.architecture == 'qwen2':
        for name, rows in (('q', _H * _C), ('k', _G * _C), ('v', _G * _C)):
          parts[f'self_attn.{name}_proj.bias'] = (f'attn_{name}.bias', (rows,))
      if self.architecture in ('qwen3', 'gemma3'):
        parts['self_attn.q_norm.weight'] = ('attn_q_norm.weight', (_C,))
        parts['self_attn.k_norm.weight'] = ('attn_k_norm.weight', (_C,))
      if gemma:
        parts |= {
          'post_attention_layernorm.weight': (
            'post_attention_norm.weight',
            (_D,),
          ),
          'pre_feedforward_layernorm.weight': ('ffn_norm.weight', (_D,)),
          'post_feedforward_layernorm.weight': ('post_ffw_norm.weight', (_D,)),
        }
      else:
        parts['post_attention_layernorm.weight'] = ('ffn_norm.weight', (_D,))
      for ours, (theirs, shape) in parts.items():
        shapes[f'model.layers.{i}.{ours}'] = (f'blk.{i}.{theirs}', shape)
    return {
      ours: (theirs, rng.normal(size=shape).astype(np.float32))
      for ours, (theirs, shape) in shapes.items()
    }

  def write(
    self, path, settings=(), extra_tensors=(), without=(), quantized=''
  ):
    """Writes the file; `settings` override or add to the metadata."""
    import gguf

    arch = self.architecture
    writer = gguf.GGUFWriter(path, arch)
    metadata = {
      f'{arch}.block_count': _LAYERS,
      f'{arch}.context_length': 512,
      f'{arch}.embedding_length': _D,
      f'{arch}.feed_forward_length': _F,
      f'{arch}.attention.head_count': _H,
      f'{arch}.attention.head_count_kv': _G,
      f'{arch}.attention.layer_norm_rms_epsilon': 1e-6,
      f'{arch}.rope.freq_base': 5e5,
      f'{arch}.attention.sliding_window': 16,
    }
    if arch != 'gemma3':
      del metadata[f'{arch}.attention.sliding_window']
    metadata |= dict(settings)
    for key, value in metadata.items():
      if key in without:
        continue
      if isinstance(value, str):
        writer.add_string(key, value)
      elif isinstance(value, float):
        writer.add_float32(key, value)
      elif isinstance(value, list):
        writer.add_array(key, value)
      else:
        writer.add_uint32(key, value)
    for ours, (theirs, value) in self.tensors().items():
      if arch == 'llama' and ('q_proj' in ours or 'k_proj' in ours):
        value = _interleave(value, _H if 'q_proj' in ours else _G)
      kind = None
      if ours == quantized:
        kind = gguf.GGMLQuantizationType.Q8_0
        value = gguf.quants.quantize(value, kind)
      writer.add_tensor(theirs, value, raw_dtype=kind)
    for name, value, kind in extra_tensors:
      writer.add_tensor(name, value, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class _FileCase(parameterized.TestCase):
  def path(self) -> str:
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    return os.path.join(folder.name, 'model.gguf')

  def write(self, architecture='llama', **kwargs) -> str:
    return TinyModel(architecture).write(self.path(), **kwargs)


class ReadTest(_FileCase):
  @parameterized.parameters('llama', 'qwen2', 'qwen3', 'gemma3')
  def test_names_shapes_and_values(self, architecture):
    checkpoint = gguf_reader.read_gguf(self.write(architecture))
    expected = TinyModel(architecture).tensors()
    self.assertEqual(
      checkpoint.shapes, {k: v.shape for k, (_, v) in expected.items()}
    )
    for name, (_, value) in expected.items():
      got = checkpoint.read(name)
      self.assertEqual(got.dtype, np.float32)
      np.testing.assert_array_equal(got, value, err_msg=name)
    self.assertEqual(checkpoint.norms_have_one_added, architecture == 'gemma3')

  @parameterized.parameters(
    ('llama', 'llama', False),
    ('qwen2', 'qwen2', True),
    ('qwen3', 'qwen3', True),
    ('gemma3', 'gemma3_text', True),
  )
  def test_config(self, architecture, model_type, is_tied):
    config = gguf_reader.read_gguf(self.write(architecture)).config
    expected = {
      'model_type': model_type,
      'hidden_size': _D,
      'num_hidden_layers': _LAYERS,
      'num_attention_heads': _H,
      'num_key_value_heads': _G,
      'head_dim': _C,
      'intermediate_size': _F,
      'rms_norm_eps': 1e-6,
      'rope_theta': 5e5,
      'rope_scaling': None,
      'max_position_embeddings': 512,
      'vocab_size': _V,
      'tie_word_embeddings': is_tied,
    }
    self.assertEqual(config, config | expected)

  def test_gemma_layers(self):
    config = gguf_reader.read_gguf(self.write('gemma3')).config
    self.assertEqual(config['layer_types'], ['sliding_attention'] * 2)
    self.assertEqual(config['sliding_window'], 16)
    self.assertEqual(config['rope_local_base_freq'], 1e4)
    self.assertEqual(config['query_pre_attn_scalar'], _C)
    config = gguf_reader.read_gguf(
      self.write(
        'gemma3', settings={'gemma3.attention.sliding_window_pattern': 2}
      )
    ).config
    self.assertEqual(
      config['layer_types'], ['sliding_attention', 'full_attention']
    )

  def test_quantized_rows_are_put_back_in_order_while_packed(self):
    import gguf

    kind = gguf.GGMLQuantizationType.Q8_0
    name = 'model.layers.1.self_attn.k_proj.weight'
    checkpoint = gguf_reader.read_gguf(self.write(quantized=name))
    value = TinyModel('llama').tensors()[name][1]
    expected = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
    np.testing.assert_array_equal(checkpoint.read(name), expected)
    np.testing.assert_allclose(expected, value, atol=0.02)

  def test_mistral_is_a_llama_with_a_window(self):
    path = self.write(settings={'llama.attention.sliding_window': 7})
    config = gguf_reader.read_gguf(path).config
    self.assertEqual(config['model_type'], 'mistral')
    self.assertEqual(config['sliding_window'], 7)

  def test_metadata(self):
    path = self.write(
      settings={'a.list': ['x', 'ä'], 'a.numbers': [1.5, 2.0], 'a.text': 'ß'}
    )
    metadata = gguf_reader.read_metadata(path)
    self.assertEqual(metadata['a.list'], ['x', 'ä'])
    np.testing.assert_array_equal(metadata['a.numbers'], [1.5, 2.0])
    self.assertEqual(metadata['a.text'], 'ß')
    self.assertEqual(metadata['general.architecture'], 'llama')


class RopeTest(_FileCase):
  def _read(self, factors, settings=(), architecture='llama'):
    factors = np.asarray(factors, np.float32)
    extra = [('rope_freqs.weight', factors, None)]
    path = self.write(architecture, settings=settings, extra_tensors=extra)
    return gguf_reader.read_gguf(path)

  @parameterized.parameters(8.0, 32.0)
  def test_llama3_factors_give_the_scaling_back(self, factor):
    factors = gguf_config.llama3_factors(5e5, _C, factor)
    checkpoint = self._read(factors)
    self.assertEqual(
      checkpoint.config['rope_scaling'],
      {
        'rope_type': 'llama3',
        'factor': factor,
        'low_freq_factor': 1.0,
        'high_freq_factor': 4.0,
        'original_max_position_embeddings': 8192,
      },
    )
    self.assertNotIn('rope_freqs.weight', checkpoint.shapes)

  def test_published_table(self):
    # 64 frequencies: 0-28 unchanged, 29-34 blended, 35-63 divided by 8.
    factors = gguf_config.llama3_factors(5e5, 128, 8.0)
    np.testing.assert_array_equal(factors[:29], 1.0)
    self.assertTrue(np.all((factors[29:35] > 1) & (factors[29:35] < 8)))
    np.testing.assert_allclose(factors[35:], 8.0, rtol=1e-12)

  def test_all_ones_is_no_scaling(self):
    self.assertIsNone(self._read(np.ones(_C // 2)).config['rope_scaling'])

  def test_other_factors_are_refused(self):
    factors = gguf_config.llama3_factors(5e5, _C, 8.0)
    for wrong in (factors * 1.01, factors[::-1], factors[:-1]):
      with self.assertRaisesRegex(ValueError, 'does not follow the Llama 3'):
        self._read(wrong)

  def test_factors_of_another_family_are_refused(self):
    with self.assertRaisesRegex(ValueError, 'rope_freqs.weight does not bel'):
      self._read(np.ones(_C // 2), architecture='qwen2')

  def test_linear_scaling(self):
    path = self.write(
      'gemma3',
      settings={
        'gemma3.rope.scaling.type': 'linear',
        'gemma3.rope.scaling.factor': 8.0,
      },
    )
    self.assertEqual(
      gguf_reader.read_gguf(path).config['rope_scaling'],
      {'rope_type': 'linear', 'factor': 8.0},
    )

  def test_unknown_scaling(self):
    path = self.write(settings={'llama.rope.scaling.type': 'longrope'})
    with self.assertRaisesRegex(ValueError, "'longrope' is not .*linear, yarn"):
      gguf_reader.read_gguf(path)


class RefusalTest(_FileCase):
  def refuses(self, message: str, path: str):
    with self.assertRaisesRegex(ValueError, message):
      gguf_reader.read_gguf(path)

  def test_unknown_architecture(self):
    path = self.write('falcon')
    self.refuses("'falcon' is not supported; allowed are llama, qwen2", path)

  def test_missing_setting(self):
    for key in ('rope.freq_base', 'attention.head_count', 'block_count'):
      path = self.write(without=[f'llama.{key}'])
      self.refuses(f'no metadata llama.{key}', path)

  def test_absurd_settings(self):
    for key, value, message in (
      ('block_count', 2**31, 'claims 2147483648 layers'),
      ('block_count', 0, 'must be an integer > 0, got 0'),
      ('attention.head_count', 2.5, 'must be an integer > 0, got 2.5'),
      ('rope.freq_base', float('nan'), 'a finite number > 0, got nan'),
      ('embedding_length', _D + 1, 'embedding_length must be 32'),
      ('rope.dimension_count', 4, 'rope.dimension_count must be 8'),
      ('attention.value_length', 4, 'attention.value_length must be 8'),
    ):
      path = self.write(settings={f'llama.{key}': value})
      self.refuses(message, path)

  def test_tensor_that_the_architecture_does_not_have(self):
    extra = [('blk.0.ffn_gate_exps.weight', np.ones((2, 2), 'f4'), None)]
    path = self.write(extra_tensors=extra)
    self.refuses('1 tensors do not belong .*ffn_gate_exps', path)

  def test_tensor_type_by_name(self):
    import gguf

    kind = gguf.GGMLQuantizationType
    for value, form, name in (
      (np.zeros((2, 84), np.uint8), kind.Q2_K, 'Q2_K'),
      (np.zeros((2, 4), np.int32), None, 'I32'),
    ):
      path = self.write(extra_tensors=[('blk.0.attn_q.x', value, form)])
      self.refuses(f'has type {name}; allowed are F32, F16, Q4_0', path)

  def test_part_of_a_split_file(self):
    path = self.write(settings={'split.count': 3})
    self.refuses('one of 3 parts', path)

  def test_scale_that_is_not_finite(self):
    path = self.write()
    data = bytearray(pathlib.Path(path).read_bytes())
    data[-4:] = struct.pack('<f', np.inf)
    pathlib.Path(path).write_bytes(data)
    checkpoint = gguf_reader.read_gguf(path)
    last = list(checkpoint.shapes)[-1]
    with self.assertRaisesRegex(ValueError, "tensor 'blk.1.* NaN or infinite"):
      np.asarray(checkpoint.read(last))

  def test_unknown_name(self):
    checkpoint = gguf_reader.read_gguf(self.write())
    with self.assertRaisesRegex(ValueError, "has no tensor 'lm_head.bias'"):
      checkpoint.read('lm_head.bias')

  def test_missing_file(self):
    self.refuses('cannot be read: No such file', '/nonexistent.gguf')
    self.refuses('cannot be read: Is a directory', os.path.dirname(self.path()))


def _header(version=3, num_tensors=0, num_entries=0, rest=b'') -> bytes:
  return (
    struct.pack('<4sIQQ', b'GGUF', version, num_tensors, num_entries) + rest
  )


def _string(text: bytes) -> bytes:
  return struct.pack('<Q', len(text)) + text


_HUGE = 2**60
_TENSOR = _string(b't') + struct.pack('<I', 2)


class BrokenHeaderTest(_FileCase):
  """A lying header is refused before memory is taken for what it claims."""

  def refuses(self, message: str, data: bytes):
    path = pathlib.Path(self.path())
    path.write_bytes(data)
    tracemalloc.start()
    try:
      with self.assertRaisesRegex(ValueError, message):
        gguf_reader.read_gguf(path)
      peak = tracemalloc.get_traced_memory()[1]
    finally:
      tracemalloc.stop()
    self.assertLess(peak, 1 << 20)

  @parameterized.named_parameters(
    ('empty', b'', 'is empty'),
    ('magic', b'GGML' + bytes(40), "starts with b'GGML', not b'GGUF'"),
    ('short', b'GG', "starts with b'GG'"),
    ('version', _header(version=1), r'version 1 .* allowed are \(2, 3\)'),
    ('big_endian', _header(version=3 << 24), 'little-endian'),
    ('tensors', _header(num_tensors=_HUGE), f'number of tensors is {_HUGE}'),
    ('entries', _header(num_entries=_HUGE), f'metadata entries is {_HUGE}'),
    (
      'key_length',
      _header(num_entries=1, rest=struct.pack('<QQQ', _HUGE, 0, 0)),
      f'length of key of metadata entry 0 is {_HUGE}',
    ),
    (
      'string_length',
      _header(num_entries=1, rest=_string(b'k') + struct.pack('<IQ', 8, _HUGE)),
      f"length of metadata value 'k' is {_HUGE}",
    ),
    (
      'array_of_strings',
      _header(
        num_entries=1, rest=_string(b'k') + struct.pack('<IIQ', 9, 8, _HUGE)
      ),
      f'is {_HUGE}, which needs',
    ),
    (
      'array_of_numbers',
      _header(
        num_entries=1, rest=_string(b'k') + struct.pack('<IIQ', 9, 12, _HUGE)
      ),
      f'is {_HUGE}, which needs',
    ),
    (
      'array_of_arrays',
      _header(num_entries=1, rest=_string(b'k') + struct.pack('<IIQ', 9, 9, 1)),
      'array of arrays',
    ),
    (
      'value_type',
      _header(num_entries=1, rest=_string(b'k') + struct.pack('<IQ', 99, 0)),
      'value type 99; allowed are 0 to 12',
    ),
    (
      'not_utf8',
      _header(
        num_entries=1,
        rest=_string(b'k') + struct.pack('<I', 8) + _string(b'\xff'),
      ),
      'is not UTF-8',
    ),
    (
      'axes',
      _header(
        num_tensors=1,
        rest=_string(b't') + struct.pack('<I', 2**31) + bytes(40),
      ),
      '2147483648 axes; allowed are 1 to 4',
    ),
    (
      'extent',
      _header(
        num_tensors=1, rest=_TENSOR + struct.pack('<QQIQ', _HUGE, 8, 0, 0)
      ),
      'but the file ends after',
    ),
    (
      'offset',
      _header(
        num_tensors=1, rest=_TENSOR + struct.pack('<QQIQ', 1, 1, 0, _HUGE)
      ),
      'but the file ends after',
    ),
    (
      'unaligned',
      _header(num_tensors=1, rest=_TENSOR + struct.pack('<QQIQ', 1, 1, 0, 7)),
      'starts at 7, not a multiple of 32',
    ),
    (
      'block',
      _header(num_tensors=1, rest=_TENSOR + struct.pack('<QQIQ', 33, 1, 8, 0)),
      'the first a multiple of 32',
    ),
    (
      'type',
      _header(num_tensors=1, rest=_TENSOR + struct.pack('<QQIQ', 1, 1, 77, 0)),
      'has type number 77; allowed are F32',
    ),
    (
      'alignment',
      _header(
        num_entries=1,
        rest=_string(b'general.alignment') + struct.pack('<II', 4, 0),
      ),
      'general.alignment must be an integer >= 1, got 0',
    ),
  )
  def test_refused(self, data, message):
    self.refuses(message, data)

  def test_twice_the_same_key(self):
    entry = _string(b'k') + struct.pack('<II', 4, 1)
    self.refuses("'k' appears twice", _header(num_entries=2, rest=entry * 2))

  def test_truncated_anywhere(self):
    data = pathlib.Path(self.write()).read_bytes()
    path = pathlib.Path(self.path())
    offsets = [*range(0, 3000, 7), *range(3000, len(data) - 32, 997)]
    for end in offsets:
      path.write_bytes(data[:end])
      with self.assertRaises(ValueError, msg=f'first {end} bytes'):
        gguf_reader.read_gguf(path)

  def test_any_wrong_byte_is_read_or_refused(self):
    # Every outcome but a ValueError or success would propagate and fail.
    data = pathlib.Path(self.write()).read_bytes()
    path = pathlib.Path(self.path())
    rng = np.random.default_rng(0)
    num_refused = 0
    for _ in range(600):
      broken = bytearray(data)
      broken[rng.integers(4, 2500)] = rng.integers(256)
      path.write_bytes(broken)
      try:
        gguf_reader.read_gguf(path)
      except ValueError:
        num_refused += 1
    self.assertGreater(num_refused, 200)


class RealFileTest(parameterized.TestCase):
  @parameterized.parameters(
    ('smollm2-135m-instruct-q4_1', 'llama', 30, 49152, True),
    ('qwen2.5-coder-0.5b-instruct-q4_k_m', 'qwen2', 24, 151936, False),
    ('qwen2.5-coder-1.5b-instruct-q4_k_m', 'qwen2', 28, 151936, False),
    ('gemma-3-270m-q4_k_m', 'gemma3_text', 18, 262144, True),
  )
  def test_header_and_one_tensor_of_every_format(
    self, name, model_type, num_layers, vocab_size, is_tied
  ):
    path = _MODELS / f'{name}.gguf'
    if not path.exists():
      self.skipTest(f'{path} is not there (set SPECJAX_MODELS)')
    import gguf

    checkpoint = gguf_reader.read_gguf(path)
    config = checkpoint.config
    self.assertEqual(config['model_type'], model_type)
    self.assertEqual(config['num_hidden_layers'], num_layers)
    self.assertEqual(config['vocab_size'], vocab_size)
    self.assertEqual(config['tie_word_embeddings'], is_tied)
    self.assertTrue(checkpoint.stop_ids)
    data = gguf_reader._map(path)
    cursor = gguf_reader._Cursor(data, str(path))
    _, num_tensors = gguf_reader._read_metadata(cursor)
    infos = gguf_reader._read_tensor_infos(cursor, num_tensors, 32)
    seen = {}
    for theirs, info in infos.items():
      if 'blk.' in theirs and info.format_name not in seen:
        seen[info.format_name] = theirs
    names = gguf_config.hugging_face_names(
      str(path), gguf_reader.read_metadata(path), infos
    )
    ours = {theirs: ours for ours, theirs in names.items()}
    for theirs in seen.values():
      info = infos[theirs]
      packed = np.frombuffer(data, np.uint8, info.num_bytes, info.start)
      expected = gguf.quants.dequantize(
        packed.reshape(info.shape[0], -1),
        gguf.GGMLQuantizationType[info.format_name],
      ).reshape(info.shape)
      if model_type == 'llama' and 'attn_q.' in theirs:
        continue  # In another order; the tiny files test it.
      got = checkpoint.read(ours[theirs])
      np.testing.assert_array_equal(got, expected, err_msg=theirs)


if __name__ == '__main__':
  absltest.main()

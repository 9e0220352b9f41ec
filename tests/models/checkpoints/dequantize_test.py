"""Block formats: by hand, and against the reference of the gguf package."""

import importlib.util
import unittest

import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.models.checkpoints import dequantize

_ONE, _TWO, _HALF = [0x00, 0x3C], [0x00, 0x40], [0x00, 0x38]  # As float16.
_PACKED = tuple(n for n, f in dequantize.FORMATS.items() if f.unpack)
_SCALE_OFFSETS = {'Q6_K': (208,)}
_TWO_SCALES = ('Q4_1', 'Q5_1', 'Q4_K', 'Q5_K')


def _block(format_name: str, parts: dict[int, list[int]]) -> np.ndarray:
  """A block of zeros with some bytes set, by their offsets."""
  block = np.zeros(dequantize.FORMATS[format_name].block_bytes, np.uint8)
  for offset, values in parts.items():
    block[offset : offset + len(values)] = values
  return block


def _random_blocks(format_name: str, num_blocks: int) -> np.ndarray:
  """Any bits for the quants, ordinary numbers for the scales."""
  rng = np.random.default_rng(0)
  form = dequantize.FORMATS[format_name]
  blocks = rng.integers(0, 256, (num_blocks, form.block_bytes), dtype=np.uint8)
  offsets = _SCALE_OFFSETS.get(format_name, (0,))
  for offset in offsets + (2,) * (format_name in _TWO_SCALES):
    scales = rng.normal(size=(num_blocks, 1)).astype(np.float16)
    blocks[:, offset : offset + 2] = scales.view(np.uint8)
  return blocks


class ByHandTest(parameterized.TestCase):
  @parameterized.named_parameters(
    # Low nibbles are the first half of the block, high ones the second.
    ('q4_0', 'Q4_0', {0: _TWO, 2: [0x9F] + [0x88] * 15}, {0: 14, 16: 2}, 0),
    ('q4_1', 'Q4_1', {0: _HALF, 2: _ONE, 4: [0x3A]}, {0: 6, 16: 2.5}, 1),
    # Bits 0 and 16 of the word that holds the fifth bits.
    ('q5_0', 'Q5_0', {0: _ONE, 2: [1, 0, 1], 6: [0x21]}, {0: 1, 16: 2}, -16),
    (
      'q5_1',
      'Q5_1',
      {0: _TWO, 2: _ONE, 4: [1, 0, 1], 8: [0x21]},
      {0: 35, 16: 37},
      1,
    ),
    ('q8_0', 'Q8_0', {0: _HALF, 2: [3, 0x80]}, {0: 1.5, 1: -64}, 0),
    # Sub-block 0: scale 3, minimum 2, first value 7. Sub-block 5: scale 43
    # (low nibble 11 in byte 9, top bits 2 in byte 1), fifth value 9.
    (
      'q4_k',
      'Q4_K',
      {0: _ONE, 2: _ONE, 4: [3, 0x80], 8: [2], 13: [11], 16: [7], 84: [0x90]},
      {0: 19, **{i: -2 for i in range(1, 32)}, 164: 387},
      0,
    ),
    # The same with the fifth bit of that value: bit 5 of byte 4 of its 32.
    (
      'q5_k',
      'Q5_K',
      {0: _ONE, 4: [3, 0x80], 13: [11], 20: [0x20], 116: [0x90], 48: [7]},
      {0: 21, 164: 1075},
      0,
    ),
    # Value 195 is in half 1, quarter 2, position 3: high nibble of byte 67,
    # bits 4-5 of byte 35 of the top bits, scale 12. 5 + 2 * 16 - 32 = 5.
    (
      'q6_k',
      'Q6_K',
      {208: _HALF, 67: [0x50], 163: [0x20], 204: [0xFE]},
      {195: -5, **{i: 32 for i in range(192, 208) if i != 195}},
      0,
    ),
  )
  def test_one_block(self, format_name, parts, expected, rest):
    size = dequantize.FORMATS[format_name].block_size
    values, is_finite = dequantize.dequantize(
      _block(format_name, parts), format_name, (size,)
    )
    wanted = np.full(size, rest, np.float32)
    for index, value in expected.items():
      wanted[index] = value
    np.testing.assert_array_equal(values, wanted)
    self.assertTrue(is_finite)


class ReferenceTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    if importlib.util.find_spec('gguf') is None:
      raise unittest.SkipTest('the gguf package is not installed')

  @parameterized.parameters(*_PACKED)
  def test_random_blocks_equal_reference(self, format_name):
    import gguf

    form = dequantize.FORMATS[format_name]
    blocks = _random_blocks(format_name, 300)
    kind = gguf.GGMLQuantizationType(form.ggml_type)
    expected = gguf.quants.dequantize(blocks, kind)
    shape = (100, 3 * form.block_size)
    got, is_finite = dequantize.dequantize(
      blocks.reshape(-1), format_name, shape
    )
    np.testing.assert_array_equal(got, expected.reshape(shape))
    self.assertTrue(is_finite)


class DequantizeTest(parameterized.TestCase):
  def test_rows_are_unpacked_as_they_are_asked_for(self):
    packed = _random_blocks('Q4_K', 21).reshape(-1)
    whole, _ = dequantize.dequantize(packed, 'Q4_K', (7, 768))
    order = np.array([3, 1, 4, 0, 5, 2, 6])
    for rows in (None, order):
      tensor = dequantize.PackedTensor(
        name='t', packed=packed, format_name='Q4_K', shape=(7, 768), order=rows
      )
      want = whole if rows is None else whole[order]
      np.testing.assert_array_equal(np.asarray(tensor), want)
      np.testing.assert_array_equal(tensor[2:5], want[2:5])
      np.testing.assert_array_equal(tensor[5:100], want[5:])

  def test_only_rows_asked_for_must_be_finite(self):
    blocks = _random_blocks('Q8_0', 4)
    blocks[2, :2] = [0, 0x7C]
    tensor = dequantize.PackedTensor(
      name='t', packed=blocks.reshape(-1), format_name='Q8_0', shape=(4, 32)
    )
    self.assertEqual(tensor[:2].shape, (2, 32))
    for read in (lambda: tensor[2:3], lambda: np.asarray(tensor)):
      with self.assertRaisesRegex(ValueError, '^t has a scale that is NaN or'):
        read()

  @parameterized.parameters('F32', 'F16', 'BF16')
  def test_plain_floats(self, format_name):
    form = dequantize.FORMATS[format_name]
    values = np.linspace(-2, 2, 12).astype(form.dtype).reshape(3, 4)
    got, is_finite = dequantize.dequantize(
      values.reshape(-1).view(np.uint8), format_name, (3, 4)
    )
    np.testing.assert_array_equal(got, values.astype(np.float32))
    self.assertEqual(got.dtype, np.float32)
    self.assertTrue(is_finite)

  @parameterized.product(
    format_name=_PACKED, half=([0, 0x7C], [0, 0xFC], [1, 0x7E])
  )
  def test_scales_that_are_not_finite_are_seen(self, format_name, half):
    blocks = _random_blocks(format_name, 5)
    for offset in _SCALE_OFFSETS.get(format_name, (0,)):
      blocks[3, offset : offset + 2] = half
    size = dequantize.FORMATS[format_name].block_size
    _, is_finite = dequantize.dequantize(
      blocks.reshape(-1), format_name, (5, size)
    )
    self.assertFalse(is_finite)

  @parameterized.parameters('Q4_1', 'Q4_K')
  def test_minima_that_are_not_finite_are_seen(self, format_name):
    blocks = _random_blocks(format_name, 5)
    blocks[2, 2:4] = [0, 0x7C]
    size = dequantize.FORMATS[format_name].block_size
    _, is_finite = dequantize.dequantize(
      blocks.reshape(-1), format_name, (5, size)
    )
    self.assertFalse(is_finite)

  def test_wrong_number_of_bytes(self):
    with self.assertRaisesRegex(ValueError, r'must have 34 bytes .* got 33'):
      dequantize.dequantize(np.zeros(33, np.uint8), 'Q8_0', (32,))


if __name__ == '__main__':
  absltest.main()

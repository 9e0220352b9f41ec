"""Bytes, tokenizer.json, vocabulary comparison and padding."""

import dataclasses
import importlib.util
import json
import os
import tempfile
import unittest

import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import tokenizers

TEXTS = (
  'Hello, world!',
  'def f(x):\n\treturn x ** 2  # twice\n\n\n',
  '   three spaces, 12345 and ½',
  'naïve Straße 日本語 مرحبا 👩‍👩‍👧',
  '\r\n\x00\x7f',
  '',
)


@dataclasses.dataclass(frozen=True)
class FakeTokenizer:
  """Only a vocabulary."""

  tokens: tuple[str | None, ...]

  def content(self):
    return self.tokens


class ByteTokenizerTest(parameterized.TestCase):
  @parameterized.parameters(*TEXTS)
  def test_round_trip(self, text):
    tokenizer = tokenizers.ByteTokenizer()
    ids = tokenizer.encode(text, add_special=False)
    self.assertEqual(ids, list(text.encode()))
    self.assertEqual(tokenizer.decode(ids), text)

  def test_special(self):
    tokenizer = tokenizers.ByteTokenizer()
    self.assertEqual(tokenizer.encode('a', add_special=True), [256, 97])
    self.assertEqual(tokenizer.decode([97, 256]), 'a<|end|>')
    self.assertEqual(tokenizer.decode([97, 256], skip_special=True), 'a')
    self.assertEqual(tokenizer.stop_ids, (256,))
    self.assertLen(set(tokenizer.content()), tokenizer.vocab_size)

  def test_half_a_character_is_replaced(self):
    self.assertEqual(tokenizers.ByteTokenizer().decode([0xC3]), '\ufffd')

  def test_refusals(self):
    tokenizer = tokenizers.ByteTokenizer()
    for token_id in (-1, 257):
      with self.assertRaisesRegex(ValueError, rf'in 0\.\.256, got {token_id}'):
        tokenizer.decode([token_id])
    with self.assertRaisesRegex(ValueError, r"got '\\ud800' at character 1"):
      tokenizer.encode('a\ud800', add_special=False)


class TokenizerJsonTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    if importlib.util.find_spec('tokenizers') is None:
      raise unittest.SkipTest('the tokenizers package is not installed')

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = folder.name

  def write(self, name: str, value):
    with open(os.path.join(self.folder, name), 'w', encoding='utf-8') as file:
      file.write(value if isinstance(value, str) else json.dumps(value))

  def write_byte_level(self):
    """Every byte, two merges, and two control tokens."""
    chars = sorted(tokenizers._byte_of_char(), key=ord)
    tokens = [*chars, 'he', 'hel', '<s>', '<end>']
    self.write(
      'tokenizer.json',
      {
        'version': '1.0',
        'added_tokens': [
          {
            'id': tokens.index(token),
            'content': token,
            'special': True,
            'normalized': False,
            'single_word': False,
            'lstrip': False,
            'rstrip': False,
          }
          for token in ('<s>', '<end>')
        ],
        'normalizer': None,
        'pre_tokenizer': {
          'type': 'ByteLevel',
          'add_prefix_space': False,
          'trim_offsets': True,
          'use_regex': True,
        },
        'post_processor': None,
        'decoder': {
          'type': 'ByteLevel',
          'add_prefix_space': False,
          'trim_offsets': True,
          'use_regex': True,
        },
        'model': {
          'type': 'BPE',
          'vocab': {token: i for i, token in enumerate(tokens)},
          'merges': ['h e', 'he l'],
        },
      },
    )
    return tokens

  def write_sentencepiece(self, prefix: bool):
    tokens = ['<unk>', '<s>', '</s>']
    tokens += [f'<0x{byte:02X}>' for byte in range(256)]
    tokens += ['\u2581', 'a', 'b', 'ab', '\u2581ab']
    steps = [{'type': 'Prepend', 'prepend': '\u2581'}] if prefix else []
    steps += [
      {'type': 'Replace', 'pattern': {'String': ' '}, 'content': '\u2581'}
    ]
    self.write(
      'tokenizer.json',
      {
        'version': '1.0',
        'added_tokens': [],
        'normalizer': {'type': 'Sequence', 'normalizers': steps},
        'pre_tokenizer': None,
        'post_processor': {
          'type': 'TemplateProcessing',
          'single': [
            {'SpecialToken': {'id': '<s>', 'type_id': 0}},
            {'Sequence': {'id': 'A', 'type_id': 0}},
          ],
          'pair': [],
          'special_tokens': {
            '<s>': {'id': '<s>', 'ids': [1], 'tokens': ['<s>']}
          },
        },
        'decoder': {
          'type': 'Sequence',
          'decoders': [
            {
              'type': 'Replace',
              'pattern': {'String': '\u2581'},
              'content': ' ',
            },
            {'type': 'ByteFallback'},
            {'type': 'Fuse'},
          ],
        },
        'model': {
          'type': 'BPE',
          'vocab': {token: i for i, token in enumerate(tokens)},
          'merges': ['a b', '\u2581 ab'],
          'byte_fallback': True,
          'unk_token': '<unk>',
        },
      },
    )
    return tokens

  @parameterized.parameters(*TEXTS)
  def test_byte_level_round_trip(self, text):
    self.write_byte_level()
    tokenizer = tokenizers.from_tokenizer_json(self.folder)
    ids = tokenizer.encode(text, add_special=False)
    self.assertEqual(tokenizer.decode(ids), text)

  def test_byte_level_by_hand(self):
    tokens = self.write_byte_level()
    path = os.path.join(self.folder, 'tokenizer.json')
    tokenizer = tokenizers.from_tokenizer_json(path)
    ids = tokenizer.encode('hello é<end>', add_special=True)
    self.assertEqual(
      [tokenizer.id_to_token(i) for i in ids],
      ['hel', 'l', 'o', 'Ġ', 'Ã', '©', '<end>'],
    )
    self.assertEqual(tokenizer.token_bytes(tokens.index('Ã')), b'\xc3')
    self.assertEqual(tokenizer.decode(ids, skip_special=True), 'hello é')
    self.assertEqual(tokenizer.content(), tuple(tokens))
    self.assertIsNone(tokenizer.eos_id)

  @parameterized.parameters(*TEXTS)
  def test_sentencepiece_round_trip(self, text):
    for prefix in (False, True):
      self.write_sentencepiece(prefix)
      tokenizer = tokenizers.from_tokenizer_json(self.folder)
      ids = tokenizer.encode(text, add_special=False)
      self.assertEqual(tokenizer.decode(ids, is_start=True), text)

  def test_sentencepiece_by_hand(self):
    self.write_sentencepiece(True)
    tokenizer = tokenizers.from_tokenizer_json(self.folder)
    ids = tokenizer.encode('ab é', add_special=True)
    self.assertEqual(
      [tokenizer.id_to_token(i) for i in ids],
      ['<s>', '\u2581ab', '\u2581', '<0xC3>', '<0xA9>'],
    )
    # A continuation keeps its space; the start of a text never had one.
    self.assertEqual(tokenizer.decode(ids[1:]), ' ab é')
    self.assertEqual(tokenizer.decode(ids[1:], is_start=True), 'ab é')

  def test_config_flags_overrule_the_post_processor(self):
    self.write_sentencepiece(False)
    for flags, expected in (
      ({}, [1, 260]),
      ({'add_bos_token': False}, [260]),
      ({'add_bos_token': True, 'bos_token': {'content': '</s>'}}, [2, 260]),
      ({'add_eos_token': True, 'eos_token': '</s>'}, [1, 260, 2]),
    ):
      self.write('tokenizer_config.json', flags)
      tokenizer = tokenizers.from_tokenizer_json(self.folder)
      self.assertEqual(tokenizer.encode('a', add_special=True), expected)

  def test_config_names_special_tokens_and_template(self):
    tokens = self.write_byte_level()
    self.write(
      'tokenizer_config.json',
      {'bos_token': '<s>', 'eos_token': '<end>', 'chat_template': 'old'},
    )
    tokenizer = tokenizers.from_tokenizer_json(self.folder)
    self.assertEqual(tokenizer.bos_id, tokens.index('<s>'))
    self.assertEqual(tokenizer.stop_ids, (tokens.index('<end>'),))
    self.assertEqual(tokenizer.chat_template, 'old')
    self.assertTrue(tokenizer.is_special(tokens.index('<s>')))
    self.write('chat_template.jinja', 'new')
    tokenizer = tokenizers.from_tokenizer_json(self.folder)
    self.assertEqual(tokenizer.chat_template, 'new')

  def test_refusals(self):
    with self.assertRaisesRegex(ValueError, 'cannot be read: No such file'):
      tokenizers.from_tokenizer_json(self.folder)
    for content, message in (
      ('{', 'is not JSON'),
      ('[]', 'must hold a JSON object'),
      ('{"model": 3}', 'is not a tokenizer'),
    ):
      self.write('tokenizer.json', content)
      with self.assertRaisesRegex(ValueError, message):
        tokenizers.from_tokenizer_json(self.folder)
    self.write_byte_level()
    self.write('tokenizer_config.json', {'eos_token': '<nope>'})
    with self.assertRaisesRegex(ValueError, "eos_token '<nope>' is not a tok"):
      tokenizers.from_tokenizer_json(self.folder)
    self.write('tokenizer_config.json', {'add_bos_token': True})
    with self.assertRaisesRegex(ValueError, 'need bos_token'):
      tokenizers.from_tokenizer_json(self.folder)

  def test_word_level_is_refused(self):
    self.write(
      'tokenizer.json',
      {
        'version': '1.0',
        'added_tokens': [],
        'pre_tokenizer': {'type': 'Whitespace'},
        'model': {'type': 'WordLevel', 'vocab': {'a': 0}, 'unk_token': 'a'},
      },
    )
    with self.assertRaisesRegex(ValueError, "model 'WordLevel' .*allowed are"):
      tokenizers.from_tokenizer_json(self.folder)


class VocabularyTest(absltest.TestCase):
  def test_equal(self):
    tokenizers.check_same_vocabulary(
      tokenizers.ByteTokenizer(), tokenizers.ByteTokenizer()
    )

  def test_first_difference_is_named(self):
    with self.assertRaisesRegex(
      ValueError, "id 1 is 'b' in the target and 'x' in the draft"
    ):
      tokenizers.check_same_vocabulary(
        FakeTokenizer(('a', 'b', 'c')), FakeTokenizer(('a', 'x', 'y'))
      )

  def test_same_size_is_not_enough_and_missing_ids_count(self):
    with self.assertRaisesRegex(
      ValueError, r"id 2 is 'c' in the target and \(no token\) in the draft"
    ):
      tokenizers.check_same_vocabulary(
        FakeTokenizer(('a', 'b', 'c')), FakeTokenizer(('a', 'b'))
      )


class PadBatchTest(absltest.TestCase):
  def test_by_hand(self):
    tokens_BL, length_B = tokenizers.pad_batch([[3], [1, 2, 4]], 4)
    np.testing.assert_array_equal(tokens_BL, [[3, 0, 0, 0], [1, 2, 4, 0]])
    np.testing.assert_array_equal(length_B, [1, 3])
    self.assertEqual((tokens_BL.dtype, length_B.dtype), (np.int32, np.int32))

  def test_refusals(self):
    with self.assertRaisesRegex(ValueError, 'at least one prompt'):
      tokenizers.pad_batch([], 4)
    with self.assertRaisesRegex(ValueError, 'prompt 1 is empty'):
      tokenizers.pad_batch([[1], []], 4)
    with self.assertRaisesRegex(ValueError, '0 has 5 tokens, .* holds 4'):
      tokenizers.pad_batch([[1] * 5], 4)


if __name__ == '__main__':
  absltest.main()

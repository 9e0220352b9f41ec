"""Tokenizers rebuilt from GGUF metadata, against references and real files."""

import functools
import importlib.util
import os
import pathlib
import random
import unittest

import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import gguf_tokenizer, tokenizers
from specjax.models.checkpoints import gguf

_MODELS = pathlib.Path(
  os.environ.get('SPECJAX_MODELS', '~/.cache/specjax/models')
).expanduser()
_SMOLLM = 'smollm2-135m-instruct-q4_1'
_QWEN = 'qwen2.5-coder-0.5b-instruct-q4_k_m'
_LARGE_QWEN = 'qwen2.5-coder-1.5b-instruct-q4_k_m'
_GEMMA = 'gemma-3-270m-q4_k_m'
_SPACE = '\u2581'
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


def setUpModule():
  if importlib.util.find_spec('tokenizers') is None:
    raise unittest.SkipTest('the tokenizers package is not installed')


def _byte_level_metadata(pre='qwen2', padding=0, **changes):
  """Every byte, three merges, two control tokens and a user-defined one."""
  chars = list(tokenizers._byte_of_char())
  tokens = [*chars, '12', '123', 'Ġa', '<|im_end|>', '<bos>', '<tool>']
  types = [_NORMAL] * (len(tokens) - 3) + [_CONTROL] * 2 + [_USER_DEFINED]
  size = len(tokens)
  tokens += [f'[PAD{size + i}]' for i in range(padding)]
  types += [_UNUSED] * padding
  metadata = {
    'model': 'gpt2',
    'pre': pre,
    'tokens': tokens,
    'token_type': np.array(types, np.int32),
    'merges': ['1 2', '12 3', 'Ġ a'],
    'bos_token_id': size - 2,
    'eos_token_id': size - 3,
  } | changes
  return {
    f'tokenizer.ggml.{key}': value
    for key, value in metadata.items()
    if value is not None
  }


def _sentencepiece_metadata(**changes):
  pieces = [_SPACE, *'abcd', 'ab', 'bc', 'cd', 'abc', f'{_SPACE}a', 'aa']
  pieces += ['aaa', f'{_SPACE}ab', 'bcd']
  tokens = ['<unk>', '<s>', '</s>', *(f'<0x{i:02X}>' for i in range(256))]
  types = [_UNKNOWN, _CONTROL, _CONTROL] + [_BYTE] * 256
  rng = random.Random(0)
  scores = [0.0] * len(tokens) + rng.sample(range(-99, 0), len(pieces))
  tokens += [*pieces, '   ', '<b>']
  types += [_NORMAL] * len(pieces) + [_USER_DEFINED] * 2
  scores += [-1000.0, -1000.0]
  metadata = {
    'model': 'llama',
    'tokens': tokens,
    'token_type': np.array(types, np.int32),
    'scores': np.array(scores, np.float32),
    'bos_token_id': 1,
    'eos_token_id': 2,
    'unknown_token_id': 0,
  } | changes
  return {
    f'tokenizer.ggml.{key}': value
    for key, value in metadata.items()
    if value is not None
  }


def _sentencepiece_reference(text: str, metadata) -> list[str]:
  """Merges the best-scoring neighbours, leftmost first, until none is left."""
  scores = {
    token: score
    for token, score, kind in zip(
      metadata['tokenizer.ggml.tokens'],
      metadata['tokenizer.ggml.scores'],
      metadata['tokenizer.ggml.token_type'],
    )
    if kind == _NORMAL
  }
  parts = list(text.replace(' ', _SPACE))
  while True:
    pairs = [
      (-scores[a + b], i)
      for i, (a, b) in enumerate(zip(parts, parts[1:]))
      if a + b in scores
    ]
    if not pairs:
      return parts
    i = min(pairs)[1]
    parts[i : i + 2] = [parts[i] + parts[i + 1]]


class ByteLevelTest(parameterized.TestCase):
  def _tokens(self, text, **changes):
    tokenizer = gguf_tokenizer.from_gguf(_byte_level_metadata(**changes))
    ids = tokenizer.encode(text, add_special=False)
    self.assertEqual(tokenizer.decode(ids), text)
    return [tokenizer.id_to_token(i) for i in ids]

  def test_digits_are_split_as_each_family_does(self):
    text = '1234 a'
    # Llama 3 cuts after three digits, the others after each.
    self.assertEqual(self._tokens(text, pre='llama-bpe'), ['123', '4', 'Ġa'])
    self.assertEqual(self._tokens(text, pre='qwen2'), [*'1234', 'Ġa'])
    self.assertEqual(self._tokens(text, pre='smollm'), [*'1234', 'Ġa'])

  def test_added_tokens_are_matched_whole(self):
    self.assertEqual(
      self._tokens('1<|im_end|><tool>é'),
      ['1', '<|im_end|>', '<tool>', 'Ã', '©'],
    )
    tokenizer = gguf_tokenizer.from_gguf(_byte_level_metadata())
    ids = tokenizer.encode('1<|im_end|><tool>', add_special=False)
    # A control token is no text, a user-defined one is.
    self.assertEqual(tokenizer.decode(ids, skip_special=True), '1<tool>')

  def test_qwen_composes_characters(self):
    tokenizer = gguf_tokenizer.from_gguf(_byte_level_metadata())
    ids = tokenizer.encode('e\u0301', add_special=False)
    self.assertEqual(tokenizer.decode(ids), 'é')

  def test_beginning_of_text(self):
    for changes, num_added in (
      ({'pre': 'qwen2'}, 0),
      ({'pre': 'llama-bpe'}, 1),
      ({'pre': 'llama-bpe', 'add_bos_token': False}, 0),
      ({'pre': 'qwen2', 'add_bos_token': True, 'add_eos_token': True}, 2),
    ):
      tokenizer = gguf_tokenizer.from_gguf(_byte_level_metadata(**changes))
      ids = tokenizer.encode('a', add_special=True)
      self.assertLen(ids, 1 + num_added)
      if num_added:
        self.assertEqual(ids[0], tokenizer.bos_id)

  def test_padding_is_no_vocabulary(self):
    narrow = gguf_tokenizer.from_gguf(_byte_level_metadata())
    wide = gguf_tokenizer.from_gguf(_byte_level_metadata(padding=7))
    self.assertEqual(narrow.vocab_size, wide.vocab_size)
    tokenizers.check_same_vocabulary(narrow, wide)
    # Old converters gave the filling another type.
    metadata = _byte_level_metadata(padding=7)
    metadata['tokenizer.ggml.token_type'][-7:] = _USER_DEFINED
    tokenizers.check_same_vocabulary(narrow, gguf_tokenizer.from_gguf(metadata))

  def test_stop_ids(self):
    metadata = _byte_level_metadata()
    end = metadata['tokenizer.ggml.tokens'].index('<|im_end|>')
    self.assertEqual(gguf_tokenizer.stop_ids(metadata), (end,))
    metadata['tokenizer.ggml.eos_token_id'] = 5
    metadata['tokenizer.ggml.eot_token_id'] = 7
    self.assertEqual(gguf_tokenizer.stop_ids(metadata), (5, 7, end))
    self.assertEqual(gguf_tokenizer.stop_ids({}), ())

  @parameterized.parameters(
    ({'model': 'bert'}, "model 'bert' is not .*allowed are gpt2, llama"),
    ({'pre': 'tekken'}, "pre 'tekken' .* qwen2, smollm, llama-bpe"),
    ({'pre': None}, 'pre None is not supported'),
    ({'tokens': None}, 'has no tokenizer.ggml.tokens'),
    ({'merges': None}, 'has no tokenizer.ggml.merges'),
    ({'merges': ['a b c']}, "two tokens each, got 'a b c'"),
    ({'merges': ['xx yy']}, 'do not fit the tokens'),
    ({'token_type': np.ones(3, np.int32)}, 'token_type must have 262 entr'),
    ({'eos_token_id': 999}, r'eos_token_id must be in 0\.\.261, got 999'),
    ({'bos_token_id': None, 'add_bos_token': True}, 'add_bos_token and'),
  )
  def test_refused(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      gguf_tokenizer.from_gguf(_byte_level_metadata(**changes))


class SentencePieceTest(parameterized.TestCase):
  def test_merges_follow_the_scores(self):
    metadata = _sentencepiece_metadata(add_space_prefix=False)
    tokenizer = gguf_tokenizer.from_gguf(metadata)
    rng = random.Random(0)
    for _ in range(300):
      text = ''.join(rng.choices('aabbcd ', k=rng.randint(1, 12)))
      if '   ' in text:
        continue
      ids = tokenizer.encode(text, add_special=False)
      self.assertEqual(
        [tokenizer.id_to_token(i) for i in ids],
        _sentencepiece_reference(text, metadata),
      )
      self.assertEqual(tokenizer.decode(ids), text)

  def test_space_prefix(self):
    # Files that do not say have it.
    tokenizer = gguf_tokenizer.from_gguf(_sentencepiece_metadata())
    ids = tokenizer.encode('d é', add_special=True)
    self.assertEqual(
      [tokenizer.id_to_token(i) for i in ids],
      ['<s>', _SPACE, 'd', _SPACE, '<0xC3>', '<0xA9>'],
    )
    self.assertEqual(tokenizer.decode(ids[1:], is_start=True), 'd é')
    self.assertEqual(tokenizer.decode(ids[1:]), ' d é')

  def test_runs_of_spaces_are_spelled_as_the_vocabulary_does(self):
    tokenizer = gguf_tokenizer.from_gguf(
      _sentencepiece_metadata(add_space_prefix=False)
    )
    ids = tokenizer.encode('d   d<b>', add_special=False)
    self.assertEqual(
      [tokenizer.id_to_token(i) for i in ids], ['d', _SPACE * 3, 'd', '<b>']
    )
    self.assertEqual(tokenizer.decode(ids), 'd   d<b>')

  def test_refused(self):
    with self.assertRaisesRegex(ValueError, 'scores must have .* got 0'):
      gguf_tokenizer.from_gguf(_sentencepiece_metadata(scores=None))


@functools.cache
def _real(name: str) -> tokenizers.LibraryTokenizer:
  path = _MODELS / f'{name}.gguf'
  if not path.exists():
    raise unittest.SkipTest(f'{path} is not there (set SPECJAX_MODELS)')
  return gguf_tokenizer.from_gguf(gguf.read_metadata(path))


class RealFileTest(parameterized.TestCase):
  # Ids as the published tokenizers of these models give them.
  @parameterized.parameters(
    (_SMOLLM, 'Hello, world!', [19556, 28, 905, 17]),
    (
      _SMOLLM,
      'def f(x):\n    return 12*x',
      [1604, 275, 24, 104, 727, 472, 1003, 216, 33, 34, 26, 104],
    ),
    (_SMOLLM, '日本 😀', [23274, 115, 40993, 40303, 218]),
    (_SMOLLM, '<|im_start|>user\n', [1, 4093, 198]),
    (_QWEN, 'Hello, world!', [9707, 11, 1879, 0]),
    (
      _QWEN,
      'def f(x):\n    return 12*x',
      [750, 282, 2075, 982, 262, 470, 220, 16, 17, 18481],
    ),
    (_QWEN, '日本 😀', [101059, 90316]),
    (_QWEN, "I'LL 3½", [40, 6, 4086, 220, 18, 26062]),
    (_QWEN, '<|im_start|>user\n', [151644, 872, 198]),
    (_GEMMA, 'Hello, world!', [2, 9259, 236764, 1902, 236888]),
    (_GEMMA, '日本 😀', [2, 10956, 163543]),
    (_GEMMA, 'a   b\n\n\nc', [2, 236746, 139, 236763, 109, 236755]),
    (_GEMMA, "I'LL 3½", [2, 236777, 236789, 2182, 236743, 236800, 238612]),
  )
  def test_known_encodings(self, name, text, expected):
    tokenizer = _real(name)
    ids = tokenizer.encode(text, add_special=True)
    self.assertEqual(ids, expected)
    self.assertEqual(
      tokenizer.decode(ids, skip_special=True),
      text.replace('<|im_start|>', ''),
    )

  @parameterized.parameters(_SMOLLM, _QWEN, _GEMMA)
  def test_round_trip(self, name):
    tokenizer = _real(name)
    rng = random.Random(0)
    alphabet = 'abe \n\t.1\u00e9\u4e2d\U0001f600_\u3042\u00a0\u200b\x00'
    for _ in range(200):
      text = ''.join(rng.choices(alphabet, k=rng.randint(0, 40)))
      ids = tokenizer.encode(text, add_special=False)
      self.assertEqual(tokenizer.decode(ids), text)
      self.assertEqual(
        b''.join(tokenizer.token_bytes(i) for i in ids), text.encode()
      )

  def test_sizes_and_ends(self):
    for name, vocab_size, stop_ids in (
      (_SMOLLM, 49152, (0, 2)),
      (_QWEN, 151665, (151643, 151645)),
      (_GEMMA, 262144, (1, 106)),
    ):
      tokenizer = _real(name)
      self.assertEqual(tokenizer.vocab_size, vocab_size)
      self.assertEqual(tokenizer.stop_ids, stop_ids)

  def test_same_and_other_vocabularies(self):
    tokenizers.check_same_vocabulary(_real(_QWEN), _real(_LARGE_QWEN))
    with self.assertRaisesRegex(ValueError, r"id 0 is '!' .* '<\|endoftext"):
      tokenizers.check_same_vocabulary(_real(_QWEN), _real(_SMOLLM))


if __name__ == '__main__':
  absltest.main()

"""Streaming text: half characters, stop strings, and where they cut."""

import random

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import detokenize, tokenizers


class PieceTokenizer:
  """Ids are the places of given byte strings; None is a special token."""

  def __init__(self, *pieces: bytes | None):
    self.pieces = pieces

  def token_bytes(self, token_id):
    return self.pieces[token_id] or b'<special>'

  def is_special(self, token_id):
    return self.pieces[token_id] is None


def _reference(pieces: list[bytes], stops: list[str]):
  """Grows the text token by token and looks at all of it each time."""
  for n in range(1, len(pieces) + 1):
    data = b''.join(pieces[:n])
    text = data.decode('utf-8', errors='ignore')
    ends = [
      (text.find(stop) + len(stop), -len(stop))
      for stop in stops
      if stop in text
    ]
    if ends:
      return n, text[: sum(min(ends))]
  return None


class StreamTest(parameterized.TestCase):
  def test_half_characters_are_withheld(self):
    stream = detokenize.StreamDecoder(
      PieceTokenizer(b'a\xf0\x9f', b'\x98', b'\x80b\xc3')
    )
    self.assertEqual(stream.push([0]), 'a')
    self.assertEqual(stream.push([1]), '')
    self.assertEqual(stream.push([2]), '😀b')
    self.assertEqual(stream.finish(), '\ufffd')

  def test_bytes_that_are_no_character_are_replaced(self):
    stream = detokenize.StreamDecoder(PieceTokenizer(b'\xff', b'a'))
    self.assertEqual(stream.push([0, 1]), '\ufffda')

  def test_stop_string_across_tokens(self):
    stream = detokenize.StreamDecoder(
      PieceTokenizer(b'one\n', b'\n', b'two'), ['\n\nt']
    )
    self.assertEqual(stream.push([0]), 'one')
    self.assertEqual(stream.push([1]), '')
    self.assertFalse(stream.is_stopped)
    self.assertEqual(stream.push([2, 2, 2]), '')
    self.assertTrue(stream.is_stopped)
    self.assertEqual(stream.num_tokens, 3)
    self.assertEqual(stream.push([0]), '')
    self.assertEqual(stream.finish(), '')

  def test_what_could_have_been_a_stop_string_comes_later(self):
    stream = detokenize.StreamDecoder(PieceTokenizer(b'ab', b'x'), ['abc'])
    self.assertEqual(stream.push([0]), '')
    self.assertEqual(stream.push([1]), 'abx')
    self.assertEqual(stream.push([0]), '')
    self.assertEqual(stream.finish(), 'ab')

  def test_withheld_end_overlaps_itself(self):
    stream = detokenize.StreamDecoder(tokenizers.ByteTokenizer(), ['aab'])
    self.assertEqual(stream.push(b'aaa'), 'a')
    self.assertEqual(stream.push(b'ab'), 'a')
    self.assertTrue(stream.is_stopped)

  @parameterized.parameters(
    # The first to complete wins; of two at one place, the longer.
    (b'xabcd', ('abcd', 'bc'), 4, 'xa'),
    (b'xabc', ('bc', 'abc'), 4, 'x'),
    (b'xabc', ('abc', 'bc'), 4, 'x'),
    (b'abab', ('bab', 'aba'), 3, ''),
  )
  def test_overlapping_stop_strings(self, data, stops, num_tokens, text):
    found = detokenize.find_stop(tokenizers.ByteTokenizer(), data, stops)
    self.assertEqual(found, (num_tokens, text))
    found = detokenize.find_stop(PieceTokenizer(data), [0], stops)
    self.assertEqual(found, (1, text))

  def test_stop_string_of_split_characters(self):
    tokenizer = PieceTokenizer(b'\xe6\x97', b'\xa5\xe6', b'\x9c\xac!')
    self.assertEqual(
      detokenize.find_stop(tokenizer, [0, 1, 2], ['本']), (3, '日')
    )

  def test_special_tokens_are_no_text(self):
    tokenizer = PieceTokenizer(b'a', None, b'b')
    stream = detokenize.StreamDecoder(tokenizer, ['<', 'abb'])
    self.assertEqual(stream.push([0, 1, 2]) + stream.finish(), 'ab')
    self.assertEqual(stream.num_tokens, 3)

  def test_no_stop(self):
    tokenizer = tokenizers.ByteTokenizer()
    self.assertIsNone(detokenize.find_stop(tokenizer, b'abc', ['d']))
    self.assertIsNone(detokenize.find_stop(tokenizer, b'abc', []))

  def test_empty_stop_string_is_refused(self):
    with self.assertRaisesRegex(ValueError, 'must not be empty'):
      detokenize.StreamDecoder(tokenizers.ByteTokenizer(), ['a', ''])

  def test_random_pieces_against_the_whole_text(self):
    rng = random.Random(0)
    num_stopped = 0
    for _ in range(500):
      data = ''.join(rng.choices('abé😀', k=12)).encode()
      cuts = sorted(rng.sample(range(1, len(data)), 4))
      pieces = [data[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)])]
      stops = [
        ''.join(rng.choices('abé😀', k=rng.randint(1, 3)))
        for _ in range(rng.randint(0, 2))
      ]
      tokenizer = PieceTokenizer(*pieces)
      expected = _reference(pieces, stops)
      found = detokenize.find_stop(tokenizer, range(len(pieces)), stops)
      self.assertEqual(found, expected)
      stream = detokenize.StreamDecoder(tokenizer, stops)
      parts = [stream.push([i]) for i in range(len(pieces))]
      text = ''.join(parts) + stream.finish()
      self.assertEqual(text, expected[1] if expected else data.decode())
      num_stopped += expected is not None
    self.assertBetween(num_stopped, 100, 450)


if __name__ == '__main__':
  absltest.main()

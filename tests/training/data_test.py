import json
import pathlib
import tempfile

import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.tokenizers import ByteTokenizer
from specjax.training import data
from tests.training import tiny

BYTES = ByteTokenizer()


class FilesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)

  def read(self, name: str, text: str | bytes):
    path = self.folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return list(data.read_documents([path], BYTES))

  def test_a_text(self):
    (document,) = self.read('a.py', 'hé')
    self.assertEqual(document.tokens.tolist(), [256, 104, 195, 169])
    self.assertTrue(document.mask.all())

  def test_lines_of_text_and_of_tokens(self):
    rows = [{'text': 'a'}, {'prompt_tokens': [256, 1], 'tokens': [2, 3, 4]}]
    lines = '\n\n'.join(map(json.dumps, rows))
    first, second = self.read('a.jsonl', lines)
    self.assertEqual(first.tokens.tolist(), [256, 97])
    self.assertEqual(second.tokens.tolist(), [256, 1, 2, 3, 4])
    self.assertEqual(second.mask.tolist(), [False] * 2 + [True] * 3)

  def test_only_a_newline_ends_a_row(self):
    text = 'a\u2028b\x0bc'
    line = json.dumps({'text': text}, ensure_ascii=False)
    (document,) = self.read('a.jsonl', f'{line}\n')
    self.assertEqual(document.tokens.tolist(), [256, *text.encode()])

  def test_a_result_of_generate(self):
    request = {'text': 'b', 'prompt_tokens': [256], 'tokens': [98, 256]}
    (document,) = self.read('a.json', json.dumps({'requests': [request]}))
    self.assertEqual(document.tokens.tolist(), [256, 98, 256])

  @parameterized.parameters(
    ('a.jsonl', '{"text": 1}', 'line 1, must have a text'),
    ('a.jsonl', '{"text": "a"}\n{', 'line 2, must be JSON'),
    (
      'a.jsonl',
      '{"prompt_tokens": [257], "tokens": []}',
      r'ids in 0\.\.256, got 257',
    ),
    ('a.json', '[]', 'list of requests'),
    ('a.py', b'a\xff', 'must be UTF-8, byte 1'),
  )
  def test_what_is_refused(self, name, text, message):
    with self.assertRaisesRegex(ValueError, message):
      self.read(name, text)


class PackedTest(absltest.TestCase):
  def test_an_epoch_has_every_place_once(self):
    document = data.Document(np.arange(101, dtype=np.int32), np.ones(101, bool))
    packed = data.pack([document], batch_size=3, length=11, seed=5)
    self.assertEqual(packed.num_rows, 9)
    for epoch in range(2):
      rows = np.concatenate(
        [packed.batch(3 * epoch + i)['tokens_BT'] for i in range(3)]
      )
      self.assertEqual(rows.shape, (9, 11))
      # Predicted tokens: consecutive numbers, each once, in another order.
      predicted = rows[:, 1:].ravel()
      start = predicted.min()
      self.assertEqual(sorted(predicted), list(range(start, start + 90)))
      self.assertNotEqual(predicted.tolist(), sorted(predicted))
    first, second = (packed.batch(i)['tokens_BT'].tolist() for i in (0, 3))
    self.assertNotEqual(first, second)

  def test_a_batch_follows_from_its_number_alone(self):
    one, other = tiny.packed(seed=3), tiny.packed(seed=3)
    forward = [one.batch(i) for i in range(12)]
    for i in reversed(range(12)):
      again = other.batch(i)
      for name, value in forward[i].items():
        np.testing.assert_array_equal(again[name], value)
    different = tiny.packed(seed=4).batch(0)['tokens_BT']
    self.assertNotEqual(different.tolist(), forward[0]['tokens_BT'].tolist())

  def test_the_digest_sees_tokens_and_mask(self):
    tokens = np.arange(9, dtype=np.int32)
    masks = np.ones(9, bool), np.arange(9) > 2
    digests = {
      data.pack([data.Document(t, m)], batch_size=1, length=4, seed=0).digest()
      for t in (tokens, tokens[::-1])
      for m in masks
    }
    self.assertLen(digests, 4)

  def test_a_text_that_just_fits(self):
    document = data.Document(np.arange(5, dtype=np.int32), np.ones(5, bool))
    packed = data.pack([document], batch_size=2, length=5, seed=0)
    self.assertEqual(
      packed.batch(7)['tokens_BT'].tolist(), [[0, 1, 2, 3, 4]] * 2
    )
    with self.assertRaisesRegex(ValueError, 'at least 6 tokens.* got 5'):
      data.pack([document], batch_size=2, length=6, seed=0)


if __name__ == '__main__':
  absltest.main()

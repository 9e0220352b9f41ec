"""Slates show what became of every piece, in words too."""

import html.parser

import numpy as np
from absl.testing import absltest

import tests.setup_jax  # noqa: F401
from specjax import ByteTokenizer, StepInfo, pictures
from specjax.pictures import slates


def step(draft, num_draft, num_accepted, tokens, num_emitted):
  """A `StepInfo` of the given rows."""
  return StepInfo(
    draft_BK=np.asarray(draft),
    num_draft_B=np.asarray(num_draft),
    num_accepted_B=np.asarray(num_accepted),
    tokens_BN=np.asarray(tokens),
    num_emitted_B=np.asarray(num_emitted),
  )


class _Words(html.parser.HTMLParser):
  """The words of a page, and whether its tags are closed in order."""

  def __init__(self):
    super().__init__()
    self.open, self.words = [], []

  def handle_starttag(self, tag, attrs):
    self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.words.append(data)


def words(page):
  parser = _Words()
  parser.feed(page)
  assert not parser.open
  return parser.words


class PiecesTest(absltest.TestCase):
  def test_the_first_draft_that_is_not_accepted_is_struck(self):
    info = step([[5, 6, 7, 8]], [4], [1], [[5, 9, 0, 0, 0]], [2])
    self.assertEqual(
      slates.pieces_of(info, 0),
      [
        ('accepted', 5),
        ('struck', 6),
        ('erased', 7),
        ('erased', 8),
        ('correction', 9),
      ],
    )

  def test_a_bonus_and_a_cut(self):
    whole = step([[5, 6]], [2], [2], [[5, 6, 7]], [3])
    self.assertEqual(slates.pieces_of(whole, 0)[-1], ('bonus', 7))
    # The limit has left no room for the bonus.
    cut = step([[5, 6]], [2], [2], [[5, 6, 7]], [2])
    self.assertEqual(
      slates.pieces_of(cut, 0), [('accepted', 5), ('accepted', 6)]
    )

  def test_every_kind_has_a_word_a_sign_and_a_border_of_its_own(self):
    kinds = slates.KINDS.values()
    self.assertLen({kind.word for kind in kinds}, 5)
    self.assertLen({kind.sign for kind in kinds}, 5)
    borders = {kind.css.split('border:')[1].split(';')[0] for kind in kinds}
    self.assertLen(borders, 5)


class PageTest(absltest.TestCase):
  def test_words_and_glosses(self):
    view = pictures.Slates(ByteTokenizer(), {'a': 'the first'})
    view(step([[97, 98]], [2], [1], [[97, 60, 0]], [2]))
    found = words(view._repr_html_())
    self.assertEqual(
      [word for word in found if word.strip()],
      [
        'step 0',
        'the first',
        'a',
        '✓ accept',
        'b',
        '✗ strike',
        '<',
        '✎ correct',
      ],
    )

  def test_rows_and_control_characters(self):
    view = pictures.Slates(ByteTokenizer())
    view(step([[10], [32]], [1, 1], [1, 1], [[10, 65], [32, 66]], [2, 2]))
    view(step([[67], [0]], [1, 0], [1, 0], [[67, 68], [0, 0]], [2, 0]))
    found = words(view._repr_html_())
    # A finished row has no second slate.
    names = [word for word in found if word.startswith('step')]
    self.assertEqual(names, ['step 0, row 0', 'step 0, row 1', 'step 1, row 0'])
    self.assertContainsSubset([r'\n', '\u2423'], found)


if __name__ == '__main__':
  absltest.main()

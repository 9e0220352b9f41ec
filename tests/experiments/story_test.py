"""The story's two slates come out of the real loop, and stand in the README."""

import contextlib
import io
import pathlib

from absl.testing import absltest

import tests.setup_jax  # noqa: F401
from experiments import script, story
from specjax import Nothing
from specjax.pictures import slates
from specjax.testing import exact, mutants

ROOT = pathlib.Path(__file__).resolve().parents[2]


class StoryTest(absltest.TestCase):
  def test_the_slates(self):
    steps = []
    (result,) = story.tell(steps.append)
    shown = [
      [
        (kind, story.TOKENIZER.pieces[token])
        for kind, token in slates.pieces_of(info, 0)
      ]
      for info in steps
    ]
    accepted = lambda *pieces: [('accepted', piece) for piece in pieces]
    self.assertEqual(
      shown,
      [
        accepted('帝国は', '北方に', '課税', 'する', 'であろう')
        + [('bonus', '。')],
        accepted('税率は', '年に')
        + [('struck', '五十')]
        + [('erased', piece) for piece in ('枚の', '金貨', 'とする')]
        + [('correction', '百')],
        accepted('枚の', '金貨', 'とする') + [('bonus', '。')],
      ],
    )
    (alone,) = story.tell(proposer=Nothing())
    self.assertEqual(alone.tokens, result.tokens)
    self.assertEqual(
      result.tokens, story.TOKENIZER.ids(story.EDICT), result.text
    )
    (lost,) = story.tell(target=mutants.RewindOffByOne(story.MODEL))
    self.assertNotEqual(lost.tokens, result.tokens)

  def test_the_laws_are_those_that_are_written_down(self):
    logits = exact.toy_logits(story.MODEL, story.pair()['target'])
    ids = story.TOKENIZER.ids((*story.PROMPT, *story.RATE))
    law = exact.reference_law(
      logits(exact.np.asarray([ids])),
      story.SamplingOptions(temperature=1.0),
      ids,
      exact.np.zeros((1, 0), int),
    )[0]
    for piece, p in story.RATE_LAWS[0].items():
      self.assertAlmostEqual(law[story.TOKENIZER.pieces.index(piece)], p, 5)

  def test_the_readme_shows_it(self):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      self.assertEqual(script.run_main(story.main, (), []), 0)
    readme = (ROOT / 'README.md').read_text(encoding='utf-8')
    self.assertIn(f'```text\n{out.getvalue()}```\n', readme)


if __name__ == '__main__':
  absltest.main()

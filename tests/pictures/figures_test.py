"""The figures show the data they are given, and not by colour alone."""

import importlib.util
import io
import warnings

import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import pictures
from specjax.pictures import style
from specjax.state import ACCEPTED, BONUS, CORRECTION


def setUpModule():
  if importlib.util.find_spec('matplotlib') is None:
    raise absltest.SkipTest('matplotlib is not installed')


def texts(axes):
  return [text.get_text() for text in axes.texts]


def draw(figure):
  """Renders it; a warning, as of a missing glyph, is an error."""
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    figure.savefig(io.BytesIO(), format='png')


class HeatMapTest(absltest.TestCase):
  def test_cells_and_bars_are_as_the_acceptance(self):
    acceptance = [1.0, 0.25, np.nan]
    figure = pictures.heat_map(
      ['ab', 'c', ' d'], acceptance, [ACCEPTED, CORRECTION, BONUS]
    )
    axes = figure.axes[0]
    sizes = [(p.get_width(), p.get_height()) for p in axes.patches]
    # A cell and a bar each, and no bar where nothing is known.
    self.assertLen(sizes, 5)
    np.testing.assert_allclose(sizes[1][0] / sizes[0][0], 1.0)
    np.testing.assert_allclose(sizes[3][0] / sizes[2][0], 0.25)
    light = [np.mean(p.get_facecolor()[:3]) for p in axes.patches]
    self.assertGreater(light[0], light[2])
    self.assertEqual(light[4], 1.0)
    self.assertContainsSubset(['ab', 'c', '\u2423d', 'x', '+'], texts(axes))
    draw(figure)

  def test_lines_break_at_newlines_and_at_the_edge(self):
    figure = pictures.heat_map(
      ['aaaa', 'bbbb', '\n', 'c'], [0.5] * 4, columns=10
    )
    cells = figure.axes[0].patches[::2]
    self.assertEqual([p.get_y() for p in cells], [0, 0, -1, -2])
    self.assertEqual([p.get_x() for p in cells[1:]], [4.4, 0, 0])
    self.assertIn(r'\n', texts(figure.axes[0]))

  def test_bad_input(self):
    with self.assertRaisesRegex(ValueError, 'got 2 tokens and shape [(]1,[)]'):
      pictures.heat_map(['a', 'b'], [0.5])
    with self.assertRaisesRegex(ValueError, 'one token or more, got 0 tokens'):
      pictures.heat_map([], [])
    with self.assertRaisesRegex(ValueError, 'must be in 0..1, got 0.5..1.5'):
      pictures.heat_map(['a', 'b'], [0.5, 1.5])


class GlyphsTest(parameterized.TestCase):
  def test_what_no_font_has_is_written_as_an_escape(self):
    fonts = ['DejaVu Sans Mono']
    self.assertEqual(style.spelled('a\t百', fonts), r'a\t\u767e')
    self.assertEqual(style.spelled('a b$', fonts), 'a\u2423b\\$')

  def test_japanese_is_drawn_one_way_or_the_other(self):
    shown = style.spelled('百', style.families())
    has_font = len(style.families()) > 1
    self.assertEqual(shown, '百' if has_font else r'\u767e')
    draw(pictures.heat_map(['百', '枚の', 'x\x00'], [0.1, 0.9, 1.0]))
    draw(pictures.laws([0.5, 0.5], [1.0, 0.0], ['百', '五十']))


class LawsTest(absltest.TestCase):
  P, Q = [0.7, 0.2, 0.1], [0.3, 0.6, 0.1]

  def heights(self, figure):
    """Of the bars by their legend: shared, p above, q above, residual."""
    found = {}
    for bars in figure.axes[0].containers:
      found.setdefault(bars.get_label(), []).append(
        [bar.get_height() for bar in bars]
      )
    return found

  def test_bars_are_shared_and_excess_and_residual(self):
    figure = pictures.laws(self.P, self.Q, ['a', 'b', 'c'])
    found = self.heights(figure)
    shared = [0.3, 0.2, 0.1]
    np.testing.assert_allclose(found['min(p, q): accepted'], [shared])
    np.testing.assert_allclose(
      found['p above q: the residual'], [[0.4, 0, 0]], atol=1e-9
    )
    np.testing.assert_allclose(
      found['q above p: rejected'], [[0, 0.4, 0]], atol=1e-9
    )
    np.testing.assert_allclose(
      found['residual, normalised'], [[1, 0, 0]], atol=1e-9
    )
    hatches = {bars[0].get_hatch() for bars in figure.axes[0].containers}
    self.assertEqual(hatches, {None, '//', 'xx', '..'})
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    self.assertEqual(labels, ['a', 'b', 'c'])
    draw(figure)

  def test_equal_laws_leave_p(self):
    found = self.heights(pictures.laws(self.P, self.P, ['a', 'b', 'c']))
    np.testing.assert_allclose(found['residual, normalised'], [self.P])

  def test_bad_input(self):
    with self.assertRaisesRegex(ValueError, 'must have the same length'):
      pictures.laws(self.P, self.Q, ['a', 'b'])


class TimelineTest(absltest.TestCase):
  def test_drafts_then_a_verification_then_tokens(self):
    figure = pictures.timeline([2, 1], [2, 0], [3, 1], draft_cost=0.5)
    axes = figure.axes[0]
    spans = {}
    for bars in axes.collections:
      boxes = [path.get_extents() for path in bars.get_paths()]
      spans[bars.get_label()] = [(box.x0, box.x1) for box in boxes]
    self.assertEqual(spans['draft'], [(0, 0.5), (0.5, 1), (2, 2.5)])
    self.assertEqual(spans['verify'], [(1, 2), (2.5, 3.5)])
    (plain,) = [v for k, v in spans.items() if k.startswith('_')]
    self.assertEqual(plain, [(0, 1), (1, 2), (2, 3), (3, 4)])
    marks = {line.get_label(): line for line in axes.get_lines()}
    self.assertEqual(list(marks['accepted'].get_xdata()), [2, 2])
    self.assertEqual(list(marks['rejected'].get_xdata()), [3.5])
    self.assertEqual(list(marks["target's own"].get_xdata()), [2, 3.5])
    self.assertLen({line.get_marker() for line in marks.values()}, 3)
    self.assertIn('4 tokens: 3.5 instead of 4 passes of time', texts(axes))
    draw(figure)

  def test_bad_input(self):
    with self.assertRaisesRegex(ValueError, 'the same number of entries'):
      pictures.timeline([1], [1, 1], [2, 2], draft_cost=0.1)
    with self.assertRaisesRegex(ValueError, 'must be >= 0 and .* got -1 and 1'):
      pictures.timeline([1], [1], [2], draft_cost=-1)


class CurvesTest(absltest.TestCase):
  def test_every_curve_has_a_look_of_its_own(self):
    series = {str(i): ([1, 2], [i, i + 1]) for i in range(7)}
    figure = pictures.curves(series, title='t', x='a', y='b', xscale='log')
    lines = figure.axes[0].get_lines()
    self.assertEqual(
      [list(line.get_ydata()) for line in lines],
      [[i, i + 1] for i in range(7)],
    )
    looks = {(line.get_marker(), str(line.get_linestyle())) for line in lines}
    self.assertLen(looks, 7)
    self.assertEqual(figure.axes[0].get_xscale(), 'log')
    self.assertStartsWith(figure._repr_png_().decode('latin1'), '\x89PNG')


if __name__ == '__main__':
  absltest.main()

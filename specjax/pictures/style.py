"""One look for all figures: readable in print and without colours."""

import functools
import io
from collections.abc import Mapping, Sequence
from typing import Any

# Of matplotlib, which is imported where it is used.
Figure, Axes = Any, Any

# Okabe and Ito's colours, which differ for every kind of colour vision.
BLUE, VERMILION, GREEN = '#0072B2', '#D55E00', '#009E73'
PURPLE, BLACK, ORANGE, SKY = '#CC79A7', '#000000', '#E69F00', '#56B4E9'

# For lines: a marker and a dash pattern each.
STYLES = tuple(
  {'color': color, 'marker': marker, 'linestyle': line}
  for color, marker, line in (
    (BLUE, 'o', '-'),
    (VERMILION, 's', '--'),
    (GREEN, '^', '-.'),
    (PURPLE, 'D', ':'),
    (BLACK, 'v', (0, (5, 1, 1, 1, 1, 1))),
    (ORANGE, 'P', (0, (1, 1))),
    (SKY, 'X', (0, (8, 2))),
  )
)

# Families that have Chinese characters and kana, where somebody installed one.
_CJK = (
  'Noto Sans CJK JP',
  'Noto Sans JP',
  'IPAGothic',
  'IPAexGothic',
  'Hiragino Sans',
  'Yu Gothic',
  'MS Gothic',
)


def figure(
  title: str = '',
  x: str = '',
  y: str = '',
  *,
  size: tuple[float, float] = (6.4, 4.2),
) -> tuple[Figure, Axes]:
  """A figure with one pair of axes, and a light grid behind what is drawn."""
  # Not through pyplot: no window, nothing global, nothing to close.
  drawn = _figure_class()(figsize=size, layout='constrained')
  axes = drawn.add_subplot()
  axes.set(title=title, xlabel=x, ylabel=y)
  axes.grid(color='0.85', linewidth=0.6)
  axes.set_axisbelow(True)
  return drawn, axes


@functools.cache
def _figure_class() -> type:
  """matplotlib's figure, which notebooks show without pyplot's help."""
  from matplotlib.figure import Figure

  class Shown(Figure):
    def _repr_png_(self) -> bytes:
      image = io.BytesIO()
      self.savefig(image, format='png', dpi=110)
      return image.getvalue()

  return Shown


def legend(axes: Axes, **place):
  """A legend, if anything has a label."""
  if axes.get_legend_handles_labels()[0]:
    axes.legend(fontsize='small', **place)


def curves(
  series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
  *,
  title: str,
  x: str,
  y: str,
  **axes_settings,
) -> Figure:
  """Curves by name, each with a marker and a dash pattern of its own.

  Args:
    series: x and y of each curve, by its label.
    title: of the figure.
    x: what is on the x axis.
    y: what is on the y axis.
    axes_settings: for `Axes.set`, as xscale='log'.
  """
  drawn, axes = figure(title, x, y)
  for i, (label, points) in enumerate(series.items()):
    axes.plot(*points, label=label, **STYLES[i % len(STYLES)])
  axes.set(**axes_settings)
  legend(axes)
  return drawn


def families(family: str = 'DejaVu Sans') -> list[str]:
  """The family, and those behind it that draw what it cannot.

  Naming a family that is not there would make matplotlib warn.
  """
  from matplotlib import font_manager

  found = set(font_manager.get_font_names())
  return [family, *(name for name in _CJK if name in found)]


def spelled(text: str, families: Sequence[str]) -> str:
  r"""The text as the fonts can draw it.

  Control characters, and what no family has a glyph for, are written as escapes
  (`\n`, `\u767e`), never as empty boxes. A space is an open box, or nobody
  would see it.
  """
  from matplotlib import font_manager

  fonts = [
    font_manager.get_font(font_manager.findfont(family)) for family in families
  ]

  def spell(char: str) -> str:
    if char == ' ':
      return '\u2423'
    is_drawn = any(font.get_char_index(ord(char)) for font in fonts)
    if is_drawn and char.isprintable():
      # A lone dollar sign would begin a formula.
      return r'\$' if char == '$' else char
    return char.encode('unicode_escape').decode('ascii')

  return ''.join(map(spell, text))

"""How probably a draft is accepted, word for word along a text."""

from collections.abc import Sequence

import numpy as np

from specjax.pictures import style
from specjax.state import ACCEPTED, BONUS, CORRECTION

# What a token is told apart by beside its bar.
MARKS = {ACCEPTED: '', CORRECTION: 'x', BONUS: '+'}
_LINES_PER_INCH = 2.2


def heat_map(
  pieces: Sequence[str],
  acceptance: Sequence[float],
  sources: Sequence[int] | None = None,
  *,
  columns: int = 64,
  title: str = 'Acceptance along the text',
) -> style.Figure:
  """A text whose tokens lie on cells as light as they are easy to guess.

  Below each token stands a bar, full for acceptance 1, so the figure reads in
  print too. Colours are cividis, whose lightness grows with the value.

  Args:
    pieces: text of each token.
    acceptance: float [P], in 0..1, the probability that a draft is accepted at
      each token, sum min(p, q); NaN where it is not known.
    sources: int [P], as `DecodeState.source_BL`: corrections are marked with a
      cross and bonuses with a plus. None: no marks.
    columns: characters in a line.
    title: of the figure.

  Raises:
    ValueError: there is no token, the lengths differ, or an acceptance is
      outside 0..1.
  """
  acceptance = np.asarray(acceptance, np.float64)
  if not len(pieces) or acceptance.shape != (len(pieces),):
    raise ValueError(
      'a heat map needs one acceptance for each of one token or more, got '
      f'{len(pieces)} tokens and shape {acceptance.shape}.'
    )
  if np.any((acceptance < 0) | (acceptance > 1 + 1e-5)):
    raise ValueError(
      f'acceptance must be in 0..1, got {np.nanmin(acceptance)}..'
      f'{np.nanmax(acceptance)}.'
    )
  from matplotlib import colormaps
  from matplotlib.cm import ScalarMappable
  from matplotlib.patches import Rectangle

  fonts = style.families('DejaVu Sans Mono')
  shown = [style.spelled(piece, fonts) for piece in pieces]
  places, num_lines = _places(pieces, shown, columns)
  width = max(x + w for x, _, w in places)
  figure, axes = style.figure(
    title, size=(max(width, 40) / 8, 1.4 + num_lines / _LINES_PER_INCH)
  )
  colours = colormaps['cividis']
  for i, (x, line, w) in enumerate(places):
    known = not np.isnan(acceptance[i])
    face = colours(acceptance[i]) if known else 'white'
    axes.add_patch(
      Rectangle((x, -line), w, 0.6, facecolor=face, edgecolor='white')
    )
    if known:
      axes.add_patch(
        Rectangle(
          (x, -line - 0.16), w * acceptance[i], 0.1, facecolor=style.BLACK
        )
      )
    is_dark = known and acceptance[i] < 0.5
    text = {'ha': 'center', 'va': 'center', 'family': fonts}
    axes.text(
      x + w / 2,
      -line + 0.3,
      shown[i],
      color='white' if is_dark else 'black',
      fontsize=9,
      **text,
    )
    mark = MARKS.get(sources[i], '') if sources is not None else ''
    if mark:
      axes.text(x + w / 2, -line + 0.7, mark, fontsize=7, **text)
  axes.set(xlim=(0, width), ylim=(-num_lines + 0.6, 0.95))
  axes.set_axis_off()
  figure.colorbar(
    ScalarMappable(cmap=colours),
    ax=axes,
    label='sum min(p, q)',
    fraction=0.03,
    pad=0.01,
  )
  if sources is not None:
    axes.annotate(
      'x correction, + bonus; the rest are accepted drafts; bars: acceptance',
      (0, 0),
      xycoords='axes fraction',
      xytext=(0, -8),
      textcoords='offset points',
      va='top',
      fontsize=7,
    )
  return figure


def _places(
  pieces: Sequence[str], shown: Sequence[str], columns: int
) -> tuple[list[tuple[float, int, float]], int]:
  """x, line and width of every token in characters, and how many lines."""
  places, x, line = [], 0.0, 0
  for piece, text in zip(pieces, shown):
    # A character of East Asia is as wide as two.
    plain = text.replace(r'\$', '$')
    w = sum(2 if ord(char) > 0x2E7F else 1 for char in plain) + 0.4
    if x and x + w > columns:
      x, line = 0.0, line + 1
    places.append((x, line, w))
    x += w
    if '\n' in piece:
      x, line = 0.0, line + 1
  return places, places[-1][1] + 1

"""Steps as slates, in HTML: what was accepted, struck, erased and written.

HTML and not a figure, because a browser has a font for every script. Each piece
carries a sign and a word below, so nothing is told by colour alone. Styles
stand in the elements: notebooks may drop style sheets.
"""

import html
from collections.abc import Mapping
from typing import NamedTuple

from specjax.state import StepInfo
from specjax.tokenizers import Tokenizer


class Kind(NamedTuple):
  """How a piece is shown.

  Attributes:
    sign: of one character.
    word: what became of it.
    css: of the piece.
  """

  sign: str
  word: str
  css: str


KINDS = {
  'accepted': Kind(
    '\u2713', 'accept', 'background:#d8f0e6;border:2px solid #009e73;'
  ),
  # A level line would pass for a stroke of the character.
  'struck': Kind(
    '\u2717',
    'strike',
    'background:linear-gradient(to top right,#0000 46%,#d55e00 46%,#d55e00 '
    '54%,#0000 54%),#fbe0d0;border:2px solid #d55e00;',
  ),
  'erased': Kind(
    '\u00b7', 'erase', 'background:#fff;border:2px dotted #999;color:#767676;'
  ),
  'correction': Kind(
    '\u270e',
    'correct',
    'background:#dcecf8;border:3px double #0072b2;font-weight:bold;',
  ),
  'bonus': Kind(
    '+', 'bonus', 'background:#fff;border:2px dashed #0072b2;font-weight:bold;'
  ),
}


def pieces_of(info: StepInfo, row: int) -> list[tuple[str, int]]:
  """A row's step as (key of `KINDS`, id), in the order in which they stand.

  The first draft that was not accepted is struck; those behind it were made
  behind a word that is not there, and are erased unjudged.
  """
  accepted, drafted, emitted = (
    int(counts[row])
    for counts in (info.num_accepted_B, info.num_draft_B, info.num_emitted_B)
  )
  draft = [int(i) for i in info.draft_BK[row]]
  own = [int(i) for i in info.tokens_BN[row, accepted:emitted]]
  return [
    *(('accepted', i) for i in draft[:accepted]),
    *(('struck', i) for i in draft[accepted:drafted][:1]),
    *(('erased', i) for i in draft[accepted:drafted][1:]),
    *(('correction' if accepted < drafted else 'bonus', i) for i in own),
  ]


class Slates:
  """Collects steps and shows them; pass it to `generate` as `on_step`.

  In a notebook it is shown as the last value of a cell.
  """

  def __init__(self, tokenizer: Tokenizer, glosses: Mapping[str, str] = {}):
    """Steps of one batch.

    Args:
      tokenizer: of the target.
      glosses: a translation that stands above a piece, by its text.
    """
    self._tokenizer, self._glosses = tokenizer, dict(glosses)
    self._slates: list[tuple[int, int, list[tuple[str, int]]]] = []
    self._step = 0

  def __call__(self, info: StepInfo):
    """Keeps a step; rows that emit nothing are left out."""
    for row in range(len(info.num_emitted_B)):
      if info.num_emitted_B[row]:
        self._slates.append((self._step, row, pieces_of(info, row)))
    self._step += 1

  def _repr_html_(self) -> str:
    has_rows = any(row for _, row, _ in self._slates)
    lines = []
    for step, row, pieces in self._slates:
      name = f'step {step}' + (f', row {row}' if has_rows else '')
      shown = ''.join(self._piece(kind, token) for kind, token in pieces)
      lines.append(
        '<div style="margin:10px 0;white-space:nowrap">'
        '<span style="display:inline-block;min-width:4.5em;color:#555">'
        f'{name}</span>{shown}</div>'
      )
    return (
      '<div style="background:#fff;color:#111;padding:6px 12px;'
      'overflow-x:auto;font-family:sans-serif">' + ''.join(lines) + '</div>'
    )

  def _piece(self, kind: str, token: int) -> str:
    sign, word, css = KINDS[kind]
    text = self._tokenizer.decode([token])
    gloss = self._glosses.get(text, '')
    small = 'display:block;font-size:11px;line-height:1.5;color:#444'
    above = f'<span style="{small}">{html.escape(gloss)}</span>'
    return (
      '<span style="display:inline-block;text-align:center;margin:0 3px">'
      f'{above if self._glosses else ""}'
      '<span style="display:inline-block;padding:3px 8px;box-sizing:border-box;'
      'height:38px;border-radius:4px;'
      f'font-size:20px;white-space:pre;{css}">{html.escape(_spell(text))}'
      f'</span><span style="{small}">{sign} {word}</span></span>'
    )


def _spell(text: str) -> str:
  """The text with a space and control characters made visible."""
  return ''.join(
    '\u2423'
    if char == ' '
    else char
    if char.isprintable()
    else repr(char)[1:-1]
    for char in text
  )

"""Shows a run as it happens: a line per step, in colour or in plain marks.

terminal   accepted green, rejected red and struck, the target's own bold
elsewhere  accepted as they are, {-rejected-}, {+correction+} or {*bonus*}
"""

from typing import TextIO

from specjax.state import StepInfo
from specjax.tokenizers import Tokenizer

_COLOURS = {
  'accepted': ('\x1b[32m', '\x1b[0m'),
  'rejected': ('\x1b[31;9m', '\x1b[0m'),
  'correction': ('\x1b[1;33m', '\x1b[0m'),
  'bonus': ('\x1b[1;36m', '\x1b[0m'),
}
_MARKS = {
  'accepted': ('', ''),
  'rejected': ('{-', '-}'),
  'correction': ('{+', '+}'),
  'bonus': ('{*', '*}'),
}


class Trace:
  """Prints every step of every row it is handed; pass it as `on_step`."""

  def __init__(
    self,
    tokenizer: Tokenizer,
    stream: TextIO,
    is_coloured: bool,
    num_rows: int,
  ):
    self._tokenizer = tokenizer
    self._stream = stream
    self._styles = _COLOURS if is_coloured else _MARKS
    self._num_rows = num_rows
    self._step = 0

  def legend(self) -> str:
    return ', '.join(self._style(name, name) for name in _MARKS)

  def __call__(self, info: StepInfo):
    for row in range(len(info.num_emitted_B)):
      if info.num_emitted_B[row]:
        prefix = f'{self._step:4d} '
        if self._num_rows > 1:
          prefix += f'row {row} '
        self._stream.write(f'{prefix}| {self._line(info, row)}\n')
    self._stream.flush()
    self._step += 1

  def _line(self, info: StepInfo, row: int) -> str:
    accepted, drafted, emitted = (
      int(counts[row])
      for counts in (info.num_accepted_B, info.num_draft_B, info.num_emitted_B)
    )
    draft = info.draft_BK[row].tolist()
    own = 'correction' if accepted < drafted else 'bonus'
    parts = [
      ('accepted', draft[:accepted]),
      ('rejected', draft[accepted:drafted]),
      (own, info.tokens_BN[row, accepted:emitted].tolist()),
    ]
    return ''.join(
      self._style(name, self._text(ids)) for name, ids in parts if ids
    )

  def _text(self, ids: list[int]) -> str:
    """The text with control characters spelled out: a step is one line."""
    text = self._tokenizer.decode(ids)
    return ''.join(
      char if char.isprintable() else repr(char)[1:-1] for char in text
    )

  def _style(self, name: str, text: str) -> str:
    before, after = self._styles[name]
    return f'{before}{text}{after}'

"""Text of a growing list of ids, and where a stop string ends it."""

import codecs
from typing import Sequence

from specjax import tokenizers


class StreamDecoder:
  """Turns generated ids into text as they come, never taking any back.

  Withheld are the bytes of an unfinished character and any suffix that could
  begin a stop string. Special tokens are no text. A stop string that completes
  first ends the text before it (of two that complete at one character, the
  longer), so the text does not depend on how ids fall into calls.

  Attributes:
    num_tokens: ids taken so far; the last is the one that completed a stop
      string, if `is_stopped`.
    is_stopped: whether a stop string completed; further ids are ignored.

  >>> stream = StreamDecoder(tokenizers.ByteTokenizer(), ['END'])
  >>> stream.push(b'grEEN'), stream.push(b'D'), stream.num_tokens
  ('grE', '', 6)
  >>> stream.is_stopped
  True
  """

  def __init__(
    self, tokenizer: tokenizers.Tokenizer, stop_strings: Sequence[str] = ()
  ):
    if '' in stop_strings:
      raise ValueError('stop strings must not be empty.')
    self.num_tokens = 0
    self.is_stopped = False
    self._tokenizer = tokenizer
    self._stop_strings = tuple(stop_strings)
    self._utf8 = codecs.getincrementaldecoder('utf-8')(errors='replace')
    self._withheld = ''

  def push(self, ids: Sequence[int]) -> str:
    """Takes more ids and returns the text that is now certain."""
    out = ''
    for token_id in ids:
      if self.is_stopped:
        break
      token_id = int(token_id)
      self.num_tokens += 1
      if not self._tokenizer.is_special(token_id):
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        out += self._take(text)
    return out

  def finish(self) -> str:
    """What is still withheld, once no more ids will come."""
    if self.is_stopped:
      return ''
    out = self._take(self._utf8.decode(b'', final=True))
    out, self._withheld = out + self._withheld, ''
    return out

  def _take(self, text: str) -> str:
    text = self._withheld + text
    ends = [
      (text.find(stop) + len(stop), -len(stop))
      for stop in self._stop_strings
      if stop in text
    ]
    if ends:
      end, minus_length = min(ends)
      self.is_stopped = True
      self._withheld = ''
      return text[: end + minus_length]
    keep = max((_overlap(text, stop) for stop in self._stop_strings), default=0)
    self._withheld = text[len(text) - keep :]
    return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
  """Length of the longest end of `text` that begins `stop`."""
  return next(
    n
    for n in range(min(len(text), len(stop) - 1), -1, -1)
    if text.endswith(stop[:n])
  )


def find_stop(
  tokenizer: tokenizers.Tokenizer,
  ids: Sequence[int],
  stop_strings: Sequence[str],
) -> tuple[int, str] | None:
  """Where a stop string cuts a list of ids.

  Args:
    tokenizer: of the ids.
    ids: generated ids.
    stop_strings: none empty.

  Returns:
    How many ids to keep, the last of them the one that completed the stop
    string, and the text before it; None if no stop string completes.

  >>> find_stop(tokenizers.ByteTokenizer(), b'one. two.', ['. t'])
  (6, 'one')
  """
  stream = StreamDecoder(tokenizer, stop_strings)
  text = stream.push(ids)
  return (stream.num_tokens, text) if stream.is_stopped else None

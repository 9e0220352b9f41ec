"""What is going on, on stderr."""

import sys
import threading
import time
from typing import TextIO


class Progress:
  """Says on stderr what is going on, and for how long.

  On a terminal, one line that is rewritten as time passes; elsewhere plain
  lines: nothing for work that takes less than a second, then a line when it
  starts to last, one every ten seconds, and one at the end.

  with Progress('loading target') as progress:
    progress.update('12 of 28 layers')

  Attributes:
    is_silent: of several processes, all but the first.
  """

  is_silent = False

  def __init__(self, what: str, stream: TextIO | None = None):
    self._what = what
    self._detail = ''
    self._stream = sys.stderr if stream is None else stream
    self._is_terminal = self._stream.isatty()
    self._width = 0
    self._has_spoken = False
    self._stop = threading.Event()
    # A thread, because loading and compiling hold the main one for seconds.
    self._thread = threading.Thread(target=self._tick, daemon=True)

  def update(self, detail: str):
    """Changes what stands behind the name, such as '3 of 12'."""
    self._detail = detail

  def __enter__(self) -> 'Progress':
    self._start = time.monotonic()
    if not self.is_silent:
      self._thread.start()
    return self

  def __exit__(self, *exc_info):
    if self.is_silent:
      return
    self._stop.set()
    self._thread.join()
    if self._is_terminal:
      self._show(end='\n')
    elif self._has_spoken:
      self._show()

  def _tick(self):
    pause = 0.2 if self._is_terminal else 1.0
    while not self._stop.wait(pause):
      self._has_spoken = True
      self._show()
      pause = 0.2 if self._is_terminal else 10.0

  def _show(self, end: str = ''):
    seconds = time.monotonic() - self._start
    text = f'{self._what} {self._detail}'.strip() + f' ... {seconds:.1f} s'
    if self._is_terminal:
      # Spaces wipe what a longer text before this one has left.
      self._stream.write('\r' + text.ljust(self._width) + end)
      self._width = len(text)
    else:
      self._stream.write(text + '\n')
    self._stream.flush()

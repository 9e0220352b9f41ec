"""What is said while something takes long."""

import io
import time

from absl.testing import absltest

import tests.setup_jax  # noqa: F401
from experiments.progress import Progress


class Terminal(io.StringIO):
  def isatty(self):
    return True


class ProgressTest(absltest.TestCase):
  def test_on_a_terminal_one_line_is_rewritten(self):
    stream = Terminal()
    with Progress('loading', stream) as progress:
      progress.update('12 of 28')
      time.sleep(0.3)
      progress.update('')
    text = stream.getvalue()
    self.assertRegex(text, r'^\rloading 12 of 28 \.\.\. 0\.\d s\r')
    self.assertRegex(text, r'\rloading \.\.\. 0\.\d s {9}\n$')

  def test_elsewhere_short_work_is_silent(self):
    stream = io.StringIO()
    with Progress('loading', stream):
      time.sleep(0.05)
    self.assertEqual(stream.getvalue(), '')

  def test_elsewhere_long_work_is_plain_lines(self):
    stream = io.StringIO()
    with Progress('loading', stream):
      time.sleep(1.2)
    self.assertRegex(
      stream.getvalue(), r'^loading \.\.\. 1\.\d s\nloading \.\.\. 1\.\d s\n$'
    )


if __name__ == '__main__':
  absltest.main()

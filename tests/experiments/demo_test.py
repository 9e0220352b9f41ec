"""The demo shows what it says, and fails if a text differs."""

import contextlib
import io
import re
from unittest import mock

from absl.testing import absltest

import tests.setup_jax  # noqa: F401
from experiments import common, demo, generate


def run():
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    code = common.run_main(demo.main, (), [])
  return code, out.getvalue()


class DemoTest(absltest.TestCase):
  def test_the_demo(self):
    code, out = run()
    self.assertEqual(code, 0, out)
    self.assertIn('def enterabs(self, time', out)
    self.assertGreaterEqual(len(re.findall(r'(?m)^ *\d+ \| ', out)), 5)
    rows = re.findall(
      r'(?m)^(greedy|sampled) +(plain|speculative) +\d+ +(\d+) +([\d.]+)'
      r' *(\w*)$',
      out,
    )
    self.assertLen(rows, 4)
    for name, how, steps, per_step, same in rows:
      with self.subTest(f'{name} {how}'):
        self.assertEqual(same, 'yes' if how == 'speculative' else '')
        self.assertEqual(float(per_step) > 1, how == 'speculative')
        self.assertGreater(int(steps), 0)
    self.assertIn('(CPU)', out)

  def test_another_text_is_told_and_fails(self):
    def report(config, out=None):
      tokens = [1, 2, 3 if config.proposer == 'none' else 4]
      figures = {
        'tokens_per_second': 1.0,
        'num_steps': 3,
        'block_efficiency': 1.0,
      }
      request = {'tokens': tokens, 'prompt': 'a', 'text': 'b'}
      return {'requests': [request], 'aggregate': figures}

    with mock.patch.object(generate, 'generate', report):
      code, out = run()
    self.assertEqual(code, 1)
    self.assertLen(re.findall(r'NO$', out, re.M), 2)


if __name__ == '__main__':
  absltest.main()

"""The demo shows what it says, and fails if a text differs."""

import contextlib
import io
import re
from unittest import mock

from absl.testing import absltest

import tests.setup_jax  # noqa: F401
from experiments import demo, generate, script


def run(*flags):
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    code = script.run_main(demo.main, demo.FLAG_GROUPS, list(flags))
  return code, out.getvalue(), err.getvalue()


class DemoTest(absltest.TestCase):
  def test_the_demo(self):
    code, out, _ = run()
    self.assertEqual(code, 0, out)
    self.assertIn('def enterabs(self, time', out)
    self.assertGreaterEqual(len(re.findall(r'(?m)^ *\d+ \| ', out)), 5)
    rows = re.findall(
      r'(?m)^(greedy|sampled) +(plain|draft|medusa|mtp) +\d+ +(\d+) +([\d.]+)'
      r' *(\w*)$',
      out,
    )
    self.assertLen(rows, 8)
    for name, how, steps, per_step, same in rows:
      with self.subTest(f'{name} {how}'):
        self.assertEqual(same, '' if how == 'plain' else 'yes')
        self.assertEqual(float(per_step) > 1, how != 'plain')
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
      code, out, _ = run()
    self.assertEqual(code, 1)
    self.assertLen(re.findall(r'NO$', out, re.M), 6)

  def test_a_head_is_named_with_its_kind(self):
    code, out, err = run('--head=hydra:folder')
    self.assertEqual((code, out), (2, ''))
    self.assertIn("KIND of medusa, mtp, eagle, got 'hydra:folder'", err)


if __name__ == '__main__':
  absltest.main()

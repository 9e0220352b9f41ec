"""The device check, end to end on the CPU, and what it does when time is up."""

import contextlib
import io
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import device_check, device_parts, script, step_costs


def run(*argv: str) -> tuple[int, str, str, dict | None]:
  """Exit code, stdout, stderr, and what --json_out holds."""
  out, err = io.StringIO(), io.StringIO()
  with (
    tempfile.TemporaryDirectory() as folder,
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
  ):
    path = pathlib.Path(folder, 'device.json')
    code = script.run_main(
      device_check.main,
      device_check.FLAG_GROUPS,
      [f'--json_out={path}', *argv],
    )
    report = json.loads(path.read_text()) if path.exists() else None
  return code, out.getvalue(), err.getvalue(), report


class DeviceCheckTest(parameterized.TestCase):
  def test_the_smallest_check_runs_all_parts(self):
    code, out, err, report = run('--smallest', '--minutes=60')
    self.assertEqual(code, 0, err)
    self.assertEqual(set(report['parts']), set(device_check.PARTS))
    for name, part in report['parts'].items():
      with self.subTest(name):
        self.assertNotEmpty(part['rows'])
        self.assertEqual((part['left_out'], part['errors']), ([], []))
        self.assertGreater(part['seconds'], 0)
        self.assertIn(f'## {name} (', out)
    self.assertIs(report['passed'], True)
    self.assertIn('PASSED', out)
    self.assertEqual(report['environment']['platform'], 'cpu')
    self.assertLen(report['environment']['devices'], 8)

    draft, one_row = report['parts']['exactness']['rows']
    self.assertTrue(draft['same_width'] and draft['equal'])
    self.assertFalse(one_row['same_width'])
    # Text of four rows in which drafts were kept and drafts were struck.
    self.assertEqual(draft['num_emitted'], 4 * 40)
    self.assertBetween(draft['num_accepted'], 20, 4 * 40 - 20)
    cells = [(r['model'], r['rows']) for r in report['parts']['steps']['rows']]
    self.assertEqual(cells, [('target', 1), ('target', 6), ('draft', 1)])
    plain, drafted = report['parts']['generate']['rows']
    self.assertEqual((plain['block_efficiency'], plain['speedup']), (1.0, 1.0))
    self.assertGreater(drafted['block_efficiency'], 1.5)
    self.assertGreater(drafted['predicted_speedup'], 0)

  def test_what_did_not_fit_is_listed(self):
    code, out, _, report = run('--minutes=1e-9', '--parts=steps,generate')
    self.assertEqual(code, 0)
    self.assertIsNone(report['passed'])
    parts = report['parts']
    self.assertEqual(
      parts['exactness']['left_out'],
      ['bfloat16 (not asked for)', 'float32 (not asked for)'],
    )
    self.assertLen(parts['certify']['left_out'], 1)
    self.assertLen(parts['generate']['left_out'], 2 * 2)
    self.assertLen(parts['steps']['left_out'], 2 * 2 * 7)
    for line in parts['steps']['left_out']:
      self.assertRegex(line, r'^(target|draft), .*, rows \d+ \(no time\)$')
      self.assertIn(line, out)
    self.assertIn('Nothing was checked', out)

  def test_a_part_that_breaks_down_loses_no_other(self):
    cost = [{'model': 'target', 'dtype': 'x', 'batch': 1, 'rows': 1}]
    cost[0]['median'] = 1.5
    with (
      mock.patch.object(device_parts, 'check_exactness', return_value=[]),
      mock.patch.object(
        device_parts, 'certify', side_effect=NotImplementedError('no such dot')
      ),
      mock.patch.object(device_parts, 'measure_step', return_value=cost),
    ):
      code, out, _, report = run(
        '--smallest', '--parts=exactness,certify,steps'
      )
    self.assertEqual(code, 1)
    self.assertIs(report['passed'], False)
    self.assertEqual(
      report['parts']['certify']['errors'],
      ['quick: NotImplementedError: no such dot.'],
    )
    self.assertEqual(report['parts']['steps']['rows'], 3 * cost)
    self.assertIn('FAILED: quick: NotImplementedError', out)
    self.assertIn('| target | x | 1 | 1.5 |', out)

  def test_unequal_text_fails(self):
    row = {'same_width': True, 'equal': False}
    parts = {**{p: {'rows': [], 'errors': []} for p in device_check.PARTS}}
    self.assertIsNone(device_check.is_passed(parts))
    parts['exactness']['rows'] = [{**row, 'same_width': False}]
    self.assertIsNone(device_check.is_passed(parts))
    parts['exactness']['rows'].append(row)
    self.assertIs(device_check.is_passed(parts), False)

  @parameterized.parameters(
    ('--minutes=0', 'minutes must be > 0, got 0.0.'),
    ('--minutes=nan', 'minutes must be > 0, got nan.'),
    ('--parts=steps,speed', "got ['steps', 'speed']."),
    ('--parts=', 'parts must be some of certify, exactness, steps, generate'),
    ('--target=gpt-5', 'llama-3.2-1b, llama-3.2-3b, smollm2-135m, '),
    ('--target=gpt-5', "got 'gpt-5'."),
    ('--json_out=/no/such/folder/x.json', 'is not an existing folder.'),
    ('--minute=1', 'did you mean --minutes?'),
  )
  def test_bad_input(self, flag, message):
    code, out, err, report = run(flag)
    self.assertEqual((code, out, report), (2, '', None))
    self.assertRegex(err, r'^[\w.]+: [^\n]+[.?]\n$')
    self.assertIn(message, err)


class StepCostsTest(parameterized.TestCase):
  def test_rows_must_fit(self):
    with self.assertRaisesRegex(ValueError, 'at least 20, .* got 19'):
      step_costs.measure(
        None, None, batch_size=1, num_rows=4, length=16, num_slots=19
      )

  def test_predicted_speedup(self):
    # Five drafts that cost a tenth each, all accepted, at no dearer a pass.
    self.assertAlmostEqual(
      step_costs.predicted_speedup(
        6, plain=1, verify=1, draft=0.1, num_draft_tokens=5
      ),
      4.0,
    )
    # A lookup costs nothing.
    self.assertEqual(step_costs.predicted_speedup(2, plain=1, verify=1), 2)


if __name__ == '__main__':
  absltest.main()

"""Every reproduction runs, holds, and is what the table of all of them says."""

import contextlib
import importlib
import io
import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import script
from experiments.reproduce import measured, record, table, trained_drafts

SCRIPTS = pathlib.Path(table.__file__).parent


class ReproduceTest(parameterized.TestCase):
  @parameterized.parameters(*table.NAMES, *table.MEASURED)
  def test_reproduce_quick(self, name):
    paper = importlib.import_module(f'experiments.reproduce.{name}')
    groups = getattr(paper, 'FLAG_GROUPS', None) or (
      measured.FLAG_GROUPS if name in table.MEASURED else record.FLAG_GROUPS
    )
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder, 'result.json')
      out = io.StringIO()
      with contextlib.redirect_stdout(out):
        code = script.run_main(
          paper.main, groups, ['--quick', f'--json_out={path}']
        )
      self.assertEqual(code, 0, out.getvalue())
      result = json.loads(path.read_text())
    self.assertTrue(result['passed'])
    self.assertLen(out.getvalue().splitlines(), len(result['findings']))
    if name in table.MEASURED:
      # The demo pair stands in for others, whose names are in the findings.
      self.assertEqual(result['level'], 'measured')
      if table.has_result(name):
        stored = table.load_result(name)['rows']
        self.assertEqual(list(result['rows'][0]), list(stored[0]))
      return
    # Every kind of finding, if fewer of them, is in the stored result.
    stored = {f['name'] for f in table.load_result(name)['findings']}
    missing = {
      f['name']
      for f in result['findings']
      if f['name'] not in stored and 'calls for' not in f['name']
    }
    self.assertEmpty(missing)

  @parameterized.parameters(*table.NAMES, *table.MEASURED)
  def test_reproduce_record_is_complete(self, name):
    paper = importlib.import_module(f'experiments.reproduce.{name}')
    if name in table.MEASURED and not table.has_result(name):
      got = record.paragraph(paper.__doc__, 'Got')
      self.assertEqual(got, 'not run yet.')
      self.skipTest(f'THE FULL RUN OF {name} IS NOT STORED')
    result = table.load_result(name)
    self.assertTrue(result['passed'])
    self.assertFalse(result['config']['quick'])
    self.assertTrue(result['environment']['git_clean'])
    for title in ('Claim', 'Notation', 'Runtime', 'Expected', 'Differs'):
      self.assertNotEmpty(record.paragraph(paper.__doc__, title))
    self.assertEqual(
      record.paragraph(paper.__doc__, 'Command'),
      f'python experiments/reproduce/{name}.py',
    )
    self.assertEqual(
      record.paragraph(paper.__doc__, 'Got'),
      f'{record.got_text(result)}; {result["environment"]["date"][:10]}, CPU.',
    )

  def test_models_of_another_state_of_the_code_are_refused(self):
    lines = [
      {'way': 'mtp', 'trained_at': 'new'},
      {'way': 'eagle3', 'trained_at': 'old'},
    ]
    trained_drafts.check_revision(lines[:1], 'new')
    with self.assertRaisesRegex(ValueError, 'at new.* got eagle3 of old'):
      trained_drafts.check_revision(lines, 'new')

  def test_reproduce_table_says_what_is_stored(self):
    self.assertEqual(table.README.read_text(encoding='utf-8'), table.text())

  def test_reproduce_every_script_is_in_the_table(self):
    scripts = {path.stem for path in SCRIPTS.glob('*.py')}
    others = {'__init__', 'definitions', 'measured', 'record', 'table', 'toys'}
    self.assertEqual(scripts - others, {*table.NAMES, *table.MEASURED})

  def test_a_claim_that_does_not_hold_is_seen(self):
    def wrong(quick):
      del quick
      return [record.close('one', 1.0, 1.1, 0.05)]

    def main(values):
      return record.run('wrong', wrong, values)

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
      self.assertEqual(script.run_main(main, record.FLAG_GROUPS, []), 1)
    self.assertIn('FAILS  one: expected 1, got 1.1', out.getvalue())

  def test_nothing_is_written_over_a_folder(self):
    from experiments.reproduce import ssd

    err = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
      with contextlib.redirect_stderr(err):
        code = script.run_main(
          ssd.main, record.FLAG_GROUPS, [f'--json_out={folder}']
        )
    self.assertEqual(code, script.BAD_INPUT)
    self.assertIn('it is a folder', err.getvalue())


if __name__ == '__main__':
  absltest.main()

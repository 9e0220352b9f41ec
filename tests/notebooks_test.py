"""The notebooks run from top to bottom, each in a process of its own."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import traceback
from unittest import mock

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from tests import run_notebook

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.ipynb'))
# What a notebook prints if all is well.
SAYS = {
  '1_the_scribes_apprentice': (
    'the same text: True',
    'with the apprentice: 3',
    'coupled: 2000 of 2000 texts',
  ),
  '2_proof': ('texts listed: 1024', 'coupled: 500 of 500 texts', '1.2222'),
  '3_train_your_own_apprentice': ('tokens per verification',),
  '4_when_does_it_pay': ('speed-up: forecast',),
  '5_bring_your_own_model': ('it conforms', 'the same text: True'),
}


class FormTest(absltest.TestCase):
  def test_five_of_them_without_outputs(self):
    self.assertEqual([path.stem for path in NOTEBOOKS], list(SAYS))
    for path in NOTEBOOKS:
      with self.subTest(path.name):
        book = json.loads(path.read_text(encoding='utf-8'))
        self.assertEqual((book['nbformat'], book['nbformat_minor']), (4, 5))
        ids = [cell['id'] for cell in book['cells']]
        self.assertLen(set(ids), len(ids))
        for cell in book['cells']:
          self.assertEqual(cell['metadata'], {})
          if cell['cell_type'] == 'code':
            self.assertEqual(cell['outputs'], [])
            self.assertIsNone(cell['execution_count'])

  def test_all_set_up_alike(self):
    cells = {run_notebook.code_cells(path)[0] for path in NOTEBOOKS}
    self.assertLen(cells, 1)
    (cell,) = cells
    find_spec = mock.patch('importlib.util.find_spec')
    # Where specjax is missing, nothing is fetched from an unknown address.
    with find_spec as find, mock.patch('subprocess.run') as run:
      find.return_value = None
      with self.assertRaisesRegex(ValueError, 'REPOSITORY must be'):
        exec(cell, {})
      exec(cell.replace("''", "'https://example.org/x'", 1), {})
    sys.path.remove(os.path.abspath('specjax-clone'))
    commands = [call.args[0] for call in run.call_args_list]
    self.assertEqual(commands[0][:2], ['git', 'clone'])
    self.assertEqual(commands[1][:4], [sys.executable, '-m', 'pip', 'install'])

  def test_the_model_of_the_notebook_is_that_of_the_examples(self):
    example = (ROOT / 'examples' / 'own_model.py').read_text(encoding='utf-8')
    cells = run_notebook.code_cells(
      ROOT / 'notebooks' / f'{list(SAYS)[4]}.ipynb'
    )
    (cell,) = [cell for cell in cells if 'class Whole' in cell]
    self.assertEndsWith(example, f'\n\n{cell}\n')


class RunTest(parameterized.TestCase):
  @parameterized.parameters(*SAYS)
  def test_runs(self, name):
    if importlib.util.find_spec('matplotlib') is None:
      self.skipTest('matplotlib is not installed')
    done = subprocess.run(
      (
        *(sys.executable, '-m', 'tests.run_notebook'),
        f'notebooks/{name}.ipynb',
      ),
      cwd=ROOT,
      capture_output=True,
      text=True,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    for sentence in SAYS[name]:
      self.assertIn(sentence, done.stdout)
    self.assertNotIn('False', done.stdout)


class RunnerTest(absltest.TestCase):
  def test_an_error_names_its_cell(self):
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    cell = lambda text: {'cell_type': 'code', 'source': [text]}
    path = pathlib.Path(folder.name, 'x.ipynb')
    path.write_text(json.dumps({'cells': [cell('a = 1'), cell('a + b')]}))
    try:
      run_notebook.run(path)
    except NameError:
      self.assertIn('File "x.ipynb, code cell 2"', traceback.format_exc())
    else:
      self.fail('The error was swallowed.')


if __name__ == '__main__':
  absltest.main()

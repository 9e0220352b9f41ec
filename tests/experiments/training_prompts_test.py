"""Prompts to train on and prompts to measure on: none is both."""

import contextlib
import io
import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import script, training_prompts


class TrainingPromptsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.out = self.folder / 'out'
    self.questions = self.write(
      'questions', [{'question': f'question {i:02}'} for i in range(12)]
    )
    # The second has a question of the first, and a long one.
    turns = [['question 01'], ['question 07'], ['short', 'and on'], ['x' * 50]]
    self.turns = self.write('turns', [{'turns': turn} for turn in turns])

  def write(self, name, rows):
    path = self.folder / f'{name}.jsonl'
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path

  def split(self, *flags):
    err = io.StringIO()
    argv = [f'--out={self.out}', *flags]
    groups = (('Prompts', training_prompts.define_flags),)
    with contextlib.redirect_stderr(err):
      code = script.run_main(training_prompts.main, groups, argv)
    return code, err.getvalue()

  def rows(self, name):
    text = (self.out / f'{name}.jsonl').read_text()
    return [json.loads(line) for line in text.splitlines()]

  def test_what_is_kept_is_not_trained_on(self):
    code, err = self.split(
      f'--prompts_jsonl={self.questions}',
      f'--prompts_jsonl={self.turns}',
      '--num_held_out=3',
      '--num_functions=5',
      '--temperatures=0,0.5,1',
      '--long=40',
    )
    self.assertEqual(code, 0, err)
    kept = [row['turns'][0] for row in self.rows('questions')]
    self.assertEqual(kept, ['question 02', 'question 06', 'question 10'])
    kept += [row['turns'][0] for row in self.rows('turns')]
    train = self.rows('train')
    self.assertNoCommonElements(kept, [row['turns'][0] for row in train])
    self.assertEqual([row['seed'] for row in train], [*range(len(train))])
    asked = {}
    for row in train:
      asked.setdefault(row['turns'][0], []).append(row['temperature'])
    # Of nine questions one is kept by the other file, which asks one again.
    self.assertLen(asked, 8 + 5)
    for text, temperatures in asked.items():
      repeats = temperatures.count(0)
      wanted = [0, 0.5, 1] * repeats if len(text) <= 40 else [0.5]
      self.assertEqual(sorted(temperatures), sorted(wanted))
    lengths = [sum(map(len, row['turns'])) for row in train]
    self.assertEqual(lengths, sorted(lengths))

  def test_functions_come_in_every_form(self):
    texts = list(training_prompts.functions())
    self.assertGreater(len(texts), 500)
    for beginning in ('Explain what', 'Write a Python function ', 'def '):
      share = sum(text.startswith(beginning) for text in texts) / len(texts)
      self.assertGreater(share, 0.25)

  @parameterized.parameters(
    ((), '--prompts_jsonl must be given'),
    (('--num_held_out=-1',), 'num_held_out must be >= 0, got -1'),
    (('--temperatures=0,warm',), "temperatures .* numbers >= 0, got 'warm'"),
    (('--temperatures=-1',), "temperatures .* numbers >= 0, got '-1'"),
    (('--temperatures=',), '--temperatures must have one number or more'),
  )
  def test_bad_input(self, flags, message):
    if flags:
      flags = (*flags, f'--prompts_jsonl={self.questions}')
    code, err = self.split(*flags)
    self.assertEqual(code, 2)
    self.assertRegex(err, message)
    self.assertFalse(self.out.exists())

  def test_two_files_of_one_name(self):
    other = self.folder / 'other'
    other.mkdir()
    (other / 'questions.jsonl').write_text('{"question": "a"}\n')
    code, err = self.split(
      f'--prompts_jsonl={self.questions}',
      f'--prompts_jsonl={other / "questions.jsonl"}',
    )
    self.assertEqual(code, 2)
    self.assertRegex(err, 'different names.*got questions twice')


if __name__ == '__main__':
  absltest.main()

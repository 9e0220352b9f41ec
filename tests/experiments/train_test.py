"""The program people run: tiny models from files to a folder that decodes."""

import contextlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import draft_table, generate, script, train
from specjax.models import load
from tests.training import tiny

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Files(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)
    self.config = self.folder / 'config.json'
    self.config.write_text(json.dumps(tiny.shape(1, 16)))
    self.text = self.folder / 'text.py'
    self.text.write_text(tiny.TEXT)

  def flags(self, name: str, *more: str) -> list[str]:
    return [
      f'--data={self.text}',
      f'--run_dir={self.folder / name}',
      f'--out={self.folder / name / "model"}',
      '--batch_size=2',
      '--length=33',
      '--num_warmup_steps=1',
      '--learning_rate=1e-2',
      '--dtype=float32',
      '--log_every=1',
      *more,
    ]

  def run_script(self, module, groups, argv) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      code = script.run_main(module.main, groups, argv)
    return code, out.getvalue(), err.getvalue()

  def train(self, name: str, *more: str) -> str:
    argv = self.flags(name, *more)
    code, out, err = self.run_script(train, train.FLAG_GROUPS, argv)
    self.assertEqual((code, out), (0, ''), err)
    return err

  def rows(self, name: str) -> list[dict]:
    lines = (self.folder / name / 'metrics.jsonl').read_text().splitlines()
    return [json.loads(line) for line in lines]


class PairTest(Files):
  def test_a_target_then_a_draft_that_decodes_with_it(self):
    held_out = f'--eval_data={self.text}'
    config = f'--config={self.config}'
    self.train('target', config, '--num_steps=12', held_out, '--eval_every=6')
    rows = self.rows('target')
    self.assertEqual([row['step'] for row in rows], list(range(1, 13)))
    self.assertLess(rows[-1]['loss'], rows[0]['loss'])
    self.assertEqual(
      [row['step'] for row in rows if 'eval_loss' in row], [6, 12]
    )
    target = self.folder / 'target' / 'model'
    self.assertEqual(
      sorted(os.listdir(target)),
      ['config.json', 'model.safetensors', 'tokenizer_config.json'],
    )
    again = load.load(str(target), 'float32')
    self.assertEqual(again.tokenizer.vocab_size, 257)

    err = self.train(
      'draft',
      config,
      held_out,
      f'--target={target}',
      '--loss=tv',
      '--num_steps=8',
      '--written_by=draft',
      '--written_share=0.5',
      '--written_after=8',
      '--num_accumulated=2',
      '--num_eval_prompts=2',
    )
    self.assertRegex(err, r'block efficiency \d\.\d\d at temperature 1\n$')
    report = json.loads((self.folder / 'draft' / 'report.json').read_text())
    self.assertLen(report['decoding'], 2)
    self.assertGreaterEqual(report['decoding'][0]['block_efficiency'], 1)
    self.assertLess(self.rows('draft')[-1]['tv'], self.rows('draft')[0]['tv'])
    texts = []
    for more in ((), (f'--draft={self.folder / "draft" / "model"}',)):
      argv = [f'--target={target}', '--prompt=for ', '--max_new_tokens=16']
      argv += ['--dtype=float32', *more]
      code, out, err = self.run_script(generate, generate.FLAG_GROUPS, argv)
      self.assertEqual(code, 0, err)
      texts.append(out)
    self.assertEqual(texts[0], texts[1])

  def test_what_a_target_writes_is_read(self):
    config = f'--config={self.config}'
    self.train('target', config, '--num_steps=2')
    target = self.folder / 'target' / 'model'
    written = self.folder / 'written.json'
    argv = [f'--target={target}', '--prompt=for ', '--max_new_tokens=64']
    argv += ['--ignore_eos', '--temperature=1', f'--json_out={written}']
    code, _, err = self.run_script(generate, generate.FLAG_GROUPS, argv)
    self.assertEqual(code, 0, err)
    self.train('more', f'--init={target}', f'--data={written}', '--num_steps=2')
    self.assertLen(self.rows('more'), 2)


class TableTest(Files):
  def test_ways_beside_each_other(self):
    self.train('target', f'--config={self.config}', '--num_steps=4')
    lines = self.folder / 'table.jsonl'
    argv = [
      f'--target={self.folder / "target" / "model"}',
      f'--config={self.config}',
      '--ways=scratch,tv,medusa,eagle3',
      '--num_steps=2',
      '--batch_size=2',
      '--length=33',
      '--num_prompts=2',
      f'--out={self.folder / "table"}',
      f'--json_out={lines}',
    ]
    code, out, err = self.run_script(draft_table, draft_table.FLAG_GROUPS, argv)
    self.assertEqual(code, 0, err)
    self.assertRegex(out, r'(?m)^eagle3 +\d+ +\d+ ( +\d\.\d\d){4} ')
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    self.assertEqual(
      [row['way'] for row in rows], ['scratch', 'tv', 'medusa', 'eagle3']
    )
    for row in rows:
      self.assertLen(row['by_temperature']['0']['acceptance_conditional'], 4)
      self.assertTrue(row['is_greedy_text_equal'])
      self.assertGreaterEqual(row['by_temperature']['1']['block_efficiency'], 1)

  @parameterized.parameters(
    ('--num_draft_tokens=5', '1..4 with the four heads of medusa, got 5'),
    ('--num_draft_tokens=0', 'must be in 1..64, .* got 0'),
    ('--num_prompts=0', '--num_prompts must be in 1..10000, got 0'),
    ('--num_prompts=99999', '--num_prompts must be in 1..10000, got 99999'),
    ('--ways=', '--ways must have one of .*, got none'),
  )
  def test_refused_before_training(self, flag, pattern):
    out = self.folder / 'table'
    code, _, err = self.run_script(
      draft_table, draft_table.FLAG_GROUPS, [f'--out={out}', flag]
    )
    self.assertEqual(code, 2)
    self.assertRegex(err, pattern)
    self.assertFalse(out.exists())


class KilledTest(Files):
  def start(self, name: str) -> subprocess.Popen:
    script = str(ROOT / 'experiments' / 'train.py')
    more = (f'--config={self.config}', '--num_steps=60', '--save_every=5')
    return subprocess.Popen(
      [sys.executable, script, *self.flags(name, *more)],
      stderr=subprocess.PIPE,
      text=True,
    )

  def finish(self, process: subprocess.Popen):
    _, err = process.communicate(timeout=120)
    self.assertEqual(process.returncode, 0, err)

  def test_sigkill_changes_nothing(self):
    whole, killed = self.start('whole'), self.start('killed')
    metrics = self.folder / 'killed' / 'metrics.jsonl'
    deadline = time.monotonic() + 100
    while killed.poll() is None and time.monotonic() < deadline:
      if metrics.exists() and metrics.read_text().count('\n') >= 12:
        break
      time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    self.assertEqual(killed.returncode, -signal.SIGKILL)
    self.assertFalse((self.folder / 'killed' / 'model').exists())
    self.finish(whole)
    self.finish(self.start('killed'))
    model = 'model/model.safetensors'
    self.assertEqual(
      (self.folder / 'killed' / model).read_bytes(),
      (self.folder / 'whole' / model).read_bytes(),
    )
    losses = [
      [(row['step'], row['loss']) for row in self.rows(name)]
      for name in ('whole', 'killed')
    ]
    self.assertEqual(losses[0], losses[1])


class RefusedTest(Files):
  @parameterized.parameters(
    (('--num_steps=2',), 'one of --config, --init and --head'),
    (('--config={config}',), '--num_steps must be given'),
    (('--config={config}', '--num_steps=0'), 'num_steps must be >= 1, got 0'),
    (('--config={config}', '--num_steps=4', '--data=/no/x'), '/no/x'),
    (('--config={text}', '--num_steps=4'), 'must be JSON'),
    (
      ('--config={config}', '--num_steps=4', '--written_by=draft'),
      '--written_by=draft needs --target',
    ),
    (
      ('--config={config}', '--num_steps=4', '--length=258'),
      'at most 257, one more than the context of the model, got 258',
    ),
    (
      ('--config={config}', '--num_steps=4', '--num_accumulated=3'),
      'batch_size must be a multiple of 3',
    ),
    (('--config={config}', '--num_steps=4', '--loss=l2'), 'forward_kl'),
    (
      ('--config={config}', '--num_steps=4', '--num_eval_prompts=2'),
      'needs --target and --eval_data',
    ),
  )
  def test_one_sentence(self, flags, message):
    flags = [f.format(config=self.config, text=self.text) for f in flags]
    argv = self.flags('run', *flags)
    code, out, err = self.run_script(train, train.FLAG_GROUPS, argv)
    self.assertEqual((code, out), (2, ''), err)
    self.assertRegex(err, r'^train\.py: [^\n]+\.\n$')
    self.assertIn(message, err)
    self.assertFalse((self.folder / 'run').exists())

  def test_a_run_folder_of_other_settings(self):
    config = f'--config={self.config}'
    self.train('run', config, '--num_steps=3')
    other = f'--out={self.folder / "other"}'
    argv = self.flags('run', config, '--num_steps=4', other)
    code, _, err = self.run_script(train, train.FLAG_GROUPS, argv)
    self.assertEqual(code, 2)
    self.assertIn('of a run with other settings', err)
    self.assertFalse((self.folder / 'other').exists())


if __name__ == '__main__':
  absltest.main()

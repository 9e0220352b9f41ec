"""Heads on a tiny frozen target: trained, evaluated, resumed, and decoded."""

import json
import pathlib
import shutil
import tempfile

import numpy as np
import safetensors.numpy
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import generate, script, train
from tests.experiments import train_test
from tests.training import tiny


class HeadFiles(train_test.Files):
  """A run's folder, and a target of two layers that all tests share."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.target = pathlib.Path(folder, 'target')
    config, text = pathlib.Path(folder, 'c.json'), pathlib.Path(folder, 'a.py')
    config.write_text(json.dumps(tiny.shape(2, 16)))
    text.write_text(tiny.TEXT)
    flags = [f'--config={config}', f'--data={text}', f'--out={cls.target}']
    flags += ['--num_steps=20', '--num_warmup_steps=1', '--learning_rate=1e-2']
    flags += ['--batch_size=2', '--length=33', '--dtype=float32']
    assert script.run_main(train.main, train.FLAG_GROUPS, flags) == 0

  def train_head(self, name: str, *more: str) -> str:
    return self.train(name, f'--target={self.target}', *more)

  def report(self, name: str) -> dict:
    return json.loads((self.folder / name / 'report.json').read_text())

  def decode(self, *more: str) -> dict:
    result = self.folder / 'result.json'
    argv = [f'--target={self.target}', '--prompt=for ', '--max_new_tokens=24']
    argv += ['--dtype=float32', '--ignore_eos', f'--json_out={result}', *more]
    code, _, err = self.run_script(generate, generate.FLAG_GROUPS, argv)
    self.assertEqual(code, 0, err)
    return json.loads(result.read_text())


class HeadTest(HeadFiles):
  @parameterized.parameters(
    ('medusa', ('--depth=2',), 2),
    ('mtp', ('--head_ffn_dim=24', '--loss=tv', '--num_eval_prompts=2'), 4),
    ('mtp', ('--draft_vocab_size=12', '--depth=2'), 2),
    ('eagle', (), 1),
    ('eagle3', ('--draft_vocab_size=12', '--depth=3'), 3),
  )
  def test_it_learns(self, kind, more, depth):
    err = self.train_head(
      kind,
      f'--head={kind}',
      '--num_steps=30',
      f'--eval_data={self.text}',
      '--eval_every=10',
      *more,
    )
    rows = self.rows(kind)
    self.assertLess(rows[-1]['eval_loss'], rows[9]['eval_loss'])
    for i in range(depth):
      self.assertBetween(rows[-1][f'eval_overlap_{i}'], 0, 1)
    self.assertNotIn(f'eval_overlap_{depth}', rows[-1])
    if '--num_eval_prompts=2' in more:
      self.assertRegex(err, r'block efficiency \d\.\d\d at temperature 1\n$')
      for row in self.report(kind)['decoding']:
        self.assertGreater(row['block_efficiency'], 1)
    else:
      self.decode_with(kind)

  def decode_with(self, kind: str):
    """The folder drafts, and the text is that of plain decoding."""
    flags = ('--num_draft_tokens=2',)
    plain = self.decode('--proposer=none', *flags)
    head = self.decode(
      f'--proposer={kind.rstrip("3")}',
      f'--head={self.folder / kind / "model"}',
      *flags,
    )
    self.assertEqual(
      head['requests'][0]['tokens'], plain['requests'][0]['tokens']
    )
    self.assertGreater(head['aggregate']['num_accepted'], 0)

  def test_what_the_target_wrote_stopped_and_gone_on_with(self):
    """Of a result, only what was written is learnt; its ids are counted."""
    plain = self.decode(
      '--proposer=none',
      '--temperature=1',
      '--prompt=zzz',
      f'--banned_ids={ord("z")}',
    )
    written = self.folder / 'written.json'
    shutil.copy(self.folder / 'result.json', written)
    ids = plain['requests'][0]['tokens']
    counts = np.bincount(ids, minlength=257)
    num_ids = int(np.sum(counts > 0))
    more = (
      '--head=eagle3',
      f'--draft_vocab_size={num_ids}',
      '--num_steps=6',
      '--length=9',
      '--written_by=target',
      '--written_share=0.5',
      '--written_after=4',
    )
    argv = [f'--target={self.target}', *more]
    files = {}
    for name, parts in {'once': [()], 'twice': [('--stop_at=3',), ()]}.items():
      for part in parts:
        # The last --data alone would be read were it given twice.
        flags = [
          f'--data={written}' if flag.startswith('--data') else flag
          for flag in self.flags(name, *argv, *part)
        ]
        shutil.rmtree(self.folder / name / 'model', ignore_errors=True)
        code, _, err = self.run_script(train, train.FLAG_GROUPS, flags)
        self.assertEqual(code, 0, err)
      files[name] = self.folder / name / 'model' / 'model.safetensors'
    self.assertEqual(files['once'].read_bytes(), files['twice'].read_bytes())
    d2t = safetensors.numpy.load_file(files['once'])['d2t']
    np.testing.assert_array_equal(
      d2t + np.arange(num_ids), np.flatnonzero(counts)
    )
    before = safetensors.numpy.load_file(files['once'])
    self.train_head(
      'more',
      '--head=eagle3',
      f'--init={self.folder / "once" / "model"}',
      '--num_steps=1',
      '--num_warmup_steps=0',
      '--learning_rate=1e-6',
    )
    after = safetensors.numpy.load_file(
      self.folder / 'more' / 'model' / 'model.safetensors'
    )
    self.assertEqual(before.keys(), after.keys())
    for name, value in before.items():
      np.testing.assert_allclose(value, after[name], atol=1e-4)

  def test_the_target_reads_once_and_in_int8(self):
    """Both change little of what is learnt, and nothing of what is written."""
    losses = {}
    for name, more in {
      'plain': (),
      'remembered': ('--remember',),
      'int8': ('--remember', '--target_quantize=int8'),
    }.items():
      self.train_head(
        name,
        '--head=eagle3',
        '--draft_vocab_size=40',
        '--depth=2',
        '--num_steps=3',
        f'--eval_data={self.text}',
        *more,
      )
      losses[name] = [row['loss'] for row in self.rows(name)]
      losses[name].append(self.rows(name)[-1]['eval_loss'])
    np.testing.assert_allclose(losses['plain'], losses['remembered'], rtol=1e-3)
    np.testing.assert_allclose(losses['plain'], losses['int8'], rtol=0.05)
    self.assertNotEqual(losses['int8'], losses['remembered'])


class RefusedTest(HeadFiles):
  def test_one_sentence(self):
    target = f'--target={self.target}'
    mtp = ('--head=mtp', target)
    for flags, message in (
      (('--head=mtp',), '--head=mtp needs --target.'),
      ((*mtp, f'--config={self.config}'), '--config is not used with --head'),
      ((*mtp, '--depth=0'), 'depth must be >= 1, got 0.'),
      ((*mtp, '--depth=40'), 'length must be at least 42, two more than'),
      ((*mtp, '--written_by=draft'), 'must be none or target with --head'),
      (
        ('--head=eagle', target, '--draft_vocab_size=9'),
        '--draft_vocab_size is not used with',
      ),
      ((*mtp, f'--init={self.folder / "no"}'), 'does not exist'),
      (
        ('--head=medusa', target, '--head_ffn_dim=9'),
        '--head_ffn_dim is not used with --head=medusa; drop one.',
      ),
      (
        ('--head=eagle3', target, '--draft_vocab_size=999'),
        'num_ids must be in 1..257',
      ),
      ((f'--config={self.config}', '--depth=2'), '--depth needs --head.'),
      (
        (f'--config={self.config}', target, '--loss=text'),
        '--loss=text needs --head',
      ),
      (
        ('--head=medusa', target, '--target_quantize=int8'),
        '--target_quantize=int8 needs one device, and a head other than',
      ),
      (
        (*mtp, '--remember', '--written_by=target'),
        '--remember needs a text that stays, without --written_by',
      ),
      (
        (f'--config={self.config}', '--remember'),
        '--target_quantize and --remember need --head.',
      ),
      (('--head=hydra', target), 'medusa, mtp, eagle, eagle3'),
    ):
      with self.subTest(message):
        argv = self.flags('run', '--num_steps=2', *flags)
        code, out, err = self.run_script(train, train.FLAG_GROUPS, argv)
        self.assertEqual((code, out), (2, ''), err)
        self.assertRegex(err, r'^train\.py: [^\n]+\.\n$')
        self.assertIn(message, err)
        self.assertFalse((self.folder / 'run').exists())


if __name__ == '__main__':
  absltest.main()

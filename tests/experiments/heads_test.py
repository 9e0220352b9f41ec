"""Heads from the command line: plain decoding's text, and refusals."""

import contextlib
import io
import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import benchmark, generate, script
from experiments.run_flags import FLAG_GROUPS
from specjax.models import load
from specjax.models.heads import build, files
from tests.experiments import tiny_files
from tests.models.heads import tiny_heads


class HeadsTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(
      cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    changes = {'num_hidden_layers': 2}
    cls.target = tiny_files.write_folder(
      cls.folder / 'target',
      weights=tiny_files.tensors({**tiny_files.CONFIG, **changes}),
      **changes,
    )
    target = load.load(str(cls.target), 'float32').model
    cls.model = target
    for kind, settings in (
      ('medusa', {'num_heads': 3}),
      ('mtp', {'num_ids': 60}),
      ('eagle', {}),
      ('eagle3', {'num_ids': 60}),
    ):
      head = build.build(kind, target, **settings)
      params = tiny_heads.params_of(head)
      files.save_head(cls.folder / kind, head, params)

  def run_script(self, *flags, of=generate, groups=FLAG_GROUPS):
    """Exit code, what went to stderr, and the result if there is one."""
    json_out = self.folder / f'{self.id()}.json'
    argv = (
      f'--target={self.target}',
      '--prompt=a ba',
      '--max_new_tokens=12',
      f'--json_out={json_out}',
      *flags,
    )
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      code = script.run_main(of.main, groups, argv)
    result = json.loads(json_out.read_text()) if json_out.exists() else None
    json_out.unlink(missing_ok=True)
    return code, err.getvalue(), result

  def test_the_text_is_that_of_plain_decoding(self):
    flags = (
      '--temperature=0.8',
      '--verify=coupled',
      '--ignore_eos',
      '--num_draft_tokens=2',
      '--dtype=float32',
    )
    code, err, plain = self.run_script('--proposer=none', *flags)
    self.assertEqual(code, 0, err)
    for kind in ('medusa', 'mtp', 'eagle3'):
      code, err, got = self.run_script(
        f'--proposer={kind.rstrip("3")}', f'--head={self.folder / kind}', *flags
      )
      self.assertEqual(code, 0, err)
      tokens = [r['requests'][0]['tokens'] for r in (got, plain)]
      self.assertEqual(*tokens)
      self.assertGreater(got['aggregate']['num_drafted'], 0)

  def test_bfloat16_and_a_rule_that_needs_costs(self):
    code, err, got = self.run_script(
      '--proposer=eagle',
      f'--head={self.folder / "eagle3"}',
      '--num_draft_tokens=2',
      '--stop_rule=cost',
      '--quantize=int8',
    )
    self.assertEqual(code, 0, err)
    costs = got['config']['step_milliseconds']
    self.assertGreater(min(costs['first'], costs['draft']), 0)

  def test_benchmark(self):
    code, err, got = self.run_script(
      '--proposers=none,medusa',
      f'--head={self.folder / "medusa"}',
      '--draft_lengths=2',
      '--repeats=1',
      '--dtype=float32',
      of=benchmark,
      groups=benchmark.FLAG_GROUPS,
    )
    self.assertEqual(code, 0, err)
    rows = [row for row in got['rows'] if row['proposer'] == 'medusa']
    self.assertLen(rows, 1)
    self.assertGreater(rows[0]['predicted_speedup'], 0)

  @parameterized.parameters(
    (('--proposer=mtp',), '--proposer=mtp needs --head.'),
    (
      ('--proposer=ngram', '--head=x'),
      '--head is not used with --proposer=ngram',
    ),
    (('--proposer=mtp', '--head={}/none'), 'none does not exist.'),
    (
      ('--proposer=eagle', '--head={}/eagle3/config.json'),
      'must be a folder with config.json and safetensors, it is a file.',
    ),
    (
      ('--proposer=medusa', '--head={}/medusa', '--record=x.npz'),
      'got medusa, which is a head',
    ),
    (('--proposer=mtp', '--head={}/eagle'), 'an MTP module must be there once'),
    (('--proposer=eagle', '--head={}/medusa'), 'vocab_size of the head'),
    (
      ('--proposer=medusa', '--head={}/medusa', '--num_draft_tokens=4'),
      'num_draft_tokens must be at most 3, the number of heads, got 4.',
    ),
  )
  def test_bad_input(self, flags, message):
    code, err, result = self.run_script(*(f.format(self.folder) for f in flags))
    self.assertEqual((code, result), (2, None))
    self.assertIn(message, err)
    self.assertNotIn('Traceback', err)
    self.assertStartsWith(err.splitlines()[-1], 'generate.py: ')


if __name__ == '__main__':
  absltest.main()

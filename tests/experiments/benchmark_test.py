"""The benchmark: its rows, its peers' protocol, its pictures, bad input."""

import contextlib
import importlib.util
import io
import json
import math
import pathlib
import sys
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import bench_run, benchmark, peers, plots, script
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.early_exit import EarlyExit
from specjax.proposers.medusa import Medusa

PAIR = ('--target=demo:target', '--draft=demo:draft')
# As a peer, this answers three rounds and then goes wrong.
PEER = """
import json, sys
job = json.loads(sys.stdin.readline())
print(json.dumps({'ready': len(job['prompts'])}), flush=True)
for line in sys.stdin:
  number = json.loads(line)['round']
  if number == 4:
    sys.exit(3)
  seconds = [0.5 * number for _ in job['prompts']]
  modes = [
    {'mode': 'plain', 'num_draft_tokens': None, 'seconds': seconds},
    {'mode': 'lookup', 'num_draft_tokens': 4,
     'seconds': [s / 2 for s in seconds]},
  ]
  about = {'versions': {'peer': '1'}, 'note': 'A fake.'}
  print(json.dumps({'about': about, 'modes': modes}), flush=True)
"""


_PATCHES = contextlib.ExitStack()


def setUpModule():
  # Passes in the milliseconds: what is checked here is not the figures.
  for module, name in (
    (bench_run, '_COST_SECONDS'),
    (bench_run.bench_cells, '_CALL_SECONDS'),
  ):
    _PATCHES.enter_context(mock.patch.object(module, name, 0.001))


def tearDownModule():
  # Not a module cleanup: pytest does not run those.
  _PATCHES.close()


def run(*argv):
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    code = script.run_main(benchmark.main, benchmark.FLAG_GROUPS, argv)
  return code, out.getvalue(), err.getvalue()


def fake_peer(name, job, code=PEER):
  return peers.Peer(name, job, (sys.executable, '-c', code))


class BenchmarkTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(
      cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    prompts = cls.folder / 'prompts.jsonl'
    prompts.write_text(
      '{"prompt": "def f(x):"}\n{"turns": ["import os", "import sys"]}\n'
      '{"question": "class A"}\n'
    )
    base = (*PAIR, f'--prompts_jsonl={prompts}', '--max_new_tokens=12')
    with (
      mock.patch.object(benchmark.peers, 'Peer', side_effect=_fake_of),
      mock.patch.object(benchmark.peers, 'check'),
    ):
      cls.report, cls.out = cls.read(
        *base,
        '--draft_lengths=2',
        '--repeats=2',
        '--exact',
        '--peers=transformers',
      )
    cls.in_twos, _ = cls.read(
      base[0],
      *base[2:],
      '--draft_lengths=1',
      '--batch_sizes=2',
      '--repeats=1',
      '--proposers=ngram',
    )

  @classmethod
  def read(cls, *argv):
    path = cls.folder / 'out.json'
    code, out, err = run(*argv, f'--json_out={path}')
    if code:
      raise AssertionError(err)
    return json.loads(path.read_text()), out

  @property
  def rows(self):
    return self.report['rows'] + self.in_twos['rows']

  def test_rows(self):
    self.assertEqual(
      [(row['proposer'], row['K'], row['batch']) for row in self.rows],
      [
        ('none', 0, 1),
        ('none', 0, 1),
        ('draft', 2, 1),
        ('ngram', 2, 1),
        ('none', 0, 2),
        ('ngram', 1, 2),
      ],
    )
    may_be_missing = {
      'draft_dtype',
      'draft_quantize',
      'seconds_draft_step',
      'seconds_absorb',
      'peak_memory',
      'memory_growth',
      'equal_to_plain',
      'mean_acceptance_length',
      'draft_acceptance_rate',
      'alpha_tested',
      'expected_acceptance',
    }
    for row in self.rows:
      for name, value in row.items():
        with self.subTest(f'{row["proposer"]} {row["batch"]} {name}'):
          if name not in may_be_missing:
            self.assertIsNotNone(value)
          if isinstance(value, float):
            self.assertTrue(math.isfinite(value))

  def test_figures_agree_with_each_other(self):
    for row in self.rows:
      # 3 prompts of 12 tokens; in twos the first one is decoded once more.
      self.assertEqual(row['num_emitted'], 36 if row['batch'] == 1 else 48)
      self.assertGreaterEqual(
        row['tokens_per_second'], row['tokens_per_second_least']
      )
      self.assertLessEqual(
        row['tokens_per_second'], row['tokens_per_second_most']
      )
      self.assertAlmostEqual(
        row['efficiency'], row['speedup'] / row['predicted_speedup']
      )
      self.assertAlmostEqual(
        row['loop_overhead'],
        1 - row['seconds_predicted_step'] / row['seconds_step'],
      )
      if row['batch'] == 1:
        self.assertAlmostEqual(
          row['tokens_per_loop_step'], row['block_efficiency']
        )
      self.assertEqual(
        row['seconds_draft_step'] is None, row['proposer'] != 'draft'
      )
      if row['K']:
        self.assertEqual(row['width'], row['K'] + 1)
        self.assertGreater(row['seconds_propose'], 0)
        self.assertLen(row['acceptance_per_position'], row['K'])

  def test_a_speedup_is_over_its_baseline(self):
    for size in (1, 2):
      rows = [row for row in self.rows if row['batch'] == size]
      (base,) = [row for row in rows if row['is_baseline']]
      self.assertEqual(base['proposer'], 'none')
      self.assertEqual(base['speedup'], 1)
      self.assertIn(base['width'], bench_run.PLAIN_WIDTHS)
      for row in rows:
        self.assertAlmostEqual(
          row['speedup'], row['tokens_per_second'] / base['tokens_per_second']
        )
        self.assertEqual(row['seconds_plain_step'], base['seconds_plain_step'])

  def test_texts_are_those_of_plain_decoding(self):
    for row in self.report['rows']:
      is_plain = row['proposer'] == 'none'
      self.assertIs(row['equal_to_plain'], None if is_plain else True)

  def test_the_peer(self):
    found = self.report['peers']
    self.assertEqual(found['fastest_mode'], 'lookup')
    plain, lookup = found['rows']
    # 3 prompts of 11 tokens behind the first, in 1.5 and in 3 seconds.
    self.assertAlmostEqual(plain['tokens_per_second_most'], 22)
    self.assertAlmostEqual(plain['tokens_per_second_least'], 11)
    self.assertAlmostEqual(lookup['tokens_per_second'], 33)
    self.assertGreater(lookup['best_speedup'], 0)

  def test_the_table(self):
    lines = self.out.splitlines()
    self.assertLen([x for x in lines if x.startswith('| none (baseline)')], 1)
    self.assertLen([x for x in lines if x.startswith('| ngram')], 1)
    self.assertIn('## Peer: peer 1', lines)

  def test_step_costs(self):
    found = {
      (x['who'], x['batch'], x['rows']) for x in self.report['step_costs']
    }
    self.assertEqual(
      found,
      {
        *(('target', 1, rows) for rows in (1, 2, 3)),
        *(('draft', 1, rows) for rows in (1, 2)),
      },
    )

  def test_forced_acceptance(self):
    report, out = self.read(
      *PAIR,
      '--prompt=class A',
      '--max_new_tokens=12',
      '--temperature=1',
      '--draft_lengths=3',
      '--repeats=1',
      '--proposers=draft',
      '--accept=1',
    )
    # Six steps of an accepted draft and a token of the target's own.
    self.assertEqual(report['rows'][-1]['block_efficiency'], 2.0)
    self.assertEqual(report['config']['accept'], 1)
    self.assertIn('lossy', report['config']['verify'])
    self.assertIn('lossy', out)

  def test_plots(self):
    if importlib.util.find_spec('matplotlib') is None:
      self.skipTest('matplotlib is not installed')
    paths = plots.write(self.report, str(self.folder))
    self.assertLen(paths, 4)
    for path in paths:
      self.assertStartsWith(path.read_bytes().decode('latin1'), '\x89PNG')
    self.assertEmpty(list(self.folder.glob('.*')))
    lines = plots.tokens_per_second(self.report).axes[0].get_lines()
    looks = {(line.get_marker(), str(line.get_linestyle())) for line in lines}
    self.assertGreaterEqual(len(looks), 4)


def _fake_of(name, job):
  # `Peer` itself is replaced while the benchmark runs.
  with mock.patch.object(peers, 'Peer', _PEER_CLASS):
    return fake_peer(name, job)


_PEER_CLASS = peers.Peer


class PassesTest(absltest.TestCase):
  def test_early_exit_makes_none_without_a_draft(self):
    for kind, passes in (
      (EarlyExit, [0, 1, 4]),
      (DraftModel, [1, 1, 4]),
      (Medusa, [1, 1, 1]),
    ):
      decoder = mock.Mock(proposer=mock.Mock(spec=kind))
      cell = bench_run.bench_cells.Cell(
        proposer='',
        num_draft_tokens=4,
        decoder=decoder,
        params={},
        batches=(),
      )
      self.assertEqual([cell.num_passes(n) for n in (0, 1, 4)], passes)


class PeerTest(parameterized.TestCase):
  def test_rounds_and_an_early_end(self):
    with fake_peer('transformers', {'prompts': [[1], [2]]}) as peer:
      for number in (1, 2, 3):
        modes = peer.round()['modes']
        self.assertEqual(modes[0]['seconds'], 2 * [0.5 * number])
      with self.assertRaisesRegex(ValueError, 'exit code 3 before it answered'):
        peer.round()

  @parameterized.parameters(
    ('print(\'{"error": "no such model."}\')', ': no such model[.]$'),
    ("print('hello')", "answered 'hello"),
    ("print('[1]')", 'answered'),
    ('', 'exit code 0 before it answered'),
  )
  def test_what_goes_wrong_is_said(self, code, message):
    with self.assertRaisesRegex(ValueError, message):
      fake_peer('transformers', {}, code)


class BadInputTest(parameterized.TestCase):
  @parameterized.parameters(
    (('--proposers=magic',), "--proposers must be some of none, .*'magic'"),
    (('--draft_lengths=0',), '--draft_lengths must be numbers in 1..64'),
    (('--draft_lengths=2,x',), "joined by commas, got 'x'"),
    (('--draft_lengths=',), 'must have at least one number'),
    (('--batch_sizes=0',), '--batch_sizes must be numbers in 1..65536'),
    (('--repeats=0',), 'repeats must be in 1..1000, got 0'),
    (('--max_new_tokens=0',), 'max_new_tokens must be at least 1, got 0'),
    (('--plots=nowhere',), '--plots'),
    (('--json_out=nowhere/x.json',), "cannot write 'nowhere/x.json'"),
    (('--peers_dtype=float32',), '--peers_dtype needs --peers'),
    (('--proposers=draft',), '--proposer=draft needs --draft'),
    (('--proposers=ngram', '--draft=demo:draft'), '--draft needs draft among'),
    (('--proposers=early_exit',), 'needs --exit_layer'),
    (('--verify=greedy', '--temperature=1'), '--verify=greedy needs temper'),
    (('--accept=1',), '--accept needs a temperature above 0, got 0'),
    (
      ('--accept=3', '--temperature=1', '--draft_lengths=2,4'),
      '--accept must be in 0..2, the least of --draft_lengths, got 3',
    ),
    (
      ('--accept=1', '--temperature=1', '--verify=block'),
      '--accept needs --verify=rejection, got block',
    ),
    (('--max_length=8',), 'at most 8 together [(]max_length[)], got 1[23]'),
    (('--stop=x',), 'unknown flag --stop'),
    (('--batch_size=2',), 'unknown flag --batch_size'),
    (('--target=nowhere',), "no such model 'nowhere'"),
  )
  def test_one_sentence(self, argv, message):
    code, out, err = run('--target=demo:target', '--prompt=a', *argv)
    self.assertEqual((code, out), (2, ''), err)
    self.assertRegex(err, rf'(?m)^benchmark\.py: .*{message}.*[.?]$')

  def test_a_peer_needs_files_and_greedy_text(self):
    with mock.patch.object(importlib.util, 'find_spec', return_value=None):
      with self.assertRaisesRegex(ValueError, 'needs the package torch'):
        peers.check('transformers', 'demo:target', None)
    with mock.patch.object(importlib.util, 'find_spec'):
      with self.assertRaisesRegex(ValueError, "got 'demo:target'"):
        peers.check('transformers', 'demo:target', None)
    with mock.patch.object(benchmark.peers, 'check'):
      code, _, err = run(
        *PAIR, '--prompt=a', '--peers=transformers', '--temperature=1'
      )
    self.assertEqual(code, 2)
    self.assertIn('--peers=transformers needs --temperature=0, got 1.0.', err)


if __name__ == '__main__':
  absltest.main()

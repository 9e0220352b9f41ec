"""Recorded runs, and replays that agree with new runs."""

import contextlib
import dataclasses
import functools
import io
import json
import pathlib
import tempfile
import zipfile
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import (
  conversions,
  generate,
  replay,
  replay_laws,
  script,
  trace_file,
)
from experiments.reproduce import definitions
from experiments.run_flags import FLAG_GROUPS
from specjax.testing import rules
from tests.experiments import tiny_files

K = 4
TEXTS = (
  'def f(x):\n',
  'class A:\n  def ',
  'import numpy as',
  '"""Returns the ',
  'for i in range(',
  '  if self.',
  'raise ValueError(',
  'x_BTV = jnp.',
)
_CACHED = mock.patch.object(
  conversions, 'load_model', functools.cache(conversions.load_model)
)


def setUpModule():
  _CACHED.start()


def tearDownModule():
  # Not a module cleanup: pytest does not run those.
  _CACHED.stop()


def run(folder, *flags, rows=()):
  """Exit code, stderr and the result of generate.py."""
  lines = pathlib.Path(folder, 'rows.jsonl')
  lines.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  out = pathlib.Path(folder, 'result.json')
  argv = [*flags, f'--prompts_jsonl={lines}', f'--json_out={out}']
  text, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(text), contextlib.redirect_stderr(err):
    code = script.run_main(generate.main, FLAG_GROUPS, argv)
  result = json.loads(out.read_text()) if out.exists() else None
  out.unlink(missing_ok=True)
  return code, err.getvalue(), result


def rows_of(temperature, first_seed=0):
  return [
    {'prompt': text, 'temperature': temperature, 'seed': first_seed + i}
    for i, text in enumerate(TEXTS)
  ]


def pair(verify, k=K):
  return (
    '--target=demo:target',
    '--draft=demo:draft',
    '--dtype=float32',
    f'--batch_size={len(TEXTS)}',
    '--max_new_tokens=40',
    '--max_length=64',
    f'--num_draft_tokens={k}',
    f'--verify={verify}',
  )


def table_trace(p, q, num_requests, num_tokens, seed=0):
  """A trace of independent tokens of one law, as a run would leave it."""
  rows = lambda law: np.tile(law, (len(law), 1))
  return chain_trace(rows(p), rows(q), num_requests, num_tokens, seed=seed)


def chain_trace(p_VV, q_VV, num_requests, num_tokens, heat=1.0, seed=0):
  """A trace of texts whose tokens depend on the one before, the first on 0."""
  rng = np.random.default_rng(seed)
  size, num = len(p_VV), num_requests * num_tokens
  heated = lambda law_VV: (
    np.power(law_VV, 1 / heat)
    / np.sum(np.power(law_VV, 1 / heat), axis=1, keepdims=True)
  )
  p_heat_VV, q_heat_VV = heated(p_VV), heated(q_VV)
  text = np.zeros((num_requests, num_tokens + 1), np.int32)
  for i in range(num_tokens):
    cumulated = np.cumsum(p_heat_VV[text[:, i]], axis=1)
    u = rng.random((num_requests, 1)) * cumulated[:, -1:]
    text[:, i + 1] = np.sum(cumulated <= u, axis=1)
  before, token = text[:, :-1].ravel(), text[:, 1:].ravel()
  each = lambda value, dtype: np.full(num_requests, value, dtype)
  zeros = lambda name, n: np.zeros(n, trace_file.DTYPES[name])
  log = lambda x: np.log(x).astype(np.float32)
  arrays = {
    **{name: zeros(name, num) for name in trace_file.DTYPES},
    **{name: zeros(name, 0) for name in trace_file.STEP_NAMES},
    'draft': np.zeros((0, K), np.int32),
    'prompt_length': each(1, np.int32),
    'prompt_token': each(0, np.int32),
    'num_tokens': each(num_tokens, np.int32),
    'seed': each(0, np.uint32),
    'temperature': each(heat, np.float32),
    'max_new_tokens': each(num_tokens, np.int32),
    'is_stopped': each(False, np.bool_),
    'token': token,
    'chosen_p': log(p_heat_VV[before, token]),
    'chosen_q': log(q_heat_VV[before, token]),
    'law_id': np.tile(np.arange(size, dtype=np.int32), (num, 1)),
    'law_p': log(p_VV[before]),
    'law_q': log(q_VV[before]),
  }
  about = {
    'config': {},
    'environment': {},
    'verify': 'rejection',
    'vocab_size': size,
    'num_draft_tokens': K,
    'options': [{}] * num_requests,
  }
  return trace_file.TraceFile(about=about, arrays=arrays)


class KnownLawTest(parameterized.TestCase):
  """Independent tokens, where each rule's acceptance is known."""

  P, Q = (0.4, 0.35, 0.15, 0.1), (0.1, 0.2, 0.3, 0.4)

  @parameterized.parameters(
    ('rejection', 1), ('rejection', 3), ('block', 2), ('block', 3)
  )
  def test_a_replay_accepts_what_the_rule_does(self, verify, k):
    trace = table_trace(self.P, self.Q, 60, 300)
    found = replay.replay(
      trace,
      replay.Cell(num_draft_tokens=k, verify=verify),
      samples=20,
      confidence=0.9999,
    )
    self.assertEqual(found.kind, 'law')
    law = rules.enumerate_rule(
      verify, lambda _: self.P, lambda _: self.Q, len(self.P), k
    )
    # The last steps of a text are shorter; 300 tokens make that small.
    value, low, high = found.figures['block_efficiency']
    self.assertAlmostEqual(value, 1 + law.expected_accepted, delta=0.04)
    self.assertBetween(1 + law.expected_accepted, low, high)
    self.assertLess(high - low, 0.2)
    alpha = float(np.minimum(self.P, self.Q).sum())
    if verify == 'rejection':
      self.assertAlmostEqual(
        found.figures['alpha_tested'][0], alpha, delta=0.01
      )
    np.testing.assert_allclose(found.alpha_tv, (alpha, alpha), atol=1e-6)

  def test_coupled_acceptance(self):
    trace = table_trace(self.P, self.Q, 200, 60)
    cell = replay.Cell(num_draft_tokens=2, verify='coupled')
    found = replay.replay(trace, cell, samples=20)
    # reproduce/coupling.py has the value.
    self.assertAlmostEqual(
      found.figures['alpha_tested'][0], 0.513579, delta=0.01
    )

  def test_another_temperature(self):
    trace = table_trace(self.P, self.Q, 100, 40)
    cell = replay.Cell(num_draft_tokens=2, verify='rejection', temperature=0.5)
    found = replay.replay(trace, cell, samples=20)
    self.assertEqual(found.kind, 'estimate')
    p, q = np.square(self.P), np.square(self.Q)
    alpha = np.minimum(p / p.sum(), q / q.sum()).sum()
    value, low, high = found.figures['alpha_tested']
    self.assertAlmostEqual(value, alpha, delta=0.02)
    self.assertBetween(alpha, low, high)

  def test_a_tail_bounds_the_overlap(self):
    trace = table_trace(self.P, self.Q, 2, 10)
    arrays = dict(trace.arrays)
    for name in ('law_id', 'law_p', 'law_q'):
      arrays[name] = arrays[name][:, :2]
    arrays['tail_p'][:], arrays['tail_q'][:] = 0.25, 0.7
    trace = dataclasses.replace(trace, arrays=arrays)
    cell = replay.Cell(num_draft_tokens=2, verify='rejection')
    found = replay.replay(trace, cell, samples=2)
    np.testing.assert_allclose(found.alpha_tv, (0.3, 0.55), atol=1e-6)

  def test_rules_that_stop(self):
    trace = table_trace(self.P, self.Q, 20, 40)
    play = lambda rule, **rest: replay.replay(
      trace,
      replay.Cell(num_draft_tokens=4, verify='rejection', stop_rule=rule),
      samples=10,
      **rest,
    )
    length = lambda found: found.figures['block_efficiency'][0]
    all_four = length(play('fixed'))
    # The draft's best id has 0.4: a lower level always drafts on.
    self.assertEqual(length(play('confidence:0.39')), all_four)
    # Behind the first draft it is unsure: alpha is the sum of min(p, q).
    self.assertAlmostEqual(length(play('confidence:0.41')), 1.55, delta=0.03)
    self.assertLess(length(play('acceptance')), all_four)
    # Drafts that cost as much as verifying are never made.
    self.assertEqual(
      length(play('cost', step_costs=(1.0, 2.0, 3.0, 4.0, 5.0))), 1.0
    )
    with self.assertRaisesRegex(ValueError, 'needs --step_costs'):
      play('cost')

  def test_a_stop_cuts_the_last_step(self):
    # Two tokens, the second a stop id, both drafted rightly, four drafts.
    trace = table_trace((0.5, 0.5), (0.5, 0.5), 3, 2)
    trace['max_new_tokens'][:] = 50
    trace['is_stopped'][:] = True
    cell = replay.Cell(num_draft_tokens=4, verify='rejection')
    found = replay.replay(trace, cell, samples=1)
    self.assertEqual(found.figures['block_efficiency'][0], 2.0)
    self.assertEqual(found.figures['draft_acceptance_rate'][0], 1.0)
    self.assertEqual(found.accepted_histogram, (0, 0, 1, 0, 0))


class OtherTemperatureTest(absltest.TestCase):
  """Texts in which the draft is right behind id 0 and wrong behind id 1."""

  P = np.array([[0.6, 0.3, 0.1], [0.3, 0.6, 0.1], [0.45, 0.45, 0.1]])
  Q = np.array([[0.6, 0.3, 0.1], [0.6, 0.2, 0.2], [0.1, 0.1, 0.8]])

  def replay(self, trace, temperature=0.5, verify='rejection'):
    cell = replay.Cell(
      num_draft_tokens=3, verify=verify, temperature=temperature
    )
    return replay.replay(trace, cell, samples=20)

  def test_texts_count_by_how_likely_they_are_there(self):
    trace = chain_trace(self.P, self.Q, 60, 40)
    fresh = chain_trace(self.P, self.Q, 400, 40, heat=0.5, seed=1)
    for verify in ('rejection', 'block'):
      found = self.replay(trace, verify=verify)
      true = self.replay(fresh, verify=verify)
      self.assertEqual((found.kind, true.kind), ('estimate', 'law'))
      self.assertGreater(found.window, 1)
      self.assertBetween(found.num_texts, 30, 60)
      for name in ('block_efficiency', 'alpha_tested'):
        value, low, high = found.figures[name]
        expected = true.figures[name][0]
        self.assertBetween(expected, low, high)
        as_recorded = self.replay(trace, None, verify).figures[name][0]
        # Without weights the estimate would go the other way.
        self.assertLess(abs(value - expected), 0.1, name)
        self.assertGreater(as_recorded, value)

  def test_too_few_texts_are_said_to_be_too_few(self):
    # Five hundred ids alike: a token of T = 1 is seldom one of T = 0.1.
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(500), size=1)
    q = rng.dirichlet(np.ones(500), size=1)
    trace = table_trace(p[0], q[0], 6, 5)
    found = self.replay(trace, temperature=0.1)
    self.assertLess(found.num_texts, 5)
    self.assertEqual(found.figures['alpha_tested'][1:], (None, None))
    self.assertIn('too few', replay.worth(found))
    self.assertIn(' - ', replay.table([found]))

  def test_requests_of_the_temperature_are_enough(self):
    traces = [
      chain_trace(self.P, self.Q, 3, 20, heat=heat) for heat in (1.0, 0.5)
    ]
    both = trace_file.TraceFile(
      about={**traces[0].about, 'options': [{}] * 6},
      arrays={
        name: np.concatenate([trace[name] for trace in traces])
        for name in trace_file.DTYPES
      },
    )
    for trace, temperature in zip(traces, (1.0, 0.5)):
      found = self.replay(both, temperature)
      self.assertEqual((found.kind, found.num_requests), ('law', 3))
      self.assertEqual(found.figures, self.replay(trace, temperature).figures)
    # Texts of a higher temperature hold what is likely at 0.7; colder ones lack
    # what is likely at 1.5, and have no interval.
    self.assertEqual(self.replay(both, 0.7).num_requests, 3)
    hotter = self.replay(both, 1.5)
    self.assertEqual((hotter.kind, hotter.num_requests), ('estimate', 6))
    self.assertEqual(hotter.figures['alpha_tested'][1:], (None, None))
    self.assertIn('too cold', replay.worth(hotter))
    steps = both.select(np.array([False, True, False, False, False, False]))
    self.assertEqual(steps['prompt_token'].shape, (1,))

  def test_one_text_per_prompt_says_nothing_of_other_temperatures(self):
    trace = table_trace((0.5, 0.5), (0.5, 0.5), 2, 3)
    trace['temperature'][:] = 0
    with self.assertRaisesRegex(ValueError, 'got --temperatures=0.5'):
      self.replay(trace)

  def test_a_single_request_has_no_interval(self):
    trace = table_trace((0.5, 0.5), (0.5, 0.5), 1, 9)
    self.assertEqual(
      self.replay(trace, None).figures['alpha_tested'], (1.0, None, None)
    )
    trace['temperature'][:] = 0
    found = self.replay(trace, 0)
    self.assertEqual(found.kind, 'exact')
    self.assertEqual(found.figures['alpha_tested'][1:], (None, None))


class FreshRunTest(parameterized.TestCase):
  """The demo pair, recorded, replayed, and run anew."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())

  def record(self, verify, temperature, *flags):
    path = f'{self.folder}/{verify}.npz'
    code, err, result = run(
      self.folder,
      *pair(verify),
      *flags,
      f'--record={path}',
      rows=rows_of(temperature),
    )
    self.assertEqual(code, 0, err)
    return path, trace_file.load(path), result['aggregate']

  def fresh(self, verify, k, temperature, first_seed=0):
    code, err, result = run(
      self.folder, *pair(verify, k), rows=rows_of(temperature, first_seed)
    )
    self.assertEqual(code, 0, err)
    return result['aggregate']

  def test_greedy_and_coupled_replays_are_exact(self):
    for temperature in (0.0, 1.0):
      _, trace, own = self.record('coupled', temperature)
      for k, figures in (
        (K, own),
        (2, self.fresh('coupled', 2, temperature)),
      ):
        cell = replay.Cell(num_draft_tokens=k, verify='coupled')
        found = replay.replay(trace, cell)
        self.assertEqual(found.kind, 'exact')
        for name in replay.FIGURES:
          value, low, high = found.figures[name]
          self.assertEqual(value, low)
          self.assertEqual(value, high)
          self.assertAlmostEqual(value, figures[name], places=12)
        shares = np.array(figures['accepted_histogram']) / figures['num_steps']
        np.testing.assert_allclose(found.accepted_histogram, shares)

  def test_how_many_drafts_confidence_made_is_guessed(self):
    _, trace, _ = self.record('coupled', 0.0)
    cell = replay.Cell(
      num_draft_tokens=K, verify='coupled', stop_rule='confidence:0.5'
    )
    found = replay.replay(trace, cell)
    self.assertEqual(found.kind, 'exact')
    self.assertEqual(found.figures['draft_acceptance_rate'][1:], (None, None))
    value, low, high = found.figures['block_efficiency']
    self.assertEqual((low, high), (value, value))

  def test_drafts_that_were_not_recorded_end_exactness(self):
    _, trace, own = self.record('coupled', 1.0, '--record_top=3')
    cell = replay.Cell(num_draft_tokens=K, verify='coupled')
    found = replay.replay(trace, cell)
    self.assertEqual(found.kind, 'estimate')
    value, low, high = found.figures['block_efficiency']
    self.assertEqual((low, high), (None, None))
    self.assertAlmostEqual(value, own['block_efficiency'], delta=0.5)
    self.assertIn('were not recorded', replay.worth(found))

  def test_below_temperature_1_a_tail_counts_by_its_likeliest_id(self):
    """One id in the tail may have nearly all of it, and then it is drawn."""
    law = np.array([0.5, 0.2, 0.2, *[0.1 / 997] * 997])
    trace = table_trace(law, law, 2, 3)
    arrays = dict(trace.arrays)
    for name in ('law_id', 'law_p', 'law_q'):
      arrays[name] = arrays[name][:, :2]
    for name in ('tail_p', 'tail_q'):
      arrays[name] = np.full(6, 0.3, np.float32)
    arrays['temperature'] = np.full(2, 0.5, np.float32)
    trace = dataclasses.replace(trace, arrays=arrays)
    # Of a tail of 0.3 an id has 0.2 at most, the least that is recorded.
    unseen = 0.3 * 0.2
    want = 6 * unseen / (0.5**2 + 0.2**2 + unseen)
    self.assertAlmostEqual(replay_laws._num_unseen(trace), want, places=5)

  def test_intervals_contain_fresh_runs(self):
    path, trace, own = self.record('rejection', 1.0)
    runs = [
      ('rejection', K, None, own),
      ('rejection', 2, None, self.fresh('rejection', 2, 1.0, 100)),
      ('block', K, None, self.fresh('block', K, 1.0, 200)),
      ('rejection', 2, 0.5, self.fresh('rejection', 2, 0.5, 300)),
      ('block', K, 0.5, self.fresh('block', K, 0.5, 400)),
    ]
    for verify, k, temperature, figures in runs:
      cell = replay.Cell(
        num_draft_tokens=k, verify=verify, temperature=temperature
      )
      found = replay.replay(trace, cell, confidence=0.99)
      self.assertEqual(found.kind, 'law' if temperature is None else 'estimate')
      for name in ('block_efficiency', 'alpha_tested'):
        value, low, high = found.figures[name]
        with self.subTest(name, verify=verify, k=k, temperature=temperature):
          # With 8 texts an interval of an estimate is wide, and says so.
          self.assertIsNotNone(low, found)
          self.assertBetween(figures[name], low, high)
    # The laws are those that the loop tested its drafts with.
    self.assertAlmostEqual(
      own['expected_acceptance'], found_alpha(trace), delta=1e-5
    )
    self.check_file(path, own)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      code = script.run_main(
        replay.main,
        replay.FLAG_GROUPS,
        [
          f'--trace={path}',
          '--draft_lengths=2',
          '--verify=block',
          f'--json_out={self.folder}/replay.json',
        ],
      )
    self.assertEqual(code, 0, err.getvalue())
    self.assertLen(out.getvalue().splitlines(), 2)
    report = json.loads(pathlib.Path(self.folder, 'replay.json').read_text())
    self.assertEqual(report['rows'][0]['kind'], 'law')

  def test_lookups_are_made_again(self):
    flags = lambda k, verify: (
      '--target=demo:target',
      '--proposer=ngram',
      '--dtype=float32',
      f'--batch_size={len(TEXTS)}',
      '--max_new_tokens=40',
      '--max_length=64',
      f'--num_draft_tokens={k}',
      f'--verify={verify}',
    )
    # Coupled text is the same for every K; that of the token rule is not.
    for verify, sizes in (('coupled', (K, 2)), ('rejection', (K,))):
      path = f'{self.folder}/ngram.npz'
      results = {}
      for k in sizes:
        code, err, result = run(
          self.folder,
          *flags(k, verify),
          *([f'--record={path}'] if k == K else []),
          rows=rows_of(1.0),
        )
        self.assertEqual(code, 0, err)
        results[k] = result['aggregate']
      trace = trace_file.load(path)
      self.assertTrue(np.all(np.isnan(trace['law_q'])))
      # There is no law to speak of, at temperature 0 either.
      self.assertIsNone(replay_laws.alpha_tv(trace, 0.0))
      self.assertNotIn('alpha_tv', definitions.measure(trace))
      self.assertNotIn('expected_acceptance', definitions.measure(trace))
      greedy = replay_laws.laws(trace, np.zeros(len(TEXTS), np.float32))[1]
      self.assertTrue(np.all(np.isnan(greedy)))
      for k, figures in results.items():
        cell = replay.Cell(num_draft_tokens=k, verify=verify)
        found = replay.replay(trace, cell)
        self.assertIsNone(found.alpha_tv)
        self.assertEqual(found.kind, {'coupled': 'exact'}.get(verify, 'law'))
        for name in replay.FIGURES:
          # Given the text, what is kept is certain.
          self.assertAlmostEqual(
            found.figures[name][0], figures[name], places=12
          )
      cell = replay.Cell(
        num_draft_tokens=2, verify='coupled', stop_rule='confidence:0.5'
      )
      with self.assertRaisesRegex(ValueError, 'needs logits of a draft'):
        replay.replay(trace, cell)

  def check_file(self, path, own):
    """NumPy alone reads the file, and its tables add up."""
    with np.load(path, allow_pickle=False) as data:
      self.assertEqual(data['accepted'].sum(), own['num_accepted'])
      self.assertEqual(data['drafted'].sum(), own['num_drafted'])
      self.assertEqual(data['emitted'].sum(), own['num_emitted'])
      self.assertLen(data['token'], own['num_emitted'])
      self.assertLen(data['drafted'], own['num_steps'])
      self.assertEqual(data['law_id'].shape[1], 256)
      total = np.exp(data['law_p']).sum(1) + data['tail_p']
      np.testing.assert_allclose(total, 1, atol=1e-5)
      about = json.loads(data['about'].tobytes())
    self.assertEqual(about['version'], trace_file.VERSION)
    self.assertEqual(about['config']['verify'], 'rejection')


def found_alpha(trace):
  """Mean overlap at the drafts that the recorded run tested."""
  overlap = np.exp(np.minimum(trace['law_p'], trace['law_q'])).sum(1)
  begin = trace.begin
  place = dict.fromkeys(range(trace.num_requests), 0)
  tested = []
  order = np.lexsort((trace['step_index'], trace['step_request']))
  for i in order:
    request = int(trace['step_request'][i])
    start = int(begin[request]) + place[request]
    place[request] += int(trace['emitted'][i])
    num = min(trace['accepted'][i] + 1, trace['drafted'][i])
    tested += overlap[start : start + num].tolist()
  return np.mean(tested)


class EarlyExitTest(absltest.TestCase):
  def test_a_target_can_be_its_own_draft(self):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    changes = {'num_hidden_layers': 2}
    target = tiny_files.write_folder(
      pathlib.Path(folder, 'target'),
      weights=tiny_files.tensors({**tiny_files.CONFIG, **changes}),
      **changes,
    )
    path = f'{folder}/run.npz'
    code, err, result = run(
      folder,
      f'--target={target}',
      '--proposer=early_exit',
      '--exit_layer=1',
      '--dtype=float32',
      '--num_draft_tokens=2',
      '--max_new_tokens=9',
      '--temperature=0.7',
      '--frequency_penalty=0.3',
      '--top_k=7',
      '--ignore_eos',
      f'--record={path}',
      '--record_top=5',
      rows=[{'prompt': 'a ba'}, {'prompt': 'aa'}],
    )
    self.assertEqual(code, 0, err)
    trace = trace_file.load(path)
    own = [r['metrics']['num_emitted'] for r in result['requests']]
    self.assertEqual(trace['num_tokens'].tolist(), own)
    self.assertEqual(trace['law_id'].shape, (sum(own), 5))
    # Tokens were drawn, so the law they were drawn from allows them.
    self.assertTrue(np.all(trace['chosen_p'] > -20))
    found = replay.replay(
      trace, replay.Cell(num_draft_tokens=2, verify='block')
    )
    self.assertEqual(found.kind, 'law')
    self.assertIsNone(found.alpha_tv)
    cell = replay.Cell(num_draft_tokens=2, verify='block', temperature=1.0)
    with self.assertRaisesRegex(ValueError, 'got top_k = 7 in request 0'):
      replay.replay(trace, cell)


class BadInputTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = self.enterContext(tempfile.TemporaryDirectory())
    self.path = f'{self.folder}/a.npz'

  def refused(self, main, groups, argv, fragment):
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
      self.assertEqual(script.run_main(main, groups, argv), script.BAD_INPUT)
    self.assertIn(fragment, err.getvalue())
    self.assertLen(err.getvalue().splitlines(), 1)

  @parameterized.parameters(
    ((), '--trace must name a file'),
    (('--trace=nowhere.npz',), "cannot open 'nowhere.npz'"),
    (('--trace=x', '--samples=0'), '--samples must be >= 1, got 0'),
    (('--trace=x', '--seed=-1'), '--seed must be >= 0, got -1'),
    (('--trace=x', '--confidence=1'), '--confidence must be above 0'),
    (('--trace=x', '--draft_lengths=0'), "numbers in 1..64, got '0'"),
    (('--trace=x', '--draft_lengths='), 'got none in one of them'),
    (('--trace=x', '--verify=tree'), "block, got 'tree'"),
    (('--trace=x', '--temperatures=-1'), "[0, 1e6], got '-1'"),
    (('--trace=x', '--stop_rules=never'), "or cost, got 'never'"),
    (('--trace=x', '--step_costs=1,2'), 'cost, got --stop_rules=fixed'),
  )
  def test_flags_of_replay(self, argv, fragment):
    self.refused(replay.main, replay.FLAG_GROUPS, argv, fragment)

  @parameterized.parameters(
    (('--proposer=none',), 'got none, which drafts nothing'),
    (
      ('--proposer=slem', '--draft=demo:draft'),
      'got slem, which drafts text on the host',
    ),
    (('--draft=demo:draft', '--record_top=-1'), 'must be >= 0, got -1'),
    (('--draft=demo:draft', '--record=a.json'), "got 'a.json'"),
  )
  def test_flags_of_generate(self, argv, fragment):
    argv = (
      '--target=demo:target',
      '--prompt=a',
      f'--record={self.path}',
      *argv,
    )
    self.refused(generate.main, FLAG_GROUPS, argv, fragment)
    self.assertFalse(pathlib.Path(self.path).exists())

  def test_files_that_are_no_traces(self):
    trace = table_trace((0.5, 0.5), (0.5, 0.5), 2, 3)
    trace_file.save(self.path, trace)
    self.assertEqual(trace_file.load(self.path).num_requests, 2)
    whole = pathlib.Path(self.path).read_bytes()

    def broken(**changes):
      arrays = {**trace.arrays, **changes}
      arrays = {n: value for n, value in arrays.items() if value is not None}
      return dataclasses.replace(trace, arrays=arrays)

    law_names = ('law_id', 'law_p', 'law_q')

    def about(**changes):
      return dataclasses.replace(trace, about={**trace.about, **changes})

    def step(**numbers):
      row = {
        n: np.zeros(1, trace_file.DTYPES[n]) for n in trace_file.STEP_NAMES
      }
      row |= {'draft': np.zeros((1, K), np.int32)}
      numbers = {'drafted': 1, **numbers}
      row |= {n: np.array([i], np.int32) for n, i in numbers.items()}
      return broken(**row)

    trace_file.save(self.path, step(accepted=1, emitted=1))
    trace_file.load(self.path)
    for wrong, message in (
      (broken(token=None), 'token is missing'),
      (broken(token=np.zeros(6)), 'token must be int32'),
      (
        broken(prompt_token=np.zeros(3, np.int32)),
        'prompt_token must have 2 rows',
      ),
      (broken(step=np.zeros(5, np.int32)), 'step must have 6 rows'),
      (
        broken(num_tokens=np.array([3, 4], np.int32)),
        'token must have 7 rows',
      ),
      (broken(num_tokens=np.array([-1, 7], np.int32)), 'not be negative'),
      (broken(law_p=np.zeros((6, 3), np.float32)), r'law_p must be \[6, 2\]'),
      (broken(law_id=np.int32(0)), 'law_id must have 2 axes'),
      (broken(seed=np.uint32(0)), 'seed must have 1 axes'),
      (broken(token=np.full(6, 2, np.int32)), 'token must be in the vocab'),
      (about(vocab_size='2'), 'vocab_size must be a whole number > 0'),
      (about(num_draft_tokens=True), 'num_draft_tokens must be a whole number'),
      (about(config=[]), 'config must be an object'),
      (about(config={'proposer': 'ngram'}), 'ngram_min must be a whole number'),
      (about(verify=None), 'verify must be a text'),
      (about(vocab_size=1 << 31), 'vocab_size must be <= 16777216'),
      (about(num_draft_tokens=65), 'num_draft_tokens must be <= 64'),
      (broken(law_id=np.zeros((6, 2), np.int32)), 'name an id once'),
      (broken(temperature=np.full(2, np.nan, np.float32)), 'temperature must'),
      (
        broken(chosen_p=np.full(6, np.nan, np.float32)),
        'chosen_p must be <= 0',
      ),
      (broken(tail_p=np.full(6, 2, np.float32)), r'tail_p must be in 0\.\.1'),
      (
        broken(
          **{name: np.zeros((6, 0), trace[name].dtype) for name in law_names}
        ),
        'law_id must have a column',
      ),
      (about(options=[]), 'one object per request'),
      (step(accepted=2, emitted=2), 'accepted must be <= drafted, emitted'),
      (step(accepted=1), 'accepted must be <= drafted, emitted'),
      (step(drafted=K + 1), 'accepted must be <= drafted, emitted and K'),
    ):
      trace_file.save(self.path, wrong)
      with self.assertRaisesRegex(ValueError, message):
        trace_file.load(self.path)
    np.savez(self.path, x=np.zeros(2))
    with self.assertRaisesRegex(ValueError, 'it has no array named about'):
      trace_file.load(self.path)
    with zipfile.ZipFile(self.path, 'w') as archive:
      header = io.BytesIO()
      np.lib.format.write_array_header_1_0(
        header,
        {'descr': '<f8', 'fortran_order': False, 'shape': (10**12,)},
      )
      archive.writestr('token.npy', header.getvalue())
    with self.assertRaisesRegex(ValueError, 'shorter than its header says'):
      trace_file.load(self.path)
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(2))
    np_bytes = buffer.getvalue()
    for data, message in (
      (b'nothing', 'is no trace'),
      (whole[: len(whole) // 2], 'is no trace'),
      (np_bytes + whole, 'is no trace'),
      # Inside the first array's packed bytes, behind its name.
      (whole[:60] + bytes(20) + whole[80:], 'is no trace'),
    ):
      pathlib.Path(self.path).write_bytes(data)
      with self.assertRaisesRegex(ValueError, message):
        trace_file.load(self.path)
    with mock.patch.object(trace_file, 'VERSION', 1):
      trace_file.save(self.path, trace)
    with self.assertRaisesRegex(ValueError, 'of version 2, got 1'):
      trace_file.load(self.path)
    pathlib.Path(self.path).write_bytes(whole)
    with mock.patch.object(trace_file, '_MOST_BYTES', 10):
      with self.assertRaisesRegex(ValueError, 'at most 10 are read'):
        trace_file.load(self.path)


if __name__ == '__main__':
  absltest.main()

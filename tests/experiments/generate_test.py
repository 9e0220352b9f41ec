"""The program people run, on the demo pair, from flags to result file."""

import contextlib
import dataclasses
import io
import json
import math
import pathlib
import re
import tempfile
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import conversions, generate, script, trace
from experiments.run_flags import FLAG_GROUPS
from specjax import state as states
from specjax import testing
from specjax.models import load
from specjax.tokenizers import ByteTokenizer

K = 4
# One rule, buffer length and batch size where possible: a loop compiles once
# for each. Coupled text at temperature 0 is the greedy text. Without braces and
# backslashes in the text, the marks of a trace can be told from it.
SIZES = (
  '--verify=coupled',
  f'--num_draft_tokens={K}',
  '--max_length=96',
  '--banned_ids=92,123,125',
)
PAIR = ('--target=demo:target', '--draft=demo:draft', *SIZES)
PLAIN = ('--target=demo:target', *SIZES)
NGRAM = (*PLAIN, '--proposer=ngram')
PROMPT = '  def __post_init__(self):\n    '

REQUEST_NAMES = {
  'prompt',
  'prompt_tokens',
  'text',
  'tokens',
  'finish_reason',
  'seed',
  'logprobs',
  'metrics',
}
COUNTS = {'num_steps', 'num_drafted', 'num_accepted', 'num_emitted'}
RATIOS = {
  'block_efficiency',
  'mean_acceptance_length',
  'draft_acceptance_rate',
  'alpha_tested',
  'expected_acceptance',
}
LISTS = {
  'acceptance_per_position': K,
  'acceptance_conditional': K,
  'accepted_histogram': K + 1,
}
SECONDS = {
  'seconds_load',
  'seconds_compile',
  'seconds_prefill',
  'seconds_decode',
}


class Run:
  """What a run left behind."""

  def __init__(self, *argv, rows=None):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder, 'result.json')
      argv = [*argv, f'--json_out={path}']
      if rows is not None:
        lines = pathlib.Path(folder, 'rows.jsonl')
        lines.write_text(''.join(json.dumps(row) + '\n' for row in rows))
        argv.append(f'--prompts_jsonl={lines}')
      out, err = io.StringIO(), io.StringIO()
      with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        self.code = script.run_main(generate.main, FLAG_GROUPS, argv)
      self.out, self.err = out.getvalue(), err.getvalue()
      assert self.code == 0, self.err
      # Strict JSON: a NaN would be refused here.
      self.report = json.loads(path.read_text(), parse_constant=self._refuse)
    self.requests = self.report['requests']
    self.texts = [request['text'] for request in self.requests]
    self.tokens = [request['tokens'] for request in self.requests]
    self.metrics = [request['metrics'] for request in self.requests]

  @staticmethod
  def _refuse(constant):
    raise AssertionError(f'{constant} in JSON')


def check_identities(case: absltest.TestCase, m: dict):
  """What must hold between the figures of any request."""
  histogram = m['accepted_histogram']
  case.assertEqual(sum(histogram), m['num_steps'])
  case.assertEqual(
    sum(i * n for i, n in enumerate(histogram)), m['num_accepted']
  )
  own = m['num_emitted'] - m['num_accepted']
  case.assertBetween(own, 0, m['num_steps'])
  case.assertLessEqual(m['num_accepted'], m['num_drafted'])
  if m['num_steps']:
    case.assertAlmostEqual(
      m['block_efficiency'], m['num_emitted'] / m['num_steps']
    )
  else:
    case.assertIsNone(m['block_efficiency'])
  if m['num_drafted']:
    survival = m['acceptance_per_position']
    case.assertAlmostEqual(m['mean_acceptance_length'], 1 + sum(survival))
    case.assertAlmostEqual(
      m['draft_acceptance_rate'], m['num_accepted'] / m['num_drafted']
    )
    case.assertEqual(survival, sorted(survival, reverse=True))
  else:
    case.assertIsNone(m['draft_acceptance_rate'])
    case.assertIsNone(m['mean_acceptance_length'])


class ReportTest(parameterized.TestCase):
  def check_metrics(self, m, k):
    self.assertContainsSubset(COUNTS | RATIOS | SECONDS | set(LISTS), m)
    for name in COUNTS:
      self.assertIs(type(m[name]), int, name)
    for name in RATIOS:
      self.assertIsInstance(m[name], (float, type(None)), name)
    for name, length in LISTS.items():
      self.assertLen(m[name], length - K + k, name)
    for name in SECONDS:
      self.assertIs(type(m[name]), float, name)
      self.assertGreaterEqual(m[name], 0)
    check_identities(self, m)

  @parameterized.named_parameters(
    ('draft', PAIR, K), ('plain', PLAIN, 0), ('ngram', NGRAM, K)
  )
  def test_the_result_is_as_the_contract_says(self, flags, k):
    run = Run(*flags, f'--prompt={PROMPT}', '--max_new_tokens=24')
    self.assertCountEqual(
      run.report, ('config', 'environment', 'requests', 'aggregate')
    )
    self.assertLen(run.requests, 1)
    request = run.requests[0]
    self.assertEqual(set(request), REQUEST_NAMES)
    self.assertEqual(request['prompt'], PROMPT)
    self.assertEqual(request['prompt_tokens'], [256, *PROMPT.encode()])
    self.assertEqual(bytes(request['tokens']).decode(), request['text'])
    self.assertLen(request['tokens'], 24)
    self.assertEqual(request['finish_reason'], 'length')
    self.assertEqual(request['seed'], 0)
    self.assertIsNone(request['logprobs'])
    self.check_metrics(request['metrics'], k)
    aggregate = dict(run.report['aggregate'])
    speed = aggregate.pop('tokens_per_second')
    self.assertAlmostEqual(speed, 24 / aggregate['seconds_decode'], delta=1e-6)
    self.assertEqual(aggregate, request['metrics'])
    config = run.report['config']
    self.assertEqual(config['target'], 'demo:target')
    self.assertEqual(config['num_draft_tokens'], K)
    self.assertEqual(config['verify'], 'coupled')
    self.assertEqual(config['options']['temperature'], 0.0)
    for name in ('jax', 'device_kind', 'git_revision', 'git_clean', 'python'):
      self.assertIn(name, run.report['environment'])
    self.assertEqual(run.out, request['text'] + '\n')
    self.assertRegex(run.err, r'24 tokens in \d+ steps .* tokens/s on cpu; ')

  @parameterized.parameters((0.0, 'greedy'), (0.5, 'rejection'))
  def test_the_rule_follows_the_temperatures(self, temperature, rule):
    run = Run(
      '--target=demo:target',
      '--max_new_tokens=2',
      rows=[{'prompt': 'a'}, {'prompt': 'b', 'temperature': temperature}],
    )
    self.assertEqual(run.report['config']['verify'], rule)

  def test_greedy_text_does_not_depend_on_the_proposer(self):
    runs = [
      Run(*flags, f'--prompt={PROMPT}', '--max_new_tokens=24')
      for flags in (PLAIN, PAIR, NGRAM)
    ]
    self.assertEqual(runs[0].tokens, runs[1].tokens)
    self.assertEqual(runs[0].tokens, runs[2].tokens)
    self.assertEqual(runs[0].metrics[0]['num_steps'], 24)
    self.assertEqual(runs[0].metrics[0]['num_drafted'], 0)
    self.assertEqual(runs[0].metrics[0]['block_efficiency'], 1.0)
    self.assertGreater(runs[1].metrics[0]['num_accepted'], 0)
    self.assertLess(runs[1].metrics[0]['num_steps'], 24)
    # What an n-gram proposes was not drawn from a law.
    self.assertIsNone(runs[2].metrics[0]['expected_acceptance'])
    self.assertIsNotNone(runs[1].metrics[0]['expected_acceptance'])

  def test_coupled_text_is_that_of_plain_sampling_with_the_seed(self):
    sampled = (
      '--temperature=1.2',
      '--top_p=0.99',
      '--prompt=x',
      '--max_new_tokens=24',
    )
    for seed in (7, 2**32 - 1):
      runs = [
        Run(*flags, *sampled, f'--seed={seed}')
        for flags in (PLAIN, PAIR, NGRAM)
      ]
      with self.subTest(seed):
        self.assertEqual(runs[0].tokens, runs[1].tokens)
        self.assertEqual(runs[0].tokens, runs[2].tokens)
        self.assertEqual(runs[0].requests[0]['seed'], seed)
    other = Run(*PLAIN, *sampled, '--seed=8')
    self.assertNotEqual(other.tokens, runs[0].tokens)

  def test_logprobs_are_those_of_the_target_itself(self):
    run = Run(
      *PAIR,
      '--temperature=0.9',
      f'--prompt={PROMPT}',
      '--max_new_tokens=24',
      '--logprobs',
      '--dtype=float32',
    )
    request = run.requests[0]
    self.assertLen(request['logprobs'], len(request['tokens']))
    # One pass of the target over the whole text.
    target = load.load('demo:target', 'float32')
    ids = [*request['prompt_tokens'], *request['tokens']]
    tokens_1T = jnp.asarray([ids], jnp.int32)
    cache = target.model.init_cache(1, len(ids), 0)
    hidden, _ = target.model.apply(target.params, tokens_1T, cache)
    logits_TV = target.model.unembed(target.params, hidden.last_BTD)[0]
    logits_TV = np.asarray(logits_TV, np.float64)
    log_z_T = np.log(np.sum(np.exp(logits_TV), axis=-1))
    start = len(request['prompt_tokens'])
    expected = [
      logits_TV[start + i - 1, token] - log_z_T[start + i - 1]
      for i, token in enumerate(request['tokens'])
    ]
    np.testing.assert_allclose(request['logprobs'], expected, atol=1e-4)


class LimitsTest(parameterized.TestCase):
  def test_a_stop_id_is_the_last_token_and_no_text(self):
    argv = (f'--prompt={PROMPT}', '--max_new_tokens=24')
    text = Run(*PLAIN, *argv).texts[0]
    for index in range(12):
      end = text.index(text[index])
      for flags in (PAIR, PLAIN, NGRAM):
        run = Run(*flags, *argv, f'--stop_ids=0,{ord(text[index])}')
        self.assertEqual(bytes(run.tokens[0]).decode(), text[: end + 1])
        self.assertEqual(run.texts[0], text[:end])
        self.assertEqual(run.requests[0]['finish_reason'], 'stop')
        check_identities(self, run.metrics[0])
        self.assertEqual(run.metrics[0]['num_emitted'], end + 1)

  def test_a_stop_string_cuts_at_every_place_in_a_block(self):
    free = Run(*PAIR, f'--prompt={PROMPT}', '--max_new_tokens=24')
    text = free.texts[0]
    for start in range(1, 12):
      stop = text[start : start + 3]
      first = text.index(stop)
      run = Run(
        *PAIR, f'--prompt={PROMPT}', '--max_new_tokens=24', f'--stop={stop}'
      )
      with self.subTest(stop):
        self.assertEqual(run.texts[0], text[:first])
        self.assertEqual(run.tokens[0], free.tokens[0][: first + len(stop)])
        self.assertEqual(run.requests[0]['finish_reason'], 'stop')
        m = run.metrics[0]
        check_identities(self, m)
        self.assertEqual(m['num_emitted'], first + len(stop))
        # No draft behind the cut is counted.
        self.assertLessEqual(m['num_drafted'], free.metrics[0]['num_drafted'])

  def test_the_stop_string_that_completes_first_wins(self):
    free = Run(*PAIR, f'--prompt={PROMPT}', '--max_new_tokens=24').texts[0]
    stops = free[9:11], free[2:6], free[3:6], free[12:14]
    run = Run(
      *PAIR,
      f'--prompt={PROMPT}',
      '--max_new_tokens=24',
      *(f'--stop={stop}' for stop in stops),
    )
    # Of two that complete at one place the longer.
    ends = [(free.index(stop) + len(stop), -len(stop)) for stop in stops]
    end, minus_length = min(ends)
    self.assertEqual(run.texts[0], free[: end + minus_length])
    self.assertLen(run.tokens[0], end)

  def test_limits_cut_the_plain_text(self):
    free = Run(*PLAIN, f'--prompt={PROMPT}', '--max_new_tokens=24').tokens[0]
    for n in (0, 1, K - 1, K, K + 1, K + 2, 2 * K + 1):
      run = Run(*PAIR, f'--prompt={PROMPT}', f'--max_new_tokens={n}')
      with self.subTest(n):
        self.assertEqual(run.tokens[0], free[:n])
        self.assertEqual(run.requests[0]['finish_reason'], 'length')
        check_identities(self, run.metrics[0])

  def test_nothing_is_asked_for(self):
    run = Run(*PAIR, f'--prompt={PROMPT}', '--max_new_tokens=0', '--logprobs')
    self.assertEqual(run.texts, [''])
    self.assertEqual(run.tokens, [[]])
    self.assertEqual(run.requests[0]['logprobs'], [])
    self.assertEqual(run.metrics[0]['num_steps'], 0)
    self.assertIsNone(run.metrics[0]['block_efficiency'])
    self.assertEqual(run.report['aggregate']['tokens_per_second'], 0)
    self.assertEqual(run.out, '\n')

  def test_the_end_of_the_buffer(self):
    prompt = 'x' * 90  # With the token that begins a text, 91 of 96.
    for flags in (PAIR, PLAIN):
      run = Run(*flags, f'--prompt={prompt}', '--max_new_tokens=24')
      self.assertLen(run.tokens[0], 5)
      self.assertEqual(run.requests[0]['finish_reason'], 'context')
    run = Run(*PAIR, f'--prompt={prompt}', '--max_new_tokens=5')
    self.assertEqual(run.requests[0]['finish_reason'], 'length')
    run = Run(*PAIR, f'--prompt={"x" * 95}', '--max_new_tokens=5')
    self.assertEqual(run.tokens, [[]])
    self.assertEqual(run.requests[0]['finish_reason'], 'context')

  def test_the_end_of_text_ends_and_is_no_text(self):
    only_eos = ('--allowed_ids=256', '--max_new_tokens=3')
    run = Run(*PAIR, f'--prompt={PROMPT}', *only_eos)
    self.assertEqual((run.tokens, run.texts), ([[256]], ['']))
    self.assertEqual(run.requests[0]['finish_reason'], 'stop')
    run = Run(*PAIR, f'--prompt={PROMPT}', *only_eos, '--ignore_eos')
    self.assertEqual((run.tokens, run.texts), ([[256] * 3], ['']))
    self.assertEqual(run.requests[0]['finish_reason'], 'length')

  def test_an_empty_prompt_is_the_token_that_begins_a_text(self):
    run = Run(*PAIR, '--prompt=', '--max_new_tokens=6')
    self.assertEqual(run.requests[0]['prompt_tokens'], [256])
    self.assertLen(run.tokens[0], 6)


class RowsTest(parameterized.TestCase):
  ROWS = (
    {'prompt': 'def ', 'max_new_tokens': 20},
    {'question': 'import jax', 'temperature': 0.8, 'seed': 11},
    {'prompt': 'class ', 'temperature': 1.5, 'top_k': 3, 'max_new_tokens': 9},
    {'turns': ['  return'], 'temperature': 1, 'top_p': 0.5, 'min_p': 0.1},
    {'prompt': '  """', 'stop': ['"""', '.'], 'repetition_penalty': 1.3},
    {
      'prompt': 'x = ',
      'stop': '\n',
      'presence_penalty': 0.5,
      'frequency_penalty': 0.5,
      'temperature': None,
      'seed': None,
    },
  )
  SETTINGS = ('--max_new_tokens=16', '--seed=3', '--ignore_eos')

  def test_each_row_has_its_own_settings_and_seed(self):
    run = Run(*PAIR, *self.SETTINGS, '--batch_size=3', rows=self.ROWS)
    self.assertEqual(
      [request['seed'] for request in run.requests], [3, 11, 5, 6, 7, 8]
    )
    self.assertEqual(
      [request['prompt'] for request in run.requests],
      ['def ', 'import jax', 'class ', '  return', '  """', 'x = '],
    )
    lengths = [len(tokens) for tokens in run.tokens]
    self.assertEqual(lengths[:4], [20, 16, 9, 16])
    self.assertNotIn('"""', run.texts[4])
    self.assertNotIn('.', run.texts[4])
    self.assertNotIn('\n', run.texts[5])
    self.assertEqual(run.out, ''.join(text + '\n' for text in run.texts))
    total = run.report['aggregate']
    for name in COUNTS:
      self.assertEqual(total[name], sum(m[name] for m in run.metrics))
    check_identities(self, total)
    for m in run.metrics:
      check_identities(self, m)
    # Compilation is counted once, loading is the run's.
    compiles = [m['seconds_compile'] for m in run.metrics]
    self.assertEqual(compiles[3:], [0, 0, 0])
    self.assertEqual(compiles[0], total['seconds_compile'])

  def test_a_batch_does_not_change_its_rows(self):
    together = Run(*PAIR, *self.SETTINGS, '--batch_size=3', rows=self.ROWS)
    alone = Run(*PAIR, *self.SETTINGS, '--batch_size=1', rows=self.ROWS)
    plain = Run(*PLAIN, *self.SETTINGS, '--batch_size=3', rows=self.ROWS)
    self.assertEqual(together.tokens, alone.tokens)
    self.assertEqual(together.texts, alone.texts)
    self.assertEqual(together.tokens, plain.tokens)

  def test_limit_takes_the_first_rows(self):
    run = Run(*PAIR, '--limit=2', rows=[{'prompt': c} for c in 'abc'])
    self.assertEqual([r['prompt'] for r in run.requests], ['a', 'b'])

  def test_a_turn_sees_the_answers_before_it(self):
    rows = [{'turns': ['def f', '\n\ndef g', '\n']}, {'turns': ['class']}]
    run = Run(*PAIR, '--max_new_tokens=6', rows=rows)
    self.assertLen(run.requests, 4)
    # A row's turns stand together, in the order of the input.
    first, second, third, other = run.requests
    self.assertEqual(other['prompt'], 'class')
    self.assertEqual(second['prompt'], f'def f{first["text"]}\n\ndef g')
    self.assertEqual(third['prompt'], f'{second["prompt"]}{second["text"]}\n')
    self.assertEqual(
      third['prompt_tokens'], [256, *third['prompt'].encode('utf-8')]
    )
    # The same as asking for the last turn alone.
    again = Run(*PAIR, '--max_new_tokens=6', f'--prompt={third["prompt"]}')
    self.assertEqual(again.tokens[0], third['tokens'])

  def test_a_turn_without_room_ends_its_row_alone(self):
    rows = [{'turns': ['abc', 'x' * 50, 'y']}, {'turns': ['a', 'b', 'c']}]
    run = Run(*PAIR, '--max_new_tokens=6', '--max_length=40', rows=rows)
    reasons = [r['finish_reason'] for r in run.requests]
    self.assertEqual(reasons, ['length', 'context'] + ['length'] * 3)
    self.assertEqual(run.tokens[1], [])
    self.assertEqual(run.metrics[1]['num_steps'], 0)

  def test_turns_find_room_however_long_the_answers_read(self):
    # Each of these bytes is half a character: read again, it is three bytes.
    run = Run(
      '--target=demo:target',
      '--num_draft_tokens=4',
      '--allowed_ids=255',
      '--max_new_tokens=50',
      rows=[{'turns': ['a', 'b']}],
    )
    self.assertEqual(run.texts, ['\ufffd' * 50] * 2)
    self.assertLen(run.requests[1]['prompt_tokens'], 1 + 1 + 3 * 50 + 1)
    self.assertEqual(run.requests[1]['finish_reason'], 'length')


class ShownTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('to_the_limit', ()),
    ('stop_string', ('--stop=self',)),
    ('stop_id', ('--stop_ids=10',)),
    ('nothing', ('--max_new_tokens=0',)),
    ('half_characters', ('--allowed_ids=195,164,226', '--temperature=1')),
    ('specials', ('--allowed_ids=256,97', '--temperature=1', '--ignore_eos')),
  )
  def test_the_stream_is_the_text(self, flags):
    argv = (*PAIR, f'--prompt={PROMPT}')
    argv = (*argv, '--max_new_tokens=24', *flags)
    run = Run(*argv, '--stream')
    self.assertEqual(run.out, run.texts[0] + '\n')
    self.assertEqual(run.tokens, Run(*argv).tokens)
    self.assertEqual(run.texts, Run(*argv).texts)

  def test_the_stream_of_several_rows(self):
    rows = [{'prompt': 'def ', 'stop': '('}, {'prompt': 'class '}]
    argv = (*PAIR, '--max_new_tokens=24')
    run = Run(*argv, '--stream', rows=rows)
    self.assertEqual(run.out, f'{run.texts[0]}\n{run.texts[1]}\n')

  def trace_lines(self, run):
    legend, *lines = run.out.split('\n')
    self.assertEqual(
      legend,
      'each line is a step: accepted, {-rejected-}, {+correction+}, {*bonus*}',
    )
    return [line for line in lines if re.match(r' *\d+ \| ', line)]

  @parameterized.named_parameters(('draft', PAIR), ('ngram', NGRAM))
  def test_the_trace_tells_the_text(self, flags):
    run = Run(*flags, f'--prompt={PROMPT}', '--max_new_tokens=24', '--trace')
    lines = self.trace_lines(run)
    m = run.metrics[0]
    self.assertLen(lines, m['num_steps'])
    told, num_rejected = '', 0
    for i, line in enumerate(lines):
      self.assertEqual(int(line[:4]), i)
      step = line[7:].replace('\\n', '\n')
      rejected = re.findall(r'(?s){-(.*?)-}', step)
      own = re.findall(r'{[+*]', step)
      # A correction follows a rejection, a bonus a whole draft.
      self.assertEqual(own, ['{+' if rejected else '{*'])
      num_rejected += sum(map(len, rejected))
      told += re.sub(r'(?s){-.*?-}|{[+*]|[+*]}', '', step)
    self.assertEqual(told, run.texts[0])
    self.assertEqual(num_rejected, m['num_drafted'] - m['num_accepted'])
    self.assertEndsWith(run.out, f'{run.texts[0]}\n')

  def test_the_trace_ends_at_a_stop_id(self):
    argv = (*PAIR, f'--prompt={PROMPT}', '--max_new_tokens=24', '--trace')
    free = Run(*argv).texts[0]
    for char in sorted({*free[:12]}):
      run = Run(*argv, f'--stop_ids={ord(char)}')
      lines = self.trace_lines(run)
      told = re.sub(r'{-.*?-}|{[+*]|[+*]}', '', ''.join(x[7:] for x in lines))
      with self.subTest(char):
        self.assertEqual(told.replace('\\n', '\n'), run.texts[0] + char)
        # A stop among the drafts rejects none of those behind it.
        last = lines[-1]
        self.assertEqual('{-' in last, '{+' in last)

  def test_the_trace_of_a_batch(self):
    info = states.StepInfo(
      draft_BK=np.array([list(b'abcd'), list(b'ef\n\0'), [0] * 4]),
      num_draft_B=np.array([4, 3, 4]),
      num_accepted_B=np.array([2, 3, 0]),
      tokens_BN=np.array([list(b'abX\0\0'), list(b'ef\nY\0'), [0] * 5]),
      num_emitted_B=np.array([3, 4, 0]),
    )
    out = io.StringIO()
    show = trace.Trace(ByteTokenizer(), out, is_coloured=False, num_rows=3)
    show(info)
    show(info)
    # The third row is finished.
    self.assertEqual(
      out.getvalue(),
      '   0 row 0 | ab{-cd-}{+X+}\n'
      '   0 row 1 | ef\\n{*Y*}\n'
      '   1 row 0 | ab{-cd-}{+X+}\n'
      '   1 row 1 | ef\\n{*Y*}\n',
    )
    out = io.StringIO()
    trace.Trace(ByteTokenizer(), out, is_coloured=True, num_rows=1)(info)
    self.assertStartsWith(
      out.getvalue(),
      '   0 | \x1b[32mab\x1b[0m\x1b[31;9mcd\x1b[0m\x1b[1;33mX\x1b[0m\n',
    )


class CompilationTest(absltest.TestCase):
  def test_a_second_run_compiles_nothing(self):
    argv = (*PAIR, '--batch_size=3')
    Run(
      *argv,
      '--max_new_tokens=12',
      '--temperature=0.5',
      '--presence_penalty=0.1',
      '--stop_ids=10',
      rows=[{'prompt': 'def ', 'stop': 'zz'}, {'prompt': 'a'}],
    )
    with testing.count_traces() as again:
      Run(
        *argv,
        '--max_new_tokens=31',
        '--temperature=1.3',
        '--repetition_penalty=1.2',
        '--top_p=0.9',
        '--top_k=40',
        '--min_p=0.01',
        '--seed=99',
        '--stop_ids=10,34,41',
        rows=[
          {'prompt': 'import jax\nfrom ', 'temperature': 0},
          {'prompt': 'x' * 70, 'stop': ['e', 'xy'], 'max_new_tokens': 3},
          {'prompt': 'class', 'seed': 2**32 - 1, 'max_new_tokens': 0},
          {'turns': ['b', 'c'], 'temperature': 0.1, 'top_k': 1},
        ],
      )
    self.assertEqual(again.num_compilations, 0)
    self.assertEqual(again.num_traces, 0)


class LoadTest(parameterized.TestCase):
  @parameterized.parameters(
    ((), 'none', 'none'),
    (('--quantize=int8',), 'int8', 'int8'),
    (('--draft_quantize=int8',), 'none', 'int8'),
    (('--quantize=int8', '--draft_quantize=none'), 'int8', 'none'),
  )
  def test_quantize_reaches_both_models(self, flags, target, draft):
    asked = {}

    def spy(name, dtype, quantize, view, **settings):
      del dtype, view, settings
      asked[name] = quantize
      if len(asked) == 2:
        raise ValueError('Enough.')
      return types.SimpleNamespace(model=None, params=None)

    argv = ('--target=a', '--draft=b', '--prompt=a', *flags)
    with (
      mock.patch.object(conversions, 'load_model', spy),
      contextlib.redirect_stderr(io.StringIO()) as err,
    ):
      code = script.run_main(generate.main, FLAG_GROUPS, argv)
    self.assertEqual((code, err.getvalue()), (2, 'generate.py: Enough.\n'))
    self.assertEqual(asked, {'a': target, 'b': draft})


class UnknownNumbersTest(absltest.TestCase):
  def test_what_is_not_finite_is_null(self):
    target = load.load('demo:target', 'bfloat16')
    params = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), target.params)
    broken = dataclasses.replace(target, params=params)
    with mock.patch.object(load, 'load', lambda *args: broken):
      run = Run(*PLAIN, f'--prompt={PROMPT}', '--logprobs')
    request = run.requests[0]
    self.assertEqual(request['finish_reason'], 'error')
    self.assertEqual((request['tokens'], request['logprobs']), ([], []))
    self.assertIsNone(request['metrics']['block_efficiency'])
    self.assertFalse(math.isnan(run.report['aggregate']['tokens_per_second']))


if __name__ == '__main__':
  absltest.main()

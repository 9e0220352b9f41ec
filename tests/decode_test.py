"""The loop: every invariant by name, and every way it has been got wrong."""

import dataclasses

import jax
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import decode, testing
from specjax import state as states
from specjax.proposers.draft_model import DraftModel
from specjax.sampling import SamplingOptions
from specjax.testing import loops
from specjax.verify import chain
from tests import toy_loops
from tests.toy_loops import L, Row, V

K = 3  # Of the decoder that most tests share.
EVERY_K = (1, 2, 3, 4, 5, 6)
PROMPTS = toy_loops.PROMPTS
EVERY_OUTCOME = np.arange(L) % 4  # A script: which draft to spoil, by length.


def decoder(k=K):
  return toy_loops.draft_decoder(k)


class StopAndLengthTest(parameterized.TestCase):
  """Output == plain output, cut by one rule, wherever a block ends."""

  def check_rows(self, params, rows, k=K, **options):
    run = toy_loops.generate(decoder(k), params, rows, **options)
    for b, row in enumerate(rows):
      tokens, reason = toy_loops.plain_greedy(params, row)
      self.assertEqual(run.tokens(b), tokens, row)
      self.assertEqual(run.reason(b), reason, row)
    return run

  @parameterized.product(k=EVERY_K, twins=(True, False))
  def test_stop_at_every_index(self, k, twins):
    params = toy_loops.make_params(twins=twins)
    tokens, _ = toy_loops.plain_greedy(params, Row())
    # The stop id of each row is the token that plain decoding has there.
    rows = [Row(stop=(tokens[j],)) for j in range(13)]
    run = self.check_rows(params, rows, k)
    for b, row in enumerate(rows):
      self.assertEqual(run.tokens(b).index(row.stop[0]), len(run.tokens(b)) - 1)

  @parameterized.product(k=EVERY_K, twins=(True, False))
  def test_token_limits(self, k, twins):
    params = toy_loops.make_params(twins=twins)
    limits = sorted({0, 1, 2, k - 1, k, k + 1, k + 2, 2 * k + 1})
    rows = [Row(max_new=n) for n in limits]
    run = self.check_rows(params, rows, k)
    for b, row in enumerate(rows):
      self.assertLen(run.tokens(b), row.max_new)

  @parameterized.parameters(1, 3, 6)
  def test_a_cache_of_exactly_the_needed_size(self, k):
    """Text to the last place of the buffer: nothing is shifted or clamped."""
    params = toy_loops.make_params(twins=True)
    rows = [
      Row(prompt=prompt, max_new=L - len(prompt) + more, seed=i)
      for i, prompt in enumerate(PROMPTS)
      for more in (0, 1, 2**20)
    ]
    run = self.check_rows(params, rows, k)
    for b in range(len(rows)):
      self.assertEqual(int(run.state.length_B[b]), L)
    reasons = [run.reason(b) for b in range(3)]
    self.assertEqual(reasons, ['length', 'context', 'context'])

  def test_a_prompt_that_fills_the_buffer(self):
    params = toy_loops.make_params(twins=True)
    prompt = tuple(i % V for i in range(L))
    run = self.check_rows(
      params,
      [
        Row(prompt=prompt),
        Row(prompt=prompt, max_new=0),
        Row(prompt=prompt[:-1]),
      ],
    )
    self.assertEqual(run.reason(0), 'context')
    self.assertEqual(run.reason(1), 'length')
    self.assertLen(run.tokens(2), 1)

  def test_stop_and_limit_in_one_block(self):
    params = toy_loops.make_params(twins=True)
    tokens, _ = toy_loops.plain_greedy(params, Row())
    first = {token: tokens.index(token) for token in set(tokens)}
    token, index = next((t, i) for t, i in first.items() if 2 <= i <= 10)
    rows = [
      Row(stop=(token,), max_new=index),  # The limit comes first.
      Row(stop=(token,), max_new=index + 1),  # Both at once: it is the stop.
      Row(stop=(token,), max_new=index + 2),
    ]
    run = self.check_rows(params, rows)
    self.assertEqual(
      [run.reason(b) for b in range(3)], ['length', 'stop', 'stop']
    )

  def test_the_last_of_several_stop_ids_stops_too(self):
    params = toy_loops.make_params(twins=True)
    tokens, _ = toy_loops.plain_greedy(params, Row())
    absent = sorted(set(range(V)) - set(tokens))[:2]
    rows = [
      Row(stop=()),
      Row(stop=(tokens[4],)),
      Row(stop=(*absent, tokens[4])),
      Row(stop=(tokens[4], *absent)),
    ]
    self.check_rows(params, rows)

  def test_the_stop_id_in_the_prompt_does_not_stop(self):
    params = toy_loops.make_params(twins=True)
    self.check_rows(params, [Row(prompt=(4, 4), stop=(4,))])

  def test_penalties_follow_the_plain_loop(self):
    """Counts: committed tokens and the drafts before a row, nothing else."""
    params = toy_loops.make_params(twins=False)
    options = (
      SamplingOptions(repetition_penalty=1e4),
      SamplingOptions(presence_penalty=3.0),
      SamplingOptions(frequency_penalty=0.7, repetition_penalty=1.3),
      SamplingOptions(logit_bias=((3, 2.0), (4, -1.0)), banned_ids=(5, 6)),
      SamplingOptions(allowed_ids=(1, 2, 3)),
    )
    rows = [
      Row(prompt=prompt, options=o) for o in options for prompt in PROMPTS[1:]
    ]
    self.check_rows(params, rows, full=True)


class InvariantsTest(parameterized.TestCase):
  def steps(self, run):
    """The run after each step, until it is done."""
    for _ in range(L):
      if np.all(run.state.done_B):
        return
      run = run.go_on(1)
      yield run

  def test_i1_i2_the_cache_holds_all_but_the_pending_token(self):
    params = toy_loops.make_params(twins=True, script=EVERY_OUTCOME)
    rows = [Row(prompt=p, max_new=25) for p in PROMPTS]
    run = toy_loops.begin(decoder(), params, rows)
    num_steps = 0
    for run in self.steps(run):
      num_steps += 1
      cache = run.state.target_cache
      length_B = np.asarray(run.state.length_B)
      np.testing.assert_array_equal(cache.length_B, length_B - 1)
      for b in range(len(rows)):
        n = length_B[b] - 1
        np.testing.assert_array_equal(
          cache.k[0][b, 0, :n, 0], run.state.tokens_BL[b, :n]
        )
        np.testing.assert_array_equal(cache.v[0][b, 0, :n, 0], np.arange(n))
    self.assertGreater(num_steps, 5)

  @parameterized.parameters(None, 5)
  def test_i4_rejection_at_each_index(self, window):
    """After any rollback the visible entries are those of a plain cache."""
    model = dataclasses.replace(toy_loops.TOY, window=window)
    for script in (*range(K + 1), EVERY_OUTCOME, EVERY_OUTCOME[::-1]):
      params = toy_loops.make_params(twins=True, script=script)
      rows = [Row(prompt=p, max_new=30) for p in PROMPTS]
      run = toy_loops.generate(toy_loops.draft_decoder(K, model), params, rows)
      for b, row in enumerate(rows):
        tokens, _ = toy_loops.plain_greedy(params, row, model)
        self.assertEqual(run.tokens(b), tokens)
        if np.ndim(script) == 0:
          # Each step accepts as many as the script lets it, then corrects.
          step = run.emitted(b, 'step_BL')
          counts = np.bincount(step)[:-1]
          np.testing.assert_array_equal(counts, script + 1)

  def test_i5_padding_means_nothing(self):
    params = toy_loops.make_params(twins=False)
    rows = [
      Row(prompt=p, max_new=9, options=toy_loops.WARM, seed=i)
      for i, p in enumerate(PROMPTS)
    ]
    clean = toy_loops.generate(decoder(), params, rows)
    rng = np.random.default_rng(0)
    wild = rng.integers(-(2**31), 2**31, (toy_loops.B, L), np.int64)
    for junk in (1, V, 2**31 - 1, -1, -(2**31), wild):
      run = toy_loops.generate(decoder(), params, rows, junk=junk)
      for b in range(len(rows)):
        self.assertEqual(run.tokens(b), clean.tokens(b))

  def test_i6_a_finished_row_is_frozen(self):
    params = toy_loops.make_params(twins=True, script=0)  # One token a step.
    tokens, _ = toy_loops.plain_greedy(params, Row())
    rows = [Row(stop=(tokens[0],)), Row(max_new=3), Row(max_new=30)]
    run = toy_loops.begin(decoder(), params, rows).go_on(4)
    self.assertEqual(np.asarray(run.state.done_B[:3]).tolist(), [1, 1, 0])
    n = len(rows[0].prompt)

    def seen(run):
      state = run.state
      parts = {
        name: np.asarray(getattr(state, name)[:2])
        for name in (
          'tokens_BL length_B done_B finish_reason_B num_steps_B step_BL '
          'source_BL num_draft_BL logprob_BL overlap_BL num_nonfinite_B'
        ).split()
      }
      parts['cache'] = np.asarray(state.target_cache.k[0][:2, 0, :n, 0])
      parts['cache length'] = np.asarray(state.target_cache.length_B[:2])
      return parts

    before = seen(run)
    run = run.go_on(toy_loops.ALL)
    for name, value in seen(run).items():
      np.testing.assert_array_equal(value, before[name], name)
    self.assertLen(run.tokens(2), 30)
    self.assertEqual(np.asarray(run.state.num_steps_B[:3]).tolist(), [1, 3, 30])

  def test_i6_a_row_whose_law_is_not_finite_ends_with_an_error(self):
    params = toy_loops.make_params(twins=True)
    # Texts short enough that no hash of theirs is that of the broken law.
    rows = [Row(prompt=p, max_new=12) for p in PROMPTS[:3]]
    plain = [toy_loops.plain_greedy(params, row)[0] for row in rows]
    for bad in (np.nan, np.inf):
      for j in range(6):
        # The law that follows j tokens of row 1, and no other law.
        text = [*rows[1].prompt, *plain[1][:j]]
        table = toy_loops.poisoned(params['target']['table'], text, bad)
        for proposer in (table, params['proposer']['table']):
          run = toy_loops.generate(
            decoder(),
            {
              **params,
              'target': {'table': table},
              'proposer': {'table': proposer},
            },
            rows,
          )
          self.assertEqual(run.reason(1), 'error')
          self.assertEqual(run.tokens(1), plain[1][:j])
          self.assertEqual(int(run.state.num_nonfinite_B[1]), 1)
          for b in (0, 2):
            self.assertEqual(run.reason(b), 'length')
            self.assertEqual(run.tokens(b), plain[b])

  def test_i6_the_law_of_what_comes_before_a_broken_law(self):
    """Block looks at all rows at once; one of them must not spoil the rest."""
    model, params = loops.toy_pair(jax.random.key(0), vocab_size=4)
    table = params['target']['table']
    for token in range(4):
      table = toy_loops.poisoned(table, [0, 1, token], np.nan)
    program = loops.Program(
      proposer='draft',
      decoder=decode.Decoder(
        target=model,
        proposer=DraftModel(model=model, num_draft_tokens=2),
        verify=chain.Block(),
        max_length=6,
      ),
      params={**params, 'target': {'table': table}},
      groups=(
        loops.Group(
          transform='none',
          options=toy_loops.WARM,
          prompt=(0, 1),
          num_tokens=4,
        ),
      ),
      rows=1 << 13,
    )
    outcomes = loops.observe(program)[0]
    np.testing.assert_array_equal(outcomes[:, 1:], -1)
    logits = testing.toy_logits(model, params['target'])(np.asarray([[0, 1]]))
    law = np.asarray(jax.nn.softmax(logits[0]), np.float64)
    result = testing.chi_square(np.bincount(outcomes[:, 0]), law / law.sum())
    self.assertGreater(result.p_value, 1e-4)

  def test_i6_a_stop_before_the_broken_law_is_a_stop(self):
    params = toy_loops.make_params(twins=True)
    plain, _ = toy_loops.plain_greedy(params, Row())
    table = toy_loops.poisoned(
      params['target']['table'], [*Row().prompt, *plain[:2]], np.nan
    )
    params = {**params, 'target': {'table': table}}
    run = toy_loops.generate(decoder(), params, [Row(stop=(plain[1],))])
    expected = plain[: plain.index(plain[1]) + 1]
    self.assertEqual((run.tokens(0), run.reason(0)), (expected, 'stop'))
    self.assertEqual(int(run.state.num_nonfinite_B[0]), 0)

  def test_i7_nothing_recompiles(self):
    params = toy_loops.make_params(twins=False)
    rng = np.random.default_rng(0)

    def once(i):
      rows = [
        Row(
          prompt=rng.integers(0, V, rng.integers(1, 20)).tolist(),
          max_new=int(rng.integers(0, 30)),
          seed=int(rng.integers(2**32)),
          stop=rng.integers(0, V, rng.integers(0, 4)).tolist(),
          options=SamplingOptions(
            temperature=float(rng.choice([0, 0.5, 1.7])),
            top_k=int(rng.integers(0, 5)),
            top_p=float(rng.uniform(0.5, 1)),
            min_p=float(rng.uniform(0, 0.2)),
          ),
        )
        for _ in range(toy_loops.B)
      ]
      # A proposer and a rule that are built anew are the same ones.
      run = toy_loops.begin(decoder(), params, rows).go_on(i % 3)
      return run.go_on(toy_loops.ALL).state.length_B.block_until_ready()

    once(1)
    with testing.count_traces() as traces:
      for i in range(50):
        once(i)
    self.assertEqual(traces.num_compilations, 0)

  def test_i7_the_state_is_donated(self):
    run = toy_loops.begin(decoder(), toy_loops.make_params(twins=True), [Row()])
    run.go_on(1)
    for name in ('tokens_BL', 'length_B', 'logprob_BL'):
      self.assertTrue(getattr(run.state, name).is_deleted(), name)
    self.assertTrue(run.state.target_cache.k[0].is_deleted())
    self.assertTrue(run.state.proposer_state.cache.v[0].is_deleted())
    with self.assertRaisesRegex(RuntimeError, 'deleted'):
      np.asarray(run.state.tokens_BL)

  def test_i10_a_limit_cuts_no_block(self):
    params = toy_loops.make_params(twins=True)
    rows = [Row(max_new=n) for n in range(1, 14)]
    run = toy_loops.generate(decoder(), params, rows)
    for b, row in enumerate(rows):
      num_draft = run.emitted(b, 'num_draft_BL')
      step = run.emitted(b, 'step_BL')
      for s in np.unique(step):
        at = np.nonzero(step == s)[0]
        self.assertEqual(num_draft[at[0]], min(K, row.max_new - at[0] - 1))
        np.testing.assert_array_equal(num_draft[at[1:]], 0)
        # All were accepted, so the block is drafts and bonus, uncut.
        self.assertLen(at, num_draft[at[0]] + 1)

  def test_i10_after_a_stop_inside_a_block(self):
    params = toy_loops.make_params(twins=True)
    tokens, _ = toy_loops.plain_greedy(params, Row())
    j = next(j for j in range(K) if tokens[j] not in tokens[:j] and j > 0)
    run = toy_loops.begin(decoder(), params, [Row(stop=(tokens[j],))]).go_on(1)
    self.assertEqual(run.tokens(0), tokens[: j + 1])
    sources = run.emitted(0, 'source_BL').tolist()
    self.assertEqual(sources, [states.ACCEPTED] * (j + 1))


if __name__ == '__main__':
  absltest.main()

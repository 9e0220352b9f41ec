"""The loop: rows by themselves, any proposal, and what is recorded."""

import dataclasses

import jax
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import decode, testing
from specjax import state as states
from specjax.proposers.base import Nothing
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.ngram import NGram
from specjax.sampling import SamplingOptions
from specjax.verify import chain
from tests import toy_loops
from tests.toy_loops import L, Row, V

K = 3  # Of the decoder that most tests share.
PROMPTS = toy_loops.PROMPTS
EVERY_OUTCOME = np.arange(L) % 4  # A script: which draft to spoil, by length.


def decoder(k=K):
  return toy_loops.draft_decoder(k)


class RowsTest(parameterized.TestCase):
  """A row is a function of its own prompt, seed and settings."""

  MIXED = (
    SamplingOptions(),
    SamplingOptions(temperature=1.0),
    SamplingOptions(temperature=0.5, top_k=4),
    SamplingOptions(temperature=1.7, top_p=0.8, banned_ids=(3,)),
    SamplingOptions(temperature=1.0, min_p=0.1, frequency_penalty=0.5),
    SamplingOptions(repetition_penalty=1.5),
  )
  DECODER = decode.Decoder(
    target=toy_loops.TOY,
    proposer=DraftModel(model=toy_loops.TOY, num_draft_tokens=K),
    verify=chain.Rejection(),
    max_length=L,
    prefill_chunk=4,
  )

  def rows(self):
    return [
      Row(prompt=prompt, max_new=8 + i, seed=100 * i + j, options=options)
      for i, prompt in enumerate(PROMPTS[1:])
      for j, options in enumerate(self.MIXED[:5])
    ]

  def test_i8_a_row_does_not_depend_on_the_others(self):
    params = toy_loops.make_params(twins=False)
    rows = self.rows()
    decode_rows = lambda rows, **options: toy_loops.generate(
      self.DECODER, params, rows, full=True, **options
    )
    together = decode_rows(rows)
    order = np.random.default_rng(0).permutation(len(rows))
    permuted = decode_rows([rows[i] for i in order])
    for b, i in enumerate(order):
      self.assertEqual(permuted.tokens(b), together.tokens(i))
      for name in ('logprob_BL', 'source_BL', 'num_draft_BL', 'overlap_BL'):
        np.testing.assert_array_equal(
          permuted.emitted(b, name), together.emitted(i, name)
        )
    for i in (0, 1, 7, 13):
      alone = decode_rows([rows[i]], size=1)
      self.assertEqual(alone.tokens(0), together.tokens(i))
    again = decode_rows(rows[3:9])
    for b in range(6):
      self.assertEqual(again.tokens(b), together.tokens(3 + b))

  def test_greedy_rows_never_depend_on_the_seed_or_on_sampled_rows(self):
    params = toy_loops.make_params(twins=False)
    rows = [Row(seed=seed) for seed in (0, 1, 2**32 - 1)]
    warm = [Row(seed=seed, options=toy_loops.WARM) for seed in range(4)]
    expected, _ = toy_loops.plain_greedy(params, Row())
    mixed = toy_loops.generate(self.DECODER, params, rows + warm, full=True)
    greedy = toy_loops.generate(self.DECODER, params, rows, full=True)
    for b in range(3):
      self.assertEqual(mixed.tokens(b), expected)
      self.assertEqual(greedy.tokens(b), expected)
    sampled = {tuple(mixed.tokens(b)) for b in range(3, 7)}
    self.assertLen(sampled, 4)
    again = toy_loops.generate(self.DECODER, params, rows + warm, full=True)
    self.assertEqual(sampled, {tuple(again.tokens(b)) for b in range(3, 7)})

  def test_i9_coupled_text_is_that_of_plain_sampling(self):
    """Token for token, by seed; and at one width even the log-probs' bits."""
    params = toy_loops.make_params(twins=False)
    rows = [
      Row(prompt=p, max_new=20, seed=i, options=options)
      for i, (p, options) in enumerate(
        (p, o) for p in PROMPTS[:3] for o in self.MIXED[:5]
      )
    ]
    coupled = dataclasses.replace(self.DECODER, verify=chain.Coupled())
    wide = toy_loops.plain_decoder(chain.Coupled(), width=K + 1)
    drafted = toy_loops.generate(coupled, params, rows, full=True)
    plain = toy_loops.generate(wide, params, rows, full=True)
    for b in range(len(rows)):
      self.assertEqual(drafted.tokens(b), plain.tokens(b))
      np.testing.assert_array_equal(
        drafted.emitted(b, 'logprob_BL'), plain.emitted(b, 'logprob_BL')
      )
    self.assertGreater(
      int(np.sum(np.asarray(drafted.state.source_BL) == states.ACCEPTED)), 20
    )


class AnyProposalTest(parameterized.TestCase):
  def test_a_draft_that_is_no_id_is_not_there(self):
    """Prompt lookup finds what the prompt holds, be it an id or not."""
    params = toy_loops.make_params(twins=True)
    # An index out of range is clamped to the last id: make that a likely one.
    table = params['target']['table'].at[:, -1].add(4.0)
    params = {**params, 'target': {'table': table}}
    looking_up = dataclasses.replace(
      RowsTest.DECODER, proposer=NGram(num_draft_tokens=2)
    )
    for wrong in (V, V + 3, -1, 2**31 - 1):
      rows = [
        Row(prompt=(wrong,) * 3, seed=i, options=toy_loops.WARM, max_new=4)
        for i in range(toy_loops.B)
      ]
      run = toy_loops.generate(looking_up, params, rows)
      for b in range(len(rows)):
        self.assertContainsSubset(run.tokens(b), range(V))
        self.assertEqual(run.emitted(b, 'num_draft_BL')[0], 0)


class RecordsTest(parameterized.TestCase):
  """Counters describe what was proposed and what the caller received."""

  def test_sources_steps_and_drafts(self):
    script = np.where(np.arange(L) % 2, 1, -1)  # By the length at the start.
    params = toy_loops.make_params(twins=True, script=script)
    run = toy_loops.generate(decoder(), params, [Row(max_new=11)])
    a, c, bonus = states.ACCEPTED, states.CORRECTION, states.BONUS
    # Length 3: one kept, corrected. 5: the same. 7, 9, 11; and one is left.
    self.assertEqual(run.emitted(0, 'source_BL').tolist(), [a, c] * 5 + [bonus])
    self.assertEqual(
      run.emitted(0, 'step_BL').tolist(), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    )
    self.assertEqual(
      run.emitted(0, 'num_draft_BL').tolist(),
      [3, 0, 3, 0, 3, 0, 3, 0, 2, 0, 0],
    )
    self.assertEqual(int(run.state.num_steps_B[0]), 6)
    prompt = np.asarray(run.state.source_BL[0, :3])
    np.testing.assert_array_equal(prompt, states.PROMPT)

  def test_all_accepted(self):
    params = toy_loops.make_params(twins=True)
    run = toy_loops.generate(decoder(), params, [Row(max_new=12)])
    a, bonus = states.ACCEPTED, states.BONUS
    self.assertEqual(run.emitted(0, 'source_BL').tolist(), [a, a, a, bonus] * 3)

  def test_the_sum_rule(self):
    """Emitted = accepted + steps that emitted a correction or a bonus."""
    params = toy_loops.make_params(twins=False)
    rows = [
      Row(prompt=p, seed=i, options=toy_loops.WARM, stop=(i,), max_new=25)
      for i, p in enumerate(PROMPTS)
    ]
    run = toy_loops.generate(RowsTest.DECODER, params, rows, full=True)
    for b in range(len(rows)):
      source = run.emitted(b, 'source_BL')
      step = run.emitted(b, 'step_BL')
      num_accepted = np.sum(source == states.ACCEPTED)
      num_own = np.sum((source > states.ACCEPTED))
      self.assertLen(run.tokens(b), num_accepted + num_own)
      num_steps = int(run.state.num_steps_B[b])
      np.testing.assert_array_equal(np.unique(step), np.arange(num_steps))
      ends_accepted = source[-1] == states.ACCEPTED
      self.assertEqual(num_own, num_steps - ends_accepted)

  def test_log_probs_are_those_of_the_raw_target(self):
    """For accepted, correction and bonus tokens, whatever the settings."""
    params = toy_loops.make_params(twins=False)
    rows = [
      Row(prompt=p, seed=i, options=o, max_new=20)
      for i, (p, o) in enumerate(
        (p, o) for p in PROMPTS[:3] for o in RowsTest.MIXED[:5]
      )
    ]
    run = toy_loops.generate(RowsTest.DECODER, params, rows, full=True)
    logits = testing.toy_logits(toy_loops.TOY, params['target'])
    sources = set()
    for b, row in enumerate(rows):
      text = [*row.prompt, *run.tokens(b)]
      for i, logprob in enumerate(run.emitted(b, 'logprob_BL')):
        n = len(row.prompt) + i
        x = logits(np.asarray([text[:n]]))[0]
        expected = x[text[n]] - np.log(np.sum(np.exp(x)))
        self.assertAlmostEqual(float(logprob), expected, places=5)
      sources |= set(run.emitted(b, 'source_BL').tolist())
    self.assertLen(sources, 3)

  def test_overlap_is_the_chance_of_acceptance(self):
    params = toy_loops.make_params(twins=False)
    rows = [Row(options=toy_loops.WARM, max_new=14, seed=i) for i in range(9)]
    run = toy_loops.generate(RowsTest.DECODER, params, rows, full=True)
    law = lambda side, text: np.asarray(
      jax.nn.softmax(
        testing.toy_logits(toy_loops.TOY, params[side])(np.asarray([text]))[0]
      )
    )
    num_tested = 0
    for b, row in enumerate(rows):
      text = [*row.prompt, *run.tokens(b)]
      for i, overlap in enumerate(run.emitted(b, 'overlap_BL')):
        before = text[: len(row.prompt) + i]
        expected = np.minimum(law('target', before), law('proposer', before))
        is_bonus = run.emitted(b, 'source_BL')[i] == states.BONUS
        self.assertEqual(bool(np.isnan(overlap)), bool(is_bonus))
        if not is_bonus:
          num_tested += 1
          self.assertAlmostEqual(float(overlap), expected.sum(), places=5)
    self.assertGreater(num_tested, 50)

  def test_step_says_what_run_records(self):
    params = toy_loops.make_params(twins=True, script=EVERY_OUTCOME)
    rows = [Row(prompt=p, max_new=7 + i) for i, p in enumerate(PROMPTS)]
    run = toy_loops.begin(decoder(2), params, rows)
    whole = toy_loops.generate(decoder(2), params, rows)
    state, found = run.state, [[] for _ in rows]
    for _ in range(12):
      state, info = decode.step(decoder(2), params, state, run.sampling)
      for b in range(len(rows)):
        n, a = int(info.num_emitted_B[b]), int(info.num_accepted_B[b])
        found[b] += np.asarray(info.tokens_BN[b, :n]).tolist()
        np.testing.assert_array_equal(info.tokens_BN[b, n:], 0)
        np.testing.assert_array_equal(
          info.tokens_BN[b, :a], info.draft_BK[b, :a]
        )
        self.assertLessEqual(a, int(info.num_draft_B[b]))
        self.assertIn(n - a, (0, 1))
    self.assertTrue(np.all(state.done_B))
    for b in range(len(rows)):
      self.assertEqual(found[b], whole.tokens(b))
    jax.tree.map(
      np.testing.assert_array_equal, state.length_B, whole.state.length_B
    )


class SettingsTest(parameterized.TestCase):
  @parameterized.parameters(
    (dict(max_length=0), 'max_length must be >= 1, got 0'),
    (dict(max_length=65), "at most 64, the target's context, got 65"),
    (dict(width=3), 'width must be at least 4, one more .* got 3'),
  )
  def test_bad_settings(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(RowsTest.DECODER, **fields)

  def test_wrong_buffer(self):
    plain = toy_loops.plain_decoder(chain.Greedy(), None)
    run = toy_loops.begin(plain, toy_loops.make_params(twins=True), [Row()])
    other = dataclasses.replace(plain, max_length=L - 1)
    requests = states.Requests(
      tokens_BL=run.state.tokens_BL,
      prompt_length_B=run.state.length_B,
      max_new_tokens_B=run.state.limit_B,
      seed_B=run.state.seed_B,
      stop_ids_BJ=run.state.stop_ids_BJ,
    )
    message = r'tokens_BL must have shape \(16, 39\), got \(16, 40\)'
    with self.assertRaisesRegex(ValueError, message):
      other.init(run.params, requests)

  def test_decoders_are_static(self):
    testing.check_static(RowsTest.DECODER)
    self.assertEqual(RowsTest.DECODER.num_rows, K + 1)
    self.assertEqual(RowsTest.DECODER.num_slots, L + K + 1)
    self.assertEqual(toy_loops.plain_decoder(chain.Greedy(), 4).num_rows, 4)
    self.assertEqual(Nothing().num_draft_tokens, 0)


if __name__ == '__main__':
  absltest.main()

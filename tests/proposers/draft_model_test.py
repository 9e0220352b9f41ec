"""A draft model: what it accepts, what its cache holds, when it is silent."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import decode
from specjax import state as states
from specjax.models.toy import ToyModel
from specjax.proposers.draft_model import DraftModel
from specjax.verify import chain
from tests import toy_loops
from tests.toy_loops import L, Row

PROMPTS = toy_loops.PROMPTS


class AcceptanceTest(parameterized.TestCase):
  """Output alone never shows a fault of the draft's cache; this does."""

  @parameterized.product(k=(1, 2, 3, 4, 5, 6), temperature=(0.0, 1.0))
  def test_a_draft_that_is_the_target_has_all_accepted(self, k, temperature):
    """Ragged, by rejection, coupled, block (at 1) and greedy (at 0) alike."""
    options = dataclasses.replace(toy_loops.WARM, temperature=temperature)
    rows = [
      Row(prompt=p, max_new=L - len(p), seed=seed, options=options)
      for seed in range(3)
      for p in PROMPTS
    ]
    run = toy_loops.generate(
      toy_loops.draft_decoder(k), toy_loops.make_params(twins=True), rows
    )
    for b, row in enumerate(rows):
      source = run.emitted(b, 'source_BL')
      index = np.arange(row.max_new)
      is_bonus = (index % (k + 1) == k) | (index == row.max_new - 1)
      np.testing.assert_array_equal(
        source, np.where(is_bonus, states.BONUS, states.ACCEPTED)
      )
      if temperature == 1:
        overlap = run.emitted(b, 'overlap_BL')[~is_bonus]
        np.testing.assert_allclose(overlap, 1, atol=1e-6)

  def test_after_rejections_too(self):
    """Whatever was rejected before, a step without a spoiled draft is whole."""
    k = 3
    for first in range(k):
      script = np.full(L, -1)
      script[::3] = first
      params = toy_loops.make_params(twins=True, script=script)
      rows = [Row(prompt=p, max_new=25) for p in PROMPTS]
      run = toy_loops.generate(toy_loops.draft_decoder(k), params, rows)
      num_spoiled = 0
      for b, row in enumerate(rows):
        step, at = run.emitted(b, 'step_BL'), len(row.prompt)
        for count in np.bincount(step)[:-1]:
          expected = first if at % 3 == 0 else k
          num_spoiled += at % 3 == 0
          if at + k + 1 <= len(row.prompt) + row.max_new:
            self.assertEqual(count, expected + 1)
          at += count
      self.assertGreater(num_spoiled, 4)


class CacheTest(parameterized.TestCase):
  @parameterized.parameters(True, False)
  def test_the_cache_is_that_of_a_decoder_that_never_speculated(self, twins):
    """All but the last two committed tokens were absorbed as they are."""
    script = np.arange(L) % 4
    params = toy_loops.make_params(twins=twins, script=script)
    rows = [Row(prompt=p, max_new=25, stop=(i,)) for i, p in enumerate(PROMPTS)]
    run = toy_loops.begin(toy_loops.draft_decoder(3), params, rows)
    for _ in range(8):
      tokens_BL = np.asarray(run.state.tokens_BL)
      length_B = np.asarray(run.state.length_B)
      cache = run.state.proposer_state.cache
      for b in range(len(rows)):
        n = max(length_B[b] - 2, 0)
        self.assertGreaterEqual(int(cache.length_B[b]), n)
        np.testing.assert_array_equal(cache.k[0][b, 0, :n, 0], tokens_BL[b, :n])
        np.testing.assert_array_equal(cache.v[0][b, 0, :n, 0], np.arange(n))
      run = run.go_on(1)


class SilenceTest(parameterized.TestCase):
  def test_past_its_context_a_draft_proposes_nothing(self):
    """The row goes on, and its text is the target's."""
    limit = 8
    model = ToyModel(vocab_size=toy_loops.V, context_length=limit)
    decoder = decode.Decoder(
      target=toy_loops.TOY,
      proposer=DraftModel(model=model, num_draft_tokens=3),
      verify=chain.Greedy(),
      max_length=L,
      prefill_chunk=4,
    )
    params = toy_loops.make_params(twins=True)
    rows = [
      Row(prompt=tuple(range(n)), max_new=15) for n in (1, 5, 7, 8, 9, 15)
    ]
    run = toy_loops.generate(decoder, params, rows)
    for b, row in enumerate(rows):
      self.assertEqual(run.tokens(b), toy_loops.plain_greedy(params, row)[0])
      source = run.emitted(b, 'source_BL')
      num_draft = run.emitted(b, 'num_draft_BL')
      # No draft stands at or beyond the draft's last position.
      room = max(limit - len(row.prompt), 0)
      np.testing.assert_array_equal(source[room:], states.BONUS)
      np.testing.assert_array_equal(num_draft[room:], 0)
      self.assertEqual(
        int(np.sum(source == states.ACCEPTED)) > 0, room > 0, row
      )

  @parameterized.parameters(0.0, 1.0)
  def test_a_draft_that_breaks_down_falls_silent(self, temperature):
    params = toy_loops.make_params(twins=True)
    options = dataclasses.replace(toy_loops.WARM, temperature=temperature)
    rows = [
      Row(prompt=p, max_new=12, seed=i, options=options)
      for i, p in enumerate(PROMPTS[:3])
    ]
    decoder = toy_loops.draft_decoder(3)
    clean = toy_loops.generate(decoder, params, rows)
    for j in range(4):
      text = [*rows[1].prompt, *clean.tokens(1)[:j]]
      table = toy_loops.poisoned(params['target']['table'], text, np.nan)
      run = toy_loops.generate(
        decoder, {**params, 'proposer': {'table': table}}, rows
      )
      for b in range(3):
        self.assertEqual(run.reason(b), 'length')
        self.assertLen(run.tokens(b), 12)
      self.assertEqual(run.emitted(1, 'num_draft_BL')[0], min(j, 3))
      self.assertEqual(run.emitted(0, 'num_draft_BL')[0], 3)
      if temperature == 0:
        for b in range(3):
          self.assertEqual(run.tokens(b), clean.tokens(b))


class SettingsTest(parameterized.TestCase):
  @parameterized.parameters(0, -1, 65, 1000)
  def test_number_of_drafts(self, k):
    message = f'num_draft_tokens must be in 1..64 .*, got {k}'
    with self.assertRaisesRegex(ValueError, message):
      DraftModel(model=toy_loops.TOY, num_draft_tokens=k)

  def test_vocabularies_must_agree(self):
    decoder = dataclasses.replace(
      toy_loops.plain_decoder(chain.Rejection(), None),
      proposer=DraftModel(model=ToyModel(vocab_size=7), num_draft_tokens=2),
    )
    params = toy_loops.make_params(twins=True)
    params['proposer'] = {'table': jnp.zeros((4099, 7))}
    run = toy_loops.begin(decoder, params, [Row()])
    message = r'log_weights_BKV must have shape \(B, 2, 16\), got \(16, 2, 7\)'
    with self.assertRaisesRegex(ValueError, message):
      run.go_on(1)


if __name__ == '__main__':
  absltest.main()

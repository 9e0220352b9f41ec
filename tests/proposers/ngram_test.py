"""Prompt lookup by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax.proposers.ngram import NGram

L = 16
JUNK = -7


@functools.partial(jax.jit, static_argnums=0)
def propose(proposer, tokens_BL, length_B):
  return proposer.propose(None, None, (), None, tokens_BL, length_B, None)


def look_up(rows, lengths=None, **options):
  """The visible drafts of each row of token ids."""
  proposer = NGram(**options)
  lengths = [len(row) for row in rows] if lengths is None else lengths
  tokens = np.full((len(rows), L), JUNK, np.int32)
  for i, row in enumerate(rows):
    tokens[i, : len(row)] = row
  proposal, state = propose(proposer, jnp.asarray(tokens), jnp.asarray(lengths))
  assert state == () and proposal.log_weights_BKV is None
  assert proposal.draft_BK.shape == (len(rows), options['num_draft_tokens'])
  return [
    draft[:num].tolist()
    for draft, num in zip(
      np.asarray(proposal.draft_BK), np.asarray(proposal.num_draft_B)
    )
  ]


class NGramTest(parameterized.TestCase):
  @parameterized.parameters(
    # The docstring's: 'abc' ends at 2 and 6; the later one decides.
    ([0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 2], [4, 0]),
    # No token has occurred before: no draft, never a made-up token 0.
    ([1, 2, 3, 4], []),
    ([5], []),
    ([0], []),
    # One token matches: what followed it.
    ([3, 8, 9, 3], [8, 9]),
    # The longest suffix wins over a later, shorter one.
    ([1, 2, 5, 6, 9, 2, 7, 8, 1, 2], [5, 6]),
    # Only the longest counted: three tokens match at the start.
    ([7, 1, 2, 5, 6, 3, 1, 2, 9, 9, 7, 1, 2], [5, 6]),
    # The latest has no K tokens behind it; the one before it has.
    ([4, 1, 4, 4], [1, 4]),
    # A periodic text drafts K at once.
    ([1, 2, 1, 2, 1, 2], [1, 2]),
    ([6, 6, 6, 6, 6], [6, 6]),
    # Nothing but a shorter draft is there.
    ([6, 6], [6]),
    ([1, 2, 3, 3], [3]),
  )
  def test_by_hand(self, row, expected):
    found = look_up([row], num_draft_tokens=2, max_ngram=3)
    self.assertEqual(found, [expected])

  @parameterized.parameters((1, [8, 9]), (2, []), (3, []))
  def test_min_ngram(self, min_ngram, expected):
    found = look_up(
      [[3, 8, 9, 1, 3]], num_draft_tokens=2, min_ngram=min_ngram, max_ngram=3
    )
    self.assertEqual(found, [expected])

  @parameterized.parameters((1, [4, 1]), (2, [4, 1]), (3, [9, 5]))
  def test_max_ngram(self, max_ngram, expected):
    # 'x 1 2' was followed by 9, the later '1 2' by 4.
    row = [8, 1, 2, 9, 5, 1, 2, 4, 1, 3, 8, 1, 2]
    found = look_up([row], num_draft_tokens=2, max_ngram=max_ngram)
    self.assertEqual(found, [expected])

  def test_a_longer_suffix_than_the_text(self):
    found = look_up([[4, 4], [4]], num_draft_tokens=3, max_ngram=9)
    self.assertEqual(found, [[4], []])

  def test_ragged_rows_and_junk_behind_the_length(self):
    rows = [[1, 2, 1, 2, 1], [3, 8, 9, 3, 8, 9, 3], [5], [2, 2, 2]]
    lengths = [len(row) for row in rows]
    clean = look_up(rows, num_draft_tokens=3)
    self.assertEqual(clean, [[2, 1], [8, 9, 3], [], [2]])
    for junk in (0, 1, 3, 8, 2**31 - 1, -(2**31)):
      poisoned = [row + [junk] * (L - len(row)) for row in rows]
      self.assertEqual(look_up(poisoned, lengths, num_draft_tokens=3), clean)
    for i, row in enumerate(rows):
      self.assertEqual(look_up([row], num_draft_tokens=3), [clean[i]])

  def test_a_full_buffer(self):
    row = [i % 5 for i in range(L)]  # Ends in 0; 0 was followed by 1 2 3.
    self.assertEqual(look_up([row], num_draft_tokens=3), [[1, 2, 3]])

  def test_every_token_proposed_follows_an_equal_suffix(self):
    """Against a slow loop over random texts."""

    def slow(row, k, low, high):
      for n in range(high, low - 1, -1):
        suffix = row[len(row) - n :]
        ends = [
          e
          for e in range(n, len(row))
          if n <= len(row) - 1 and row[e - n : e] == suffix
        ]
        full = [e for e in ends if e + k <= len(row)]
        if ends:
          start = (full or ends)[-1]
          return row[start : start + k]
      return []

    rng = np.random.default_rng(0)
    rows = [
      rng.integers(0, 3, rng.integers(1, L + 1)).tolist() for _ in range(300)
    ]
    for k, low, high in ((2, 1, 3), (4, 2, 3), (1, 1, 1), (5, 1, 5)):
      found = look_up(rows, num_draft_tokens=k, min_ngram=low, max_ngram=high)
      for row, drafts in zip(rows, found):
        self.assertEqual(drafts, slow(row, k, low, high), row)

  @parameterized.parameters(
    (dict(num_draft_tokens=0), r'num_draft_tokens must be in 1..64 .* got 0'),
    (dict(num_draft_tokens=65), r'num_draft_tokens must .* got 65'),
    (dict(num_draft_tokens=2, min_ngram=0), 'min_ngram and max_ngram .* got 0'),
    (dict(num_draft_tokens=2, min_ngram=4), '1 <= min <= max <= 64, got 4 and'),
    (dict(num_draft_tokens=2, max_ngram=65), 'got 1 and 65'),
  )
  def test_bad_settings(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      NGram(**options)

  def test_one_trace(self):
    proposer = NGram(num_draft_tokens=2)
    num_traces = 0

    @jax.jit
    def propose(tokens_BL, length_B):
      nonlocal num_traces
      num_traces += 1
      return proposer.propose(None, None, (), None, tokens_BL, length_B, None)

    for n in range(1, 5):
      propose(jnp.full((2, L), n), jnp.asarray([n, 2 * n]))
    self.assertEqual(num_traces, 1)


if __name__ == '__main__':
  absltest.main()

"""Heads under penalties: what they report is the law they drew from.

The law is that of a slow loop and NumPy, with the committed text and the drafts
before each draft counted one by one; and each draft is the arg-max of what is
reported plus the noise of its key, so nothing else was drawn from.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import decode, noise, testing
from specjax.proposers.base import TargetView
from specjax.proposers.feature_fed import FeatureFed
from specjax.proposers.medusa import Medusa
from specjax.sampling import SamplingOptions
from specjax.verify import chain
from tests import toy_loops
from tests.models import tiny
from tests.models.heads import slow, tiny_heads
from tests.toy_loops import L, Row, V

K = 3
OPTIONS = (
  SamplingOptions(temperature=1.0),
  SamplingOptions(temperature=0.8, repetition_penalty=2.0),
  SamplingOptions(temperature=1.3, presence_penalty=1.5),
  SamplingOptions(temperature=0.7, frequency_penalty=0.8),
  SamplingOptions(
    temperature=1.0,
    repetition_penalty=0.6,
    presence_penalty=-0.5,
    frequency_penalty=0.3,
    logit_bias=((4, 1.0),),
    banned_ids=(6,),
    top_k=7,
  ),
  SamplingOptions(repetition_penalty=1.7, frequency_penalty=0.5),
)
# What is committed, and how much of it is the prompt.
TEXTS = (
  ((3, 1), 2),
  ((5, 5, 5, 2, 7, 7, 3), 4),
  ((1, 2, 3, 4, 3, 3, 9, 9, 0, 11, 3), 1),
)
ROWS = [
  (Row(prompt=text, options=options), num_prompt)
  for options in OPTIONS
  for text, num_prompt in TEXTS
]


@functools.partial(jax.jit, static_argnums=0)
def proposal_and_logits(proposer, params, state, sampling, keys_BK):
  """A proposal for a state, and the raw logits behind its drafts."""
  proposal, _ = proposer.propose(
    params,
    keys_BK,
    state.proposer_state,
    TargetView(
      state.target_cache,
      state.prompt_length_B,
      jnp.full(len(ROWS), K, jnp.int32),
    ),
    state.tokens_BL,
    state.length_B,
    sampling,
  )
  is_chained = isinstance(proposer, FeatureFed)
  logits_of = slow.chained_logits if is_chained else slow.independent_logits
  heads = proposer.head if is_chained else proposer.heads
  return proposal, logits_of(
    heads, params, state.tokens_BL, state.length_B, proposal.draft_BK
  )


def law(logits_V, options, prompt, generated) -> np.ndarray:
  """One draft's law by NumPy, float64 [V]."""
  generated_1T = np.asarray([generated], np.int64).reshape(1, -1)
  (law_V,) = testing.reference_law(
    logits_V[None], options, prompt, generated_1T
  )
  return law_V


class PenaltiesTest(parameterized.TestCase):
  @parameterized.parameters('mtp', 'eagle', 'eagle3_reduced', 'medusa')
  def test_what_is_reported_is_what_is_drawn_from(self, kind):
    target = tiny_heads.target_of(vocab_size=V)
    head = tiny_heads.head_of(kind, target)
    if kind == 'medusa':
      proposer = Medusa(heads=head, num_draft_tokens=K)
    else:
      proposer = FeatureFed(head=head, num_draft_tokens=K)
    params = {
      'target': tiny.params_of(target),
      'proposer': tiny_heads.params_of(head),
    }
    decoder = decode.Decoder(
      target=target,
      proposer=proposer,
      verify=chain.Rejection(),
      max_length=L,
      prefill_chunk=4,
    )
    rows, num_prompt = zip(*ROWS)
    run = toy_loops.begin(decoder, params, rows, size=len(rows), junk=-7)
    # As if the rest of the text had been written.
    state = run.state.replace(prompt_length_B=jnp.asarray(num_prompt))
    num_moved = 0
    for seed in range(3):
      keys_BK = jax.random.split(jax.random.key(seed), (len(rows), K))
      proposal, logits_BKV = proposal_and_logits(
        proposer, params, state, run.sampling, keys_BK
      )
      np.testing.assert_array_equal(proposal.num_draft_B, K)
      reported_BKV = np.asarray(proposal.log_weights_BKV)
      self.check_drawn(proposal, reported_BKV, keys_BK)
      q_BKV = jax.nn.softmax(reported_BKV, axis=-1)
      for b, row in enumerate(rows):
        prompt = row.prompt[: num_prompt[b]]
        generated = list(row.prompt[num_prompt[b] :])
        for i in range(K):
          logits_V = np.asarray(logits_BKV[b, i])
          wanted_V = law(logits_V, row.options, prompt, generated)
          np.testing.assert_allclose(q_BKV[b, i], wanted_V, atol=2e-5)
          # Without the draft before it the law would be another.
          other_V = law(logits_V, row.options, prompt, generated[:-1])
          num_moved += np.max(np.abs(wanted_V - other_V)) > 1e-2
          generated.append(int(proposal.draft_BK[b, i]))
    self.assertGreater(num_moved, len(rows))

  def check_drawn(self, proposal, reported_BKV, keys_BK):
    gumbel = jax.vmap(jax.vmap(lambda key: noise.gumbel(key, V)))
    noisy_BKV = reported_BKV + np.asarray(gumbel(keys_BK))
    np.testing.assert_array_equal(
      proposal.draft_BK, np.argmax(noisy_BKV, axis=-1)
    )


if __name__ == '__main__':
  absltest.main()

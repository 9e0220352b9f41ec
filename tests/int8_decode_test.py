"""Exact mode with int8 weights and caches: the text of plain decoding."""

import dataclasses
import functools

import jax
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import decode
from specjax.models import quantize
from specjax.proposers.base import Nothing
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.ngram import NGram
from specjax.sampling import SamplingOptions
from specjax.verify import chain
from tests import toy_loops
from tests.models import tiny
from tests.toy_loops import L, Row, V

K = 3
# Warm and cold rows side by side: coupled is exact for both.
ROWS = [
  Row(
    prompt=prompt,
    max_new=24,
    seed=seed,
    options=SamplingOptions(temperature=temperature),
  )
  for prompt in toy_loops.PROMPTS
  for seed, temperature in enumerate((0.0, 0.7))
]


@functools.cache
def int8_model(cache_dtype):
  """A tiny model over the ids of `toy_loops`, and its parameters."""
  plain = tiny.model('llama')
  plain = dataclasses.replace(
    plain,
    vocab_size=V,
    padded_vocab_size=V,
    windows=plain.windows[:1],
    ropes=plain.ropes[:1],
  )
  params = quantize.quantize_params(tiny.params_of(plain))
  model = dataclasses.replace(
    plain, dtype='bfloat16', quantize='int8', cache_dtype=cache_dtype
  )
  declared = jax.tree.map(lambda spec: spec.dtype, model.param_specs())
  return model, jax.tree.map(lambda x, d: x.astype(d), params, declared)


def blurred(params):
  """A draft that is often right: the target with noise in one product."""
  (layer,) = params['layers']
  noise = np.random.default_rng(0).normal(1, 0.6, layer['down'].scale_O.shape)
  down = layer['down']._replace(
    scale_O=layer['down'].scale_O * noise.astype(np.float32)
  )
  return {**params, 'layers': ({**layer, 'down': down},)}


def run(cache_dtype, proposer, proposer_params, *, width=None, **changes):
  model, params = int8_model(cache_dtype)
  decoder = decode.Decoder(
    target=model,
    proposer=proposer,
    verify=chain.Coupled(),
    max_length=L,
    width=width,
    prefill_chunk=4,
  )
  params = {'target': {**params, **changes}, 'proposer': proposer_params}
  return toy_loops.generate(decoder, params, ROWS, size=len(ROWS))


@functools.cache
def plain_run(cache_dtype):
  return run(cache_dtype, Nothing(), (), width=K + 1)


class Int8DecodeTest(parameterized.TestCase):
  @parameterized.product(name=('ngram', 'draft'), cache_dtype=(None, 'int8'))
  def test_text_equals_plain_decoding(self, name, cache_dtype):
    plain = plain_run(cache_dtype)
    if name == 'draft':
      model, params = int8_model(cache_dtype)
      proposer = DraftModel(model=model, num_draft_tokens=K, prefill_chunk=4)
      drafted = run(cache_dtype, proposer, blurred(params))
    else:
      drafted = run(cache_dtype, NGram(num_draft_tokens=K), ())
    for b in range(len(ROWS)):
      self.assertEqual(drafted.tokens(b), plain.tokens(b))
      self.assertLen(plain.tokens(b), 24)
      np.testing.assert_array_equal(
        drafted.emitted(b, 'logprob_BL'), plain.emitted(b, 'logprob_BL')
      )
    # Some drafts were accepted, and some were not.
    num_steps = int(np.sum(drafted.state.num_steps_B))
    self.assertBetween(num_steps, 24 * len(ROWS) / (K + 1) + 1, 23 * len(ROWS))

  def test_a_row_that_is_not_finite_ends_with_an_error(self):
    _, params = int8_model(None)
    plain = plain_run(None)
    embed = params['embed']
    # Token 8 is in the last prompt, and in none of the others.
    broken = embed._replace(scale_O=embed.scale_O.at[8].set(np.nan))
    got = run(None, NGram(num_draft_tokens=K), (), embed=broken)
    for b, row in enumerate(ROWS):
      if 8 in row.prompt:
        self.assertEqual((got.tokens(b), got.reason(b)), ([], 'error'))
        continue
      tokens = got.tokens(b)
      self.assertEqual(tokens, plain.tokens(b)[: len(tokens)])
      self.assertNotIn(8, tokens[:-1])
      reason = 'error' if 8 in plain.tokens(b)[:-1] else 'length'
      self.assertEqual(got.reason(b), reason)


if __name__ == '__main__':
  absltest.main()

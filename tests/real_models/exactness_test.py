"""Real files: the text a target alone would write, whatever proposes."""

import functools

import jax
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import decode, generation
from specjax.models import load
from specjax.proposers.base import Nothing
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.ngram import NGram
from specjax.requests import Request, Result
from specjax.sampling import SamplingOptions
from specjax.tokenizers import check_same_vocabulary
from specjax.verify import chain
from tests.experiments.mesh_runs import PROMPTS
from tests.real_models import files

SETTINGS = (
  SamplingOptions(),
  SamplingOptions(temperature=0.8, top_p=0.95),
  SamplingOptions(temperature=1.0),
  SamplingOptions(temperature=1.0, top_k=40),
  SamplingOptions(repetition_penalty=1.2),
  SamplingOptions(temperature=1.3, min_p=0.05, frequency_penalty=0.5),
  SamplingOptions(temperature=0.5, presence_penalty=0.3),
  SamplingOptions(temperature=0.7, banned_ids=(28,)),
)


@functools.cache
def smollm2(dtype='float32', quantize='none') -> load.Loaded:
  return load.load(files.find(files.SMOLLM2), dtype, quantize)


def run(
  target,
  proposer,
  proposer_params,
  rule,
  requests,
  *,
  batch_size,
  width=None,
) -> list[Result]:
  decoder = decode.Decoder(
    target=target.model,
    proposer=proposer,
    verify=rule,
    max_length=64,
    width=width,
    prefill_chunk=32,
  )
  params = {'target': target.params, 'proposer': proposer_params}
  return list(
    generation.generate(
      decoder, params, requests, target.tokenizer, batch_size=batch_size
    )
  )


def draft_model(draft: load.Loaded, num_draft_tokens: int) -> DraftModel:
  return DraftModel(
    model=draft.model, num_draft_tokens=num_draft_tokens, prefill_chunk=32
  )


def make_requests(target, settings, max_new_tokens) -> list[Request]:
  return [
    Request(
      prompt=text,
      prompt_tokens=tuple(target.tokenizer.encode(text, add_special=True)),
      options=options,
      seed=seed,
      max_new_tokens=max_new_tokens,
    )
    for seed, (text, options) in enumerate(zip(PROMPTS, settings))
  ]


class SmolLM2Test(parameterized.TestCase):
  @parameterized.parameters(*range(1, 7))
  def test_a_draft_equal_to_the_target_is_always_right(self, k):
    target = smollm2()
    settings = [SamplingOptions(temperature=t) for t in (0.0, 1.0, 0.0, 1.0)]
    # Three full blocks, so that no limit shortens a draft.
    results = run(
      target,
      draft_model(target, k),
      target.params,
      chain.Rejection(),
      make_requests(target, settings, 3 * (k + 1)),
      batch_size=4,
    )
    for result in results:
      self.assertEqual(result.tally.num_drafted, 3 * k)
      self.assertEqual(result.tally.num_accepted, 3 * k)
      self.assertEqual(result.tally.num_steps, 3)

  def test_a_ragged_mixed_batch_equals_each_row_alone(self):
    target = smollm2()
    proposer = draft_model(target, 3)
    # A draft that is often wrong: the target with noise in its last layer.
    draft_params = _blurred(target.params)
    requests = make_requests(target, SETTINGS, 16)
    together, alone = (
      run(
        target,
        proposer,
        draft_params,
        chain.Rejection(),
        requests,
        batch_size=size,
      )
      for size in (8, 1)
    )
    for ours, other in zip(together, alone):
      self.assertEqual(ours.tokens, other.tokens)
      self.assertEqual(ours.tally.num_drafted, other.tally.num_drafted)
      self.assertEqual(ours.tally.num_accepted, other.tally.num_accepted)
    total = sum(result.tally.num_accepted for result in together)
    drafted = sum(result.tally.num_drafted for result in together)
    self.assertBetween(total / drafted, 0.1, 0.95)

  def test_int8_text_equals_plain_decoding(self):
    target = smollm2('bfloat16', 'int8')
    self.assertEqual(target.params['embed'].int8_OI.dtype, np.int8)
    warm = SamplingOptions(temperature=0.8, top_p=0.95)
    requests = make_requests(target, [SamplingOptions(), warm] * 2, 24)
    # Drafts are looked up: a second model would double what is compiled.
    plain, looked_up = (
      run(target, proposer, (), chain.Coupled(), requests, **options)
      for proposer, options in (
        (Nothing(), {'batch_size': 4, 'width': 4}),
        (NGram(num_draft_tokens=3), {'batch_size': 4}),
      )
    )
    for ours, expected in zip(looked_up, plain):
      self.assertEqual(ours.tokens, expected.tokens)
    self.assertGreater(sum(r.tally.num_accepted for r in looked_up), 0)


def _blurred(params):
  noise_key = jax.random.key(0)
  last = dict(params['layers'][-1])
  shape = last['down'].shape
  noise = jax.random.normal(noise_key, shape) * np.std(last['down'])
  last['down'] = last['down'] + 0.5 * noise
  return {**params, 'layers': (*params['layers'][:-1], last)}


class QwenTest(parameterized.TestCase):
  """The pair in bfloat16, exact mode: bit-equal text at one width."""

  def test_text_equals_plain_decoding(self):
    target = load.load(files.find(files.QWEN_TARGET), 'bfloat16')
    draft = load.load(files.find(files.QWEN_DRAFT), 'bfloat16')
    check_same_vocabulary(target.tokenizer, draft.tokenizer)
    # Greedy and sampled rows side by side: coupled is exact for both.
    warm = SamplingOptions(temperature=0.8, top_p=0.95)
    requests = make_requests(target, [SamplingOptions(), warm] * 2, 24)
    plain, drafted, looked_up = (
      run(target, proposer, params, chain.Coupled(), requests, **options)
      for proposer, params, options in (
        (Nothing(), (), {'batch_size': 4, 'width': 5}),
        (draft_model(draft, 4), draft.params, {'batch_size': 4}),
        (NGram(num_draft_tokens=4), (), {'batch_size': 4}),
      )
    )
    for results in (drafted, looked_up):
      for ours, expected in zip(results, plain):
        self.assertEqual(ours.tokens, expected.tokens)
      self.assertGreater(sum(r.tally.num_accepted for r in results), 0)
    self.assertGreater(sum(r.tally.num_accepted for r in drafted), 30)


if __name__ == '__main__':
  absltest.main()

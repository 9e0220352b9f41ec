"""Requests to results on the host, through the library and without flags."""

import functools

import jax
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import requests as requests_lib
from specjax.decode import Decoder
from specjax.generation import generate
from specjax.models import load
from specjax.proposers.base import Nothing
from specjax.proposers.ngram import NGram
from specjax.requests import Request
from specjax.sampling import SamplingOptions
from specjax.testing import counting
from specjax.verify import chain

PROMPT = tuple(b'  def __post_init__(self):\n')
WARM = SamplingOptions(temperature=1.0)


@functools.cache
def target() -> load.Loaded:
  return load.load('demo:target', 'float32')


def run(rows, rule=chain.Coupled(), proposer=NGram(num_draft_tokens=4), **kw):
  decoder = Decoder(
    target=target().model, proposer=proposer, verify=rule, max_length=128
  )
  params = {'target': target().params, 'proposer': ()}
  results = generate(
    decoder, params, rows, target().tokenizer, batch_size=4, **kw
  )
  return list(results)


def request(**fields) -> Request:
  fields = {'prompt_tokens': PROMPT, 'max_new_tokens': 60, **fields}
  return Request(**fields)


class GenerateTest(parameterized.TestCase):
  def test_nothing_is_compiled_twice(self):
    """Wherever the parameters are: warming up compiles ahead of the call."""
    place = lambda params: jax.device_put(params, jax.devices()[0])
    counts = []
    for params in (target().params, place(target().params)):
      jax.clear_caches()
      with counting.count_traces() as traces:
        decoder = Decoder(
          target=target().model,
          proposer=NGram(num_draft_tokens=2),
          verify=chain.Coupled(),
          max_length=64,
        )
        params = {'target': params, 'proposer': ()}
        rows = [request(max_new_tokens=2)]
        list(generate(decoder, params, rows, target().tokenizer, batch_size=1))
      counts.append(traces.num_compilations)
    self.assertEqual(counts[1], counts[0])

  def test_a_stop_id_is_no_text_and_completes_no_stop_string(self):
    plain = run([request()])[0]
    stop_id = plain.tokens[12]
    before = plain.tokens[: plain.tokens.index(stop_id)]
    self.assertGreater(len(before), 1)
    # The stop string would be complete with the text of the stop id.
    stop = (bytes(before[-1:]) + bytes([stop_id])).decode()
    shown = []
    result = run(
      [request(stop=(stop,), stop_ids=(stop_id,))],
      on_text=lambda row, text: shown.append(text),
    )[0]
    self.assertEqual(result.tokens, (*before, stop_id))
    self.assertEqual(result.text, bytes(before).decode())
    self.assertEqual(''.join(shown), result.text)
    self.assertEqual(result.finish_reason, 'stop')

  def test_a_step_is_shown_as_it_is_counted(self):
    text = run([request()])[0].text
    for cut in (5, 17, 30):
      stop = (text[cut : cut + 2],)
      infos = []
      result = run([request(stop=stop)], on_step=infos.append)[0]
      self.assertEqual(result.finish_reason, 'stop')
      for name, total in (
        ('num_emitted_B', result.tally.num_emitted),
        ('num_accepted_B', result.tally.num_accepted),
        ('num_draft_B', result.tally.num_drafted),
      ):
        shown = sum(int(getattr(info, name)[0]) for info in infos)
        self.assertEqual(shown, total, name)
      at_once = run([request(stop=stop)])[0]
      self.assertEqual(result.tokens, at_once.tokens)
      self.assertEqual(result.text, at_once.text)
      self.assertEqual(result.text, text[: text.index(stop[0])])

  def test_plain_sampling_has_one_text_per_seed(self):
    rows = [request(options=WARM, seed=seed) for seed in range(4)]
    texts = [
      [result.tokens for result in run(rows, rule, Nothing())]
      for rule in (chain.Rejection(), chain.Coupled(), chain.Block())
    ]
    self.assertEqual(texts[0], texts[1])
    self.assertEqual(texts[0], texts[2])
    self.assertLen(set(texts[0]), 4)

  def test_greedy_is_for_temperature_0(self):
    with self.assertRaisesRegex(ValueError, 'temperature 0, got 1.0 in row 1'):
      run([request(), request(options=WARM)], chain.Greedy())

  @parameterized.parameters(
    ({'stop': 'ab'}, 'stop must be a tuple'),
    ({'stop': ('',)}, 'stop must be a tuple'),
    ({'stop_ids': (-1,)}, 'stop_ids must be whole numbers'),
    ({'stop_ids': (2**31,)}, 'stop_ids must be whole numbers'),
    ({'prompt_tokens': (1.5,)}, 'prompt_tokens must be whole numbers'),
    ({'seed': 2**32}, 'seed must be'),
    ({'max_new_tokens': -1}, 'max_new_tokens must be'),
  )
  def test_bad_requests(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      request(**fields)

  def test_unanswered(self):
    result = requests_lib.unanswered(request(), 4)
    self.assertEqual((result.tokens, result.finish_reason), ((), 'context'))
    self.assertEqual(result.tally.num_steps, 0)
    np.testing.assert_array_equal(result.tally.accepted_histogram, [0] * 5)


if __name__ == '__main__':
  absltest.main()

"""String-level exact match: text is the target's own, cuts only cost speed."""

import dataclasses

import jax
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import generation
from specjax.decode import Decoder
from specjax.models.toy import ToyModel
from specjax.proposers.base import Nothing
from specjax.proposers.given import Given
from specjax.requests import Request
from specjax.sampling import SamplingOptions
from specjax.testing import loops
from specjax.text_drafts import TextDrafter, cut_behind
from specjax.verify import chain

K = 3


@dataclasses.dataclass(frozen=True)
class Pieces:
  """A tokenizer of a list of pieces that always takes the longest."""

  pieces: tuple[str, ...]
  bos_id = eos_id = None

  @property
  def vocab_size(self):
    return len(self.pieces)

  def encode(self, text, *, add_special):
    del add_special
    ids = []
    while text:
      fits = [piece for piece in self.pieces if text.startswith(piece)]
      ids.append(self.pieces.index(max(fits, key=len)))
      text = text[len(self.pieces[ids[-1]]) :]
    return ids

  def token_bytes(self, token_id):
    return self.pieces[token_id].encode()

  def is_special(self, token_id):
    return self.pieces[token_id].startswith('<')

  def id_to_token(self, token_id):
    return self.pieces[token_id]


TARGET = Pieces(('a', 'b', 'ab', 'ba', 'ä'))
DRAFT = Pieces(('b', 'a', 'aa', 'bb', 'ä', '<end>'))


def serve(verify, temperature, drafter=None, num_tokens=20):
  model, params = loops.toy_pair(jax.random.key(0), TARGET.vocab_size)
  decoder = Decoder(
    target=model,
    proposer=Given(num_draft_tokens=K) if drafter else Nothing(),
    verify=verify,
    max_length=32,
    width=K + 1,
  )
  requests = [
    Request(
      prompt_tokens=tuple(TARGET.encode(text, add_special=True)),
      options=SamplingOptions(temperature=temperature),
      seed=seed,
      max_new_tokens=num_tokens,
    )
    for seed, text in enumerate(('a', 'abba', 'ba'))
  ]
  return list(
    generation.generate(
      decoder,
      {'target': params['target'], 'proposer': ()},
      requests,
      TARGET,
      batch_size=2,
      drafter=drafter,
    )
  )


class TextDrafterTest(parameterized.TestCase):
  @parameterized.parameters((chain.Greedy(), 0.0), (chain.Coupled(), 1.0))
  def test_the_text_is_that_of_plain_decoding(self, verify, temperature):
    model = ToyModel(vocab_size=DRAFT.vocab_size)
    params = model.init(jax.random.key(4))
    drafter = TextDrafter(model, params, DRAFT, TARGET, K, max_length=64)
    plain = serve(verify, temperature)
    drafted = serve(verify, temperature, drafter)
    for one, other in zip(plain, drafted, strict=True):
      self.assertEqual(one.tokens, other.tokens)
      self.assertEqual(one.text, other.text)
    # It is drafted, and some of it is right by chance alone.
    total = [result.tally for result in drafted]
    self.assertGreater(sum(t.num_drafted for t in total), 40)
    self.assertGreater(sum(t.num_accepted for t in total), 0)

  def test_a_draft_that_is_the_target_is_right(self):
    """Where the target's ids are the longest pieces, that is its own cut."""
    pieces = Pieces(('a', 'b', 'c', 'd', 'e'))
    model, params = loops.toy_pair(jax.random.key(0), pieces.vocab_size)
    drafter = TextDrafter(
      model, params['target'], pieces, pieces, K, max_length=64
    )
    decoder = Decoder(
      target=model,
      proposer=Given(num_draft_tokens=K),
      verify=chain.Greedy(),
      max_length=32,
    )
    requests = [
      Request(prompt_tokens=prompt, max_new_tokens=17)
      for prompt in ((0,), (1, 2, 3), (4, 4))
    ]
    results = generation.generate(
      decoder,
      {'target': params['target'], 'proposer': ()},
      requests,
      pieces,
      batch_size=2,
      drafter=drafter,
    )
    for result in results:
      # Four whole steps of four, and the bonus that fills the limit.
      self.assertEqual(result.tally.accepted_histogram.tolist(), [1, 0, 0, 4])

  def test_a_text_is_cut_with_what_stands_before_it(self):
    a, b, ab, ba = range(4)
    # 'ab' + 'ab': the old cut ends where the new one begins.
    self.assertEqual(cut_behind(TARGET, [ab], 'ab'), [ab])
    # 'a' + 'b' would be one piece: the cuts do not meet.
    self.assertEqual(cut_behind(TARGET, [a], 'ba'), [ba])
    self.assertEqual(cut_behind(TARGET, [b, ab], ''), [])

  def test_too_long_a_text_gets_no_drafts(self):
    model = ToyModel(vocab_size=DRAFT.vocab_size)
    params = model.init(jax.random.key(4))
    drafter = TextDrafter(model, params, DRAFT, TARGET, K, max_length=8)
    drafter.begin(2)
    offer = drafter.offer([[4] * 9, [0, 1]], [False, False])
    self.assertEqual(offer.num_draft_B.tolist()[0], 0)
    self.assertGreater(offer.num_draft_B.tolist()[1], 0)
    offer = drafter.offer([[4] * 9, [0, 1]], [True, True])
    self.assertEqual(offer.num_draft_B.tolist(), [0, 0])


if __name__ == '__main__':
  absltest.main()

"""A draft with other ids: the laws of a model, its tables, exact text."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import testing
from specjax.decode import Decoder
from specjax.models import translated
from specjax.models.toy import ToyModel
from specjax.models.translated import Translated, make_tables
from specjax.proposers.draft_model import DraftModel
from specjax.sampling import SamplingOptions
from specjax.testing import certified, loops
from specjax.tokenizers import ByteTokenizer
from specjax.verify import chain


class Words:
  """A tokenizer of a list of texts; those in <> are control tokens."""

  eos_id = None

  def __init__(self, *texts):
    self.texts = texts
    self.vocab_size = len(texts)

  def token_bytes(self, token_id):
    return self.texts[token_id].encode()

  def is_special(self, token_id):
    return self.texts[token_id].startswith('<')


def tables(target, draft, max_ids=3, size=None):
  return make_tables(
    target,
    draft,
    vocab_size=size or target.vocab_size,
    draft_vocab_size=draft.vocab_size,
    max_ids=max_ids,
  )


class TablesTest(absltest.TestCase):
  def test_ids_with_the_same_bytes_are_the_same(self):
    target = Words('a', 'b', 'ab', 'cab', 'x', '<end>', '<of target>')
    draft = Words('<end>', 'ab', 'c', 'b', 'b', '<of draft>', '<')
    found = tables(target, draft, size=8)
    self.assertEqual(found['to_draft'].tolist(), [-1, 3, 1, -1, -1, 0, -1, -1])
    spelled = [
      row[:num].tolist() for row, num in zip(found['spelled'], found['num_ids'])
    ]
    # Neither has 'a' or 'x': the draft's id 0 stands for nothing.
    self.assertEqual(spelled, [[0], [3], [1], [2, 1], [0], [0], [0], [0]])

  def test_long_spellings_keep_their_end(self):
    found = tables(Words('a', 'aabab'), Words('a', 'b'), max_ids=2)
    self.assertEqual(found['spelled'].tolist(), [[0, 0], [0, 1]])
    self.assertEqual(found['num_ids'].tolist(), [1, 2])

  def test_a_control_token_is_no_text(self):
    draft = Words('<end>', 'e')
    draft.is_special = lambda token_id: False
    found = tables(Words('<end>', 'e'), draft)
    self.assertEqual(found['to_draft'].tolist(), [-1, 1])

  def test_nothing_in_common(self):
    with self.assertRaisesRegex(ValueError, 'must have an id in common'):
      tables(Words('a'), Words('b'))

  def test_bytes_are_themselves(self):
    found = tables(ByteTokenizer(), ByteTokenizer())
    self.assertEqual(found['to_draft'].tolist(), list(range(257)))


class LawsTest(parameterized.TestCase):
  def test_it_is_a_language_model(self):
    model, params = certified.foreign_draft()
    testing.check_model(model, params['proposer'], jax.random.key(0))

  def test_one_vocabulary_is_no_translation(self):
    own = ToyModel(vocab_size=4)
    model = Translated(model=own, vocab_size=4)
    params = model.init(jax.random.key(1))
    tokens_BT = jnp.array([[0, 3, 1, 2]])
    cache = model.init_cache(1, 8, 4)
    hidden, _ = model.apply(params, tokens_BT, cache)
    plain, _ = own.apply(params['model'], tokens_BT, own.init_cache(1, 8, 4))
    np.testing.assert_array_equal(
      model.unembed(params, hidden.last_BTD),
      own.unembed(params['model'], plain.last_BTD),
    )

  def test_the_law_is_the_models_on_what_both_have(self):
    model, params = certified.foreign_draft()
    params = params['proposer']
    tokens_BT = jnp.array([[4, 0, 2]])
    own_ids = []
    for token in tokens_BT[0].tolist():
      num = int(params['num_ids'][token])
      own_ids += params['spelled'][token, :num].tolist()
    self.assertGreater(len(own_ids), 3)
    hidden, _ = model.apply(params, tokens_BT, model.init_cache(1, 4, 0))
    law = jax.nn.softmax(model.unembed(params, hidden.last_BTD)[0, -1])
    own = model.model
    plain, _ = own.apply(
      params['model'], jnp.array([own_ids]), own.init_cache(1, 8, 0)
    )
    own_law = jax.nn.softmax(
      own.unembed(params['model'], plain.last_BTD)[0, -1]
    )
    to_draft = np.asarray(params['to_draft'])
    expected = np.where(to_draft >= 0, np.asarray(own_law)[to_draft], 0)
    np.testing.assert_allclose(law, expected / expected.sum(), rtol=1e-6)
    self.assertTrue(np.all(np.asarray(law)[to_draft < 0] == 0))

  def test_the_proposer_conforms(self):
    model, params = certified.foreign_draft()
    target = ToyModel(vocab_size=model.vocab_size)
    testing.check_proposer(
      DraftModel(model=model, num_draft_tokens=2),
      target,
      params,
      jax.random.key(3),
    )

  def test_never_worse_than_drafting_what_the_target_lacks(self):
    """p on a b c d, q on a b e: 0.7 are accepted, of q itself 0.5."""
    p = np.array([0.5, 0.2, 0.2, 0.1])
    q = np.array([0.3, 0.3, 0.4])
    found = tables(Words('a', 'b', 'c', 'd'), Words('a', 'b', 'e'))
    model = Translated(
      model=ToyModel(vocab_size=3, table_size=1), vocab_size=4, max_ids=3
    )
    params = {
      'model': {'table': jnp.log(jnp.asarray([q], jnp.float32))},
      **jax.tree.map(jnp.asarray, found),
    }
    hidden, _ = model.apply(params, jnp.array([[0]]), model.init_cache(1, 4, 0))
    law = jax.nn.softmax(model.unembed(params, hidden.last_BTD)[0, 0])
    self.assertAlmostEqual(float(np.minimum(p, law).sum()), 0.7, places=6)

  def test_the_text_of_a_penalised_target_is_exact(self):
    model, params = certified.foreign_draft()
    decoder = Decoder(
      target=ToyModel(vocab_size=model.vocab_size),
      proposer=DraftModel(model=model, num_draft_tokens=2),
      verify=chain.Block(),
      max_length=6,
    )
    group = loops.Group(
      transform='frequency',
      options=SamplingOptions(
        temperature=1.0, frequency_penalty=0.5, top_p=0.9
      ),
      prompt=(4, 2),
      num_tokens=4,
    )
    testing.check_lossless(decoder, params, group, rows=1 << 12)

  @parameterized.parameters(
    {'mask_BTT': True}, {'positions_BT': True}, {'capture': (0,)}
  )
  def test_chains_only(self, **given):
    model, params = certified.foreign_draft()
    cache = model.init_cache(1, 4, 0)
    with self.assertRaisesRegex(ValueError, 'takes chains of tokens'):
      model.apply(params['proposer'], jnp.array([[0]]), cache, **given)
    zero_B = jnp.zeros(1, jnp.int32)
    with self.assertRaisesRegex(ValueError, 'keeps chains'):
      model.keep(cache, zero_B, jnp.zeros((1, 1), jnp.int32), zero_B)

  def test_sizes(self):
    with self.assertRaisesRegex(ValueError, 'max_ids must be >= 1, got 0'):
      Translated(model=ToyModel(vocab_size=2), vocab_size=2, max_ids=0)
    self.assertLess(translated.ABSENT, -1e20)


if __name__ == '__main__':
  absltest.main()

"""The examples of CONTRIBUTING.md: as printed there, short, and right."""

import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from examples import own_model, own_proposer, own_verifier
from specjax import (
  Decoder,
  DraftModel,
  NGram,
  Nothing,
  Rejection,
  SamplingOptions,
  testing,
)
from specjax.testing import loops
from specjax.verify import chain

ROOT = pathlib.Path(__file__).resolve().parents[1]
NAMES = ('own_model', 'own_proposer', 'own_verifier')
WARM = testing.Group(
  transform='none',
  options=SamplingOptions(temperature=1.0),
  prompt=(1, 0),
  num_tokens=4,
)


class Means(nn.Module):
  """Each id, and the mean of all before it."""

  @nn.compact
  def __call__(self, ids_BS):
    x_BSD = nn.Embed(4, 8)(ids_BS)
    index_1S1 = 1.0 + jnp.arange(ids_BS.shape[1])[None, :, None]
    mean_BSD = jnp.cumsum(x_BSD, axis=1) / index_1S1
    return 3 * nn.Dense(4)(jnp.concatenate([x_BSD, mean_BSD], axis=-1))


def toy():
  return loops.toy_pair(jax.random.key(0), vocab_size=4)


def bigrams():
  return jax.random.normal(jax.random.key(1), (4, 4))


def decoder_of(target, proposer, rule):
  return Decoder(target=target, proposer=proposer, verify=rule, max_length=6)


class PrintedTest(parameterized.TestCase):
  @parameterized.parameters(*NAMES)
  def test_is_short_and_stands_in_the_document(self, name):
    source = (ROOT / 'examples' / f'{name}.py').read_text(encoding='utf-8')
    self.assertLess(len(source.splitlines()), 40)
    document = (ROOT / 'CONTRIBUTING.md').read_text(encoding='utf-8')
    self.assertIn(f'```python\n{source}```\n', document)

  def test_nothing_else_is_printed(self):
    document = (ROOT / 'CONTRIBUTING.md').read_text(encoding='utf-8')
    self.assertLen(re.findall('^```python$', document, re.M), len(NAMES))


class ProposerTest(parameterized.TestCase):
  # The laws of all proposers: tests/proposers/conformance_test.py.
  def test_is_lossless(self):
    model, params = toy()
    testing.check_lossless(
      decoder_of(model, own_proposer.Bigram(num_draft_tokens=2), chain.Block()),
      {'target': params['target'], 'proposer': bigrams()},
      WARM,
    )


class VerifierTest(absltest.TestCase):
  def test_conforms(self):
    testing.check_rule(own_verifier.Matching(), jax.random.key(3))

  def test_writes_what_plain_sampling_writes_and_accepts_less(self):
    model, params = toy()

    def program(proposer, rule):
      own = params if proposer is not nothing else {**params, 'proposer': ()}
      decoder = decoder_of(model, proposer, rule)
      return loops.Program(
        proposer='', decoder=decoder, params=own, groups=(WARM,), rows=512
      )

    nothing = Nothing()
    drafting = DraftModel(model=model, num_draft_tokens=2)
    matching = program(drafting, own_verifier.Matching())
    plain = loops.observe(program(nothing, chain.Coupled()))[0]
    self.assertTrue((loops.observe(matching)[0] == plain).all())
    drafted, accepted = loops.count_drafts(matching)
    _, most = loops.count_drafts(program(drafting, Rejection()))
    self.assertGreater(accepted, 0.1 * drafted)
    self.assertLess(accepted, 0.8 * most)


class ModelTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    module = Means()
    self.model = own_model.Whole(module=module, vocab_size=4)
    self.params = module.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))

  def test_conforms(self):
    testing.check_model(self.model, self.params, jax.random.key(1))

  def test_decodes(self):
    for name, proposer, params in (
      ('ngram', NGram(num_draft_tokens=2), ()),
      (
        'itself',
        DraftModel(model=self.model, num_draft_tokens=2),
        jax.tree.map(lambda x: 0.8 * x, self.params),
      ),
    ):
      with self.subTest(name):
        testing.check_lossless(
          decoder_of(self.model, proposer, Rejection()),
          {'target': self.params, 'proposer': params},
          WARM,
        )


if __name__ == '__main__':
  absltest.main()

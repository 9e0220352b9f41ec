"""The laws that every proposer obeys, run over a list."""

import jax
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from examples import own_proposer
from specjax import testing
from specjax.models.heads.toy import ToyHead
from specjax.proposers import stopping
from specjax.proposers.base import Nothing
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.early_exit import EarlyExit
from specjax.proposers.feature_fed import FeatureFed
from specjax.proposers.given import Given
from specjax.proposers.medusa import Medusa
from specjax.proposers.ngram import NGram
from specjax.testing import loops, mutants
from tests.models import tiny
from tests.models.heads import tiny_heads


def toy():
  """The model that all others draft with and for, and parameters of both."""
  return loops.toy_pair(jax.random.key(0), vocab_size=3)


def bigrams():
  """The toy, and log-weights [V, V]."""
  model, params = toy()
  return model, {
    **params,
    'proposer': jax.random.normal(jax.random.key(1), (3, 3)),
  }


def transformer():
  """Two layers; for what reads the inside of its target."""
  model = tiny.model('qwen2', vocab_size=3)
  return model, {'target': tiny.params_of(model), 'proposer': ()}


def with_head(kind):
  """A transformer of three ids, and a head for it."""

  def make():
    target = tiny_heads.target_of(vocab_size=3)
    head = tiny_heads.params_of(tiny_heads.head_of(kind, target))
    return target, {'target': tiny.params_of(target), 'proposer': head}

  return make


def fed(kind, **settings):
  return lambda target: FeatureFed(
    head=tiny_heads.head_of(kind, target), num_draft_tokens=3, **settings
  )


# A new proposer joins by one line: what makes its target, what makes it.
PROPOSERS_UNDER_TEST = (
  ('none', toy, lambda model: Nothing()),
  ('draft', toy, lambda model: DraftModel(model=model, num_draft_tokens=3)),
  ('ngram', toy, lambda model: NGram(num_draft_tokens=3)),
  ('given', toy, lambda model: Given(num_draft_tokens=3)),
  ('own', bigrams, lambda model: own_proposer.Bigram(num_draft_tokens=3)),
  (
    'early_exit',
    transformer,
    lambda model: EarlyExit(model=model, exit_layer=1, num_draft_tokens=3),
  ),
  ('mtp', with_head('mtp'), fed('mtp')),
  ('mtp_reduced', with_head('mtp_reduced'), fed('mtp_reduced')),
  (
    'eagle3_confidence',
    with_head('eagle3_reduced'),
    fed('eagle3_reduced', stop=stopping.Confidence(least=0.55)),
  ),
  (
    'medusa',
    with_head('medusa_own'),
    lambda target: Medusa(
      heads=tiny_heads.head_of('medusa_own', target), num_draft_tokens=3
    ),
  ),
  (
    'toy_head',
    toy,
    lambda model: FeatureFed(head=ToyHead(target=model), num_draft_tokens=3),
  ),
  (
    'draft_confidence',
    toy,
    lambda model: DraftModel(
      model=model, num_draft_tokens=3, stop=stopping.Confidence(least=0.4)
    ),
  ),
  (
    'draft_cost',
    toy,
    lambda model: DraftModel(
      model=model,
      num_draft_tokens=3,
      stop=stopping.Cost(step_costs=(1.0, 1.5, 2.0)),
    ),
  ),
)


class ConformanceTest(parameterized.TestCase):
  @parameterized.named_parameters(*PROPOSERS_UNDER_TEST)
  def test_proposer(self, make_target, make):
    model, params = make_target()
    testing.check_proposer(make(model), model, params, jax.random.key(3))

  def test_a_draft_must_not_be_dropped_once_it_is_drawn(self):
    model, params = toy()
    honest = DraftModel(model=model, num_draft_tokens=1)
    false = mutants.StopsAtItsToken(honest, 0.25)
    message = 'must decide on a draft before it is drawn'
    with self.assertRaisesRegex(AssertionError, message):
      testing.check_proposer(false, model, params, jax.random.key(3))

  def test_a_false_report_does_not_conform(self):
    model, params = toy()
    honest = DraftModel(model=model, num_draft_tokens=1)
    false = mutants.FalseReport(honest, 'temperature')
    with self.assertRaisesRegex(AssertionError, 'draw from the law it reports'):
      testing.check_proposer(false, model, params, jax.random.key(3))


if __name__ == '__main__':
  absltest.main()

"""The laws that every proposer obeys, run over a list."""

import jax
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import testing
from specjax.proposers.base import Nothing
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.ngram import NGram
from specjax.testing import loops, mutants


def toy():
  """The model that all of them draft with and for."""
  return loops.toy_pair(jax.random.key(0), vocab_size=3)[0]


# A new proposer joins by one line; parameters are those of `loops.toy_pair`.
PROPOSERS_UNDER_TEST = (
  ('none', lambda: Nothing()),
  ('draft', lambda: DraftModel(model=toy(), num_draft_tokens=3)),
  ('ngram', lambda: NGram(num_draft_tokens=3)),
)


class ConformanceTest(parameterized.TestCase):
  @parameterized.named_parameters(*PROPOSERS_UNDER_TEST)
  def test_proposer(self, make):
    model, params = loops.toy_pair(jax.random.key(0), vocab_size=3)
    testing.check_proposer(make(), model, params, jax.random.key(3))

  def test_a_false_report_does_not_conform(self):
    model, params = loops.toy_pair(jax.random.key(0), vocab_size=3)
    honest = DraftModel(model=model, num_draft_tokens=1)
    false = mutants.FalseReport(honest, 'temperature')
    with self.assertRaisesRegex(AssertionError, 'draw from the law it reports'):
      testing.check_proposer(false, model, params, jax.random.key(3))


if __name__ == '__main__':
  absltest.main()

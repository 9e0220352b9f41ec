"""The conformance checks pass the toy, and see what is wrong."""

import dataclasses
from typing import Any

import jax
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import testing
from specjax.models.toy import ToyModel
from specjax.proposers.base import Nothing
from specjax.sampling import SamplingOptions
from specjax.testing import mutants
from specjax.verify import chain
from tests import toy_loops

# A new model joins by one line. (Real ones are in tests/models.)
MODELS_UNDER_TEST = (
  ('toy', ToyModel(vocab_size=50)),
  ('windowed', ToyModel(vocab_size=5, window=3)),
)


@dataclasses.dataclass(frozen=True)
class Shifted:
  """Positions that are one too high from the second call on."""

  model: ToyModel

  def __getattr__(self, name: str) -> Any:
    return getattr(self.model, name)

  def apply(self, params, tokens_BT, cache, **options):
    is_later_B = (cache.length_B > 0).astype(cache.length_B.dtype)
    positions_BT = (cache.length_B + is_later_B)[:, None] + jax.numpy.arange(
      tokens_BT.shape[1]
    )[None, :]
    return self.model.apply(
      params, tokens_BT, cache, positions_BT=positions_BT, **options
    )


@dataclasses.dataclass(eq=False)
class NotStatic:
  """Compares by identity."""

  size: int


class ConformanceTest(parameterized.TestCase):
  @parameterized.named_parameters(*MODELS_UNDER_TEST)
  def test_model(self, model):
    params = model.init(jax.random.key(1))
    testing.check_model(model, params, jax.random.key(3))

  @parameterized.parameters(
    (Shifted(ToyModel(vocab_size=50)), 'chunks must equal the whole'),
    (
      mutants.RewindOffByOne(ToyModel(vocab_size=50)),
      'forgotten tokens must leave no trace',
    ),
  )
  def test_a_broken_model(self, model, message):
    params = model.init(jax.random.key(1))
    with self.assertRaisesRegex(AssertionError, message):
      testing.check_model(model, params, jax.random.key(3))

  def test_static(self):
    testing.check_static(chain.Rejection())
    testing.check_static(toy_loops.draft_decoder(2))
    with self.assertRaisesRegex(AssertionError, 'must be equal to itself'):
      testing.check_static(NotStatic(3))

  def test_lossless(self):
    """Any decoder with few ids; here one that stops where it must not."""
    (stop_mutant,) = (
      mutant
      for mutant in mutants.all_mutants(rows=1)
      if mutant.name == 'stop_id_ignored_inside_draft'
    )
    program = stop_mutant.program
    group = dataclasses.replace(
      program.groups[0],
      options=SamplingOptions(temperature=1.0),
      num_tokens=4,
    )
    right = program.decoder.decoder
    right = dataclasses.replace(right, proposer=Nothing())
    testing.check_lossless(right, program.params, group)
    with self.assertRaisesRegex(AssertionError, 'must emit the law'):
      testing.check_lossless(program.decoder, program.params, group)


if __name__ == '__main__':
  absltest.main()

"""The flag for draft lengths, and what measured costs make of a step."""

from unittest import mock

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import lengths, run_config, step_costs
from specjax.decode import Decoder
from specjax.proposers import stopping
from specjax.proposers.base import Nothing
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.ngram import NGram
from specjax.verify import chain
from tests.toy_loops import TOY


def cost(model, params, *, num_rows, **sizes) -> step_costs.Cost:
  """Ten for the target and one for the draft, and a tenth more per row."""
  del model, sizes
  least = params * (1 + 0.1 * (num_rows - 1))
  return step_costs.Cost(
    median=2 * least,
    least=least,
    most=3 * least,
    num_calls=5,
    num_passes=4,
    seconds_compile=0.0,
  )


class LengthsTest(parameterized.TestCase):
  def test_parse(self):
    self.assertEqual(lengths.parse('fixed'), stopping.Fixed())
    self.assertEqual(lengths.parse('acceptance'), stopping.Acceptance())
    self.assertEqual(
      lengths.parse('confidence:0.25'), stopping.Confidence(least=0.25)
    )

  @parameterized.parameters(
    'confidence', 'confidence:', 'confidence:0', 'confidence:nan', 'Fixed', ''
  )
  def test_what_is_no_rule(self, text):
    with self.assertRaisesRegex(ValueError, '--stop_rule.*, got '):
      lengths.parse(text)

  def test_cost_is_measured_by_each_process(self):
    lengths.check('cost', 'draft')
    with self.assertRaisesRegex(ValueError, 'needs --num_processes=1'):
      lengths.check('cost', 'draft', needs_one_process=True)

  @parameterized.parameters(
    # Widths 1, 2, 4; the first pass of two rows is made by every step.
    ((1, 2, 4), 'draft', (11.1, 12.1, 15.1, 16.1)),
    (None, 'draft', (14.1, 14.1, 15.1, 16.1)),
    ((1, 2, 4), 'ngram', (10, 11, 13, 13)),
  )
  def test_costs_of_steps(self, widths, proposer, expected):
    decoder = Decoder(
      target=TOY,
      proposer=DraftModel(model=TOY, num_draft_tokens=3)
      if proposer == 'draft'
      else NGram(num_draft_tokens=3),
      verify=chain.Rejection(),
      max_length=32,
      widths=widths,
    )
    with mock.patch.object(step_costs, 'measure', cost):
      decoder, costs = lengths.with_costs(
        decoder, {'target': 10.0, 'proposer': 1.0}, 2
      )
    rule = stopping.Cost(
      step_costs=tuple(round(cost / expected[0], 2) for cost in expected)
    )
    self.assertEqual(decoder.proposer.stop, rule)
    self.assertIn('4: 13.00', str(costs))

  @parameterized.parameters(
    (dict(proposer='draft', draft='x', stop_rule='acceptance'), (1, 2, 4, 5)),
    (dict(proposer='ngram'), (1, 2, 4, 5)),
    (dict(proposer='draft', draft='x'), None),
    (dict(proposer='none'), None),
  )
  def test_widths(self, settings, expected):
    make = lambda exact: run_config.RunConfig(
      target='x', exact=exact, **settings
    )
    self.assertEqual(make(False).widths(False), expected)
    self.assertIsNone(make(True).widths(False))
    # Where rows do not depend on the width, exact mode takes the cheapest.
    is_plain = settings['proposer'] == 'none'
    exact = (1, 5) if is_plain else expected
    self.assertEqual(make(True).widths(True), exact)

  def test_plain_decoding_has_one_width(self):
    decoder = Decoder(
      target=TOY, proposer=Nothing(), verify=chain.Greedy(), max_length=32
    )
    self.assertEqual(decoder.pass_widths, (1,))


if __name__ == '__main__':
  absltest.main()

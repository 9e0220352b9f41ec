"""Tools for tests, ours and those of whoever adds a part."""

from specjax.testing.counting import Traces, count_traces
from specjax.testing.exact import (
  ChiSquare,
  Law,
  chi_square,
  enumerate_exact,
  model_logits,
  reference_law,
  toy_logits,
)
from specjax.testing.rules import enumerate_rule, ideal_accepted, path_law

__all__ = (
  'ChiSquare',
  'Law',
  'Traces',
  'chi_square',
  'count_traces',
  'enumerate_exact',
  'enumerate_rule',
  'ideal_accepted',
  'model_logits',
  'path_law',
  'reference_law',
  'toy_logits',
)

"""Tools for tests, ours and those of whoever adds a part."""

from specjax.testing.conformance import (
  check_lossless,
  check_model,
  check_proposer,
  check_rule,
  check_static,
)
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
from specjax.testing.loops import Group
from specjax.testing.rules import enumerate_rule, ideal_accepted, path_law

__all__ = (
  'ChiSquare',
  'Group',
  'Law',
  'Traces',
  'check_lossless',
  'check_model',
  'check_proposer',
  'check_rule',
  'check_static',
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

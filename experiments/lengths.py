"""How long drafts are: the stopping rule a flag names, and what it costs."""

import dataclasses
from typing import Any

from experiments import step_costs
from specjax.decode import Decoder
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.early_exit import EarlyExit
from specjax.proposers.feature_fed import FeatureFed
from specjax.proposers.medusa import Medusa
from specjax.proposers.stopping import (
  Acceptance,
  Confidence,
  Cost,
  Fixed,
  StoppingRule,
)
from specjax.shapes import Params

_CHOICES = 'fixed, confidence:X, acceptance or cost'


def parse(text: str) -> StoppingRule:
  """The rule that --stop_rule names; that of `cost` has no costs yet.

  >>> parse('confidence:0.4')
  Confidence(least=0.4)
  """
  name, colon, number = text.partition(':')
  if name == 'confidence' and colon:
    try:
      return Confidence(least=float(number))
    except ValueError:
      raise ValueError(
        '--stop_rule=confidence:X needs an X above 0 and at most 1, got '
        f'{number!r}.'
      ) from None
  rules = {'fixed': Fixed(), 'acceptance': Acceptance(), 'cost': Fixed()}
  if text not in rules:
    raise ValueError(f'--stop_rule must be {_CHOICES}, got {text!r}.')
  return rules[text]


def check(text: str, proposer: str, *, needs_one_process: bool = False) -> None:
  """Raises ValueError unless the rule suits the proposer."""
  rule = parse(text)
  if text != 'fixed' and proposer == 'none':
    raise ValueError('--stop_rule is not used with --proposer=none; drop one.')
  if rule.reads_logits and proposer == 'ngram':
    raise ValueError(
      f'--stop_rule={text} needs logits of a draft, and --proposer=ngram has '
      'none; acceptance and cost need none.'
    )
  if text == 'cost' and needs_one_process:
    raise ValueError(
      '--stop_rule=cost measures each process for itself, so it needs '
      '--num_processes=1.'
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
  """Milliseconds of the passes of a step, the least of several measurements.

  Attributes:
    verify: by width, (width, cost) ascending.
    first: a step's first draft pass, if steps without drafts make it too;
      else 0.
    draft: each further one.
    num_first: drafts that the first pass is good for.
  """

  verify: tuple[tuple[int, float], ...]
  first: float
  draft: float
  num_first: int = 1

  def of_steps(self, num_draft_tokens: int) -> tuple[float, ...]:
    """The cost of a step with 0, 1, ..., K drafts.

    To two digits, so that two runs with nearly the same costs share a
    compilation.
    """
    found = []
    for k in range(num_draft_tokens + 1):
      verify = next(cost for width, cost in self.verify if width > k)
      passes = max(k - self.num_first, 0)
      found.append(float(f'{verify + self.first + passes * self.draft:.2g}'))
    return tuple(found)

  def __str__(self) -> str:
    verify = ', '.join(f'{width}: {cost:.2f}' for width, cost in self.verify)
    drafts = f'; draft {self.draft:.2f}' if self.draft else ''
    first = f', the first {self.first:.2f}' if self.first else ''
    return f'measured ms per pass: verification of rows {verify}{drafts}{first}'


def measure(decoder: Decoder, params: Params, batch_size: int) -> StepCosts:
  """Times the passes of the decoder's models, in a cache that is half full."""

  def cost(model: Any, params: Params, num_rows: int) -> float:
    return step_costs.measure(
      model,
      params,
      batch_size=batch_size,
      num_rows=num_rows,
      length=decoder.max_length // 2,
      num_slots=decoder.num_slots,
    ).least

  verify = tuple(
    (width, cost(decoder.target, params['target'], width))
    for width in decoder.pass_widths
  )
  proposer = decoder.proposer
  if isinstance(proposer, DraftModel):
    passes = (cost(proposer.model, params['proposer'], rows) for rows in (2, 1))
    first, draft = passes
    return StepCosts(verify=verify, first=first, draft=draft)
  if isinstance(proposer, EarlyExit):
    exit_params = proposer.first_params(params['target'])
    draft = cost(proposer.first_layers, exit_params, 1)
    return StepCosts(verify=verify, first=0.0, draft=draft, num_first=0)
  if isinstance(proposer, FeatureFed):
    entries = step_costs.Entries(head=proposer.head)
    passes = (
      cost(entries, params, rows) for rows in (proposer.num_draft_tokens + 1, 1)
    )
    first, draft = passes
    return StepCosts(verify=verify, first=first, draft=draft)
  if isinstance(proposer, Medusa):
    guesses = step_costs.Guesses(
      heads=proposer.heads, num_heads=proposer.num_draft_tokens
    )
    return StepCosts(verify=verify, first=cost(guesses, params, 1), draft=0.0)
  return StepCosts(verify=verify, first=0.0, draft=0.0)


def with_costs(
  decoder: Decoder, params: Params, batch_size: int
) -> tuple[Decoder, StepCosts]:
  """The decoder with the rule `cost`, and what it was made from."""
  costs = measure(decoder, params, batch_size)
  rule = Cost(step_costs=costs.of_steps(decoder.proposer.num_draft_tokens))
  proposer = dataclasses.replace(decoder.proposer, stop=rule)
  return dataclasses.replace(decoder, proposer=proposer), costs

"""How long drafts are: the stopping rule a flag names, and what it costs."""

import dataclasses
from typing import Any

from experiments import step_costs
from specjax.decode import Decoder
from specjax.proposers.base import Proposer
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

_NUM_ROUNDS = 3
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
    """The cost of a step with 0, 1, ..., K drafts, in steps without drafts.

    To hundredths, so that two runs with the same costs share a compilation.
    """
    found = []
    for k in range(num_draft_tokens + 1):
      verify = next(cost for width, cost in self.verify if width > k)
      passes = max(k - self.num_first, 0)
      found.append(verify + self.first + passes * self.draft)
    return tuple(round(cost / found[0], 2) for cost in found)

  def __str__(self) -> str:
    verify = ', '.join(f'{width}: {cost:.2f}' for width, cost in self.verify)
    drafts = f'; draft {self.draft:.2f}' if self.draft else ''
    first = f', the first {self.first:.2f}' if self.first else ''
    return f'measured ms per pass: verification of rows {verify}{drafts}{first}'


def measure(decoder: Decoder, params: Params, batch_size: int) -> StepCosts:
  """Times the passes of the decoder's models, in a cache that is half full.

  They take turns, so that a slow minute of the machine makes none of them look
  dear beside the others.
  """
  passes = {
    width: (decoder.target, params['target'], width)
    for width in decoder.pass_widths
  }
  first, draft = _drafting(decoder.proposer, params)
  passes |= {'first': first, 'draft': draft}

  def cost(model: Any, params: Params, num_rows: int) -> float:
    return step_costs.measure(
      model,
      params,
      batch_size=batch_size,
      num_rows=num_rows,
      length=decoder.max_length // 2,
      num_slots=decoder.num_slots,
      num_calls=2,
    ).least

  rounds = [
    {name: cost(*each) for name, each in passes.items() if each is not None}
    for _ in range(_NUM_ROUNDS)
  ]
  least = {name: min(costs[name] for costs in rounds) for name in rounds[0]}
  return StepCosts(
    verify=tuple((width, least[width]) for width in decoder.pass_widths),
    first=least.get('first', 0.0),
    draft=least.get('draft', 0.0),
    num_first=0 if first is None else 1,
  )


# A model, its parameters and the rows of a pass.
_Pass = tuple[Any, Params, int]


def _drafting(
  proposer: Proposer, params: Params
) -> tuple[_Pass | None, _Pass | None]:
  """The pass that every step makes first, and each further one."""
  k = proposer.num_draft_tokens
  if isinstance(proposer, DraftModel):
    model = proposer.model, params['proposer']
    return (*model, 2), (*model, 1)
  if isinstance(proposer, EarlyExit):
    exit_params = proposer.first_params(params['target'])
    return None, (proposer.first_layers, exit_params, 1)
  if isinstance(proposer, FeatureFed):
    entries = step_costs.Entries(head=proposer.head)
    return (entries, params, k + 1), (entries, params, 1)
  if isinstance(proposer, Medusa):
    guesses = step_costs.Guesses(heads=proposer.heads, num_heads=k)
    return (guesses, params, 1), None
  return None, None


def with_costs(
  decoder: Decoder, params: Params, batch_size: int
) -> tuple[Decoder, StepCosts]:
  """The decoder with the rule `cost`, and what it was made from."""
  costs = measure(decoder, params, batch_size)
  rule = Cost(step_costs=costs.of_steps(decoder.proposer.num_draft_tokens))
  proposer = dataclasses.replace(decoder.proposer, stop=rule)
  return dataclasses.replace(decoder, proposer=proposer), costs

"""How many tokens a row drafts: rules that end its draft.

A rule is asked twice: before a step's first draft how many there may be, from
the row's own past; and behind each draft whether another is made, from the
logits that this one was drawn from. It never sees the token that it decides on,
nor another row. So the drafts that are judged are those of a shorter chain, and
the text keeps the target's law, whatever the rule says.

A rule that looked at the logits of the draft in question would pay a pass of
the draft for every no; a draft that is already paid for is worth verifying.
"""

import dataclasses
import math
from typing import Any, Protocol

import flax.struct
import jax.numpy as jnp

from specjax.proposers.base import Outcome
from specjax.shapes import Array

State = Any


class StoppingRule(Protocol):
  """Ends drafts. The object is static; its state belongs to one batch.

  Attributes:
    reads_logits: whether `goes_on` looks at logits; if not, the rule also
      serves proposers that have none.
  """

  reads_logits: bool

  def init(self, batch_size: int) -> State:
    """The state of rows without a past."""
    ...

  def most(self, state: State, num_draft_tokens: int) -> Array:
    """How many drafts a step may make, 0..num_draft_tokens.

    Returns:
      int32 [B], or [1] for all rows.
    """
    ...

  def goes_on(self, state: State, logits_BV: Array, i: Array) -> Array:
    """Whether another draft is made behind draft `i`, bool [B].

    Args:
      state: the rule's own.
      logits_BV: float32 [B, V], the draft's raw logits at draft i. They are
        not the law it was drawn from, which at temperature 0 is one-hot.
      i: int32 [], 0..K - 1.
    """
    ...

  def observe(self, state: State, outcome: Outcome) -> State:
    """Learns what became of a step; a finished row's state stays."""
    ...


@dataclasses.dataclass(frozen=True)
class Fixed:
  """All K drafts, always.

  Lossless: it decides nothing.
  Source: Leviathan et al., arXiv:2211.17192, Algorithm 1 (their gamma).
  """

  reads_logits = False

  def init(self, batch_size: int) -> tuple[()]:
    """Nothing to carry: ()."""
    del batch_size
    return ()

  def most(self, state: tuple[()], num_draft_tokens: int) -> Array:
    """K for all rows, int32 [1]."""
    del state
    return jnp.full(1, num_draft_tokens, jnp.int32)

  def goes_on(self, state: tuple[()], logits_BV: Array, i: Array) -> Array:
    """True, bool [B]."""
    del state, i
    return jnp.ones(logits_BV.shape[0], bool)

  def observe(self, state: tuple[()], outcome: Outcome) -> tuple[()]:
    """Nothing to learn."""
    del outcome
    return state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Confidence:
  """Drafts while the draft's likeliest token has at least this probability.

  The first draft about which it is unsure is the last one. The probability is
  that of the model itself, at temperature 1 and before penalties and filters.

  Lossless: whether a draft is made rests on the law of the one before it.
  Source: Zhang et al., Draft & Verify, arXiv:2309.08168. Deviation: the
    threshold stays.

  Attributes:
    least: the threshold, above 0 and at most 1.

  Raises:
    ValueError: `least` is out of range.
  """

  least: float
  reads_logits = True

  def __post_init__(self):
    if not 0 < self.least <= 1:
      raise ValueError(
        f'confidence must be above 0 and at most 1, got {self.least}.'
      )

  def init(self, batch_size: int) -> tuple[()]:
    """Nothing to carry: ()."""
    del batch_size
    return ()

  def most(self, state: tuple[()], num_draft_tokens: int) -> Array:
    """K for all rows, int32 [1]."""
    del state
    return jnp.full(1, num_draft_tokens, jnp.int32)

  def goes_on(self, state: tuple[()], logits_BV: Array, i: Array) -> Array:
    """Whether max softmax(logits) >= least, bool [B]."""
    del state, i
    best_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
    # The best id's share of the total is 1 / total.
    total_B = jnp.sum(jnp.exp(logits_BV - best_B1), axis=-1)
    return self.least * total_B <= 1

  def observe(self, state: tuple[()], outcome: Outcome) -> tuple[()]:
    """Nothing to learn."""
    del outcome
    return state


@flax.struct.dataclass
class Past:
  """Counts of a row's drafts, which every step since has made weigh less.

  Attributes:
    num_tested_B: float32 [B], drafts accepted or rejected.
    num_accepted_B: float32 [B], drafts accepted.
  """

  num_tested_B: Array
  num_accepted_B: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunningAcceptance:
  """How probably a row's next draft is accepted, judged by its past.

    (accepted + weight * prior) / (tested + weight)

  Both counts forget by `decay` per step, so the rate goes back to the prior
  where nothing is tested.

  Attributes:
    prior: the rate of a row without a past, above 0 and below 1.
    weight: how many tested drafts the prior counts for, above 0.
    decay: what counts are multiplied by in a step, above 0 and below 1.

  Raises:
    ValueError: naming the setting, the rule and the value.
  """

  prior: float = 0.8
  weight: float = 2.0
  decay: float = 0.9

  def __post_init__(self):
    for name in ('prior', 'decay'):
      if not 0 < getattr(self, name) < 1:
        raise ValueError(
          f'{name} must be above 0 and below 1, got {getattr(self, name)}.'
        )
    if not 0 < self.weight < math.inf:
      raise ValueError(f'weight must be > 0, got {self.weight}.')

  def init(self, batch_size: int) -> Past:
    """Rows without a past: both counts 0."""
    return Past(jnp.zeros(batch_size), jnp.zeros(batch_size))

  def rate(self, past: Past) -> Array:
    """float32 [B]."""
    accepted_B = past.num_accepted_B + self.weight * self.prior
    return accepted_B / (past.num_tested_B + self.weight)

  def observe(self, past: Past, outcome: Outcome) -> Past:
    """Both counts times `decay`, plus this step's; a finished row's stay.

    Tested are the accepted drafts and the first rejected one.
    """
    num_tested_B = jnp.minimum(outcome.num_accepted_B + 1, outcome.num_draft_B)
    is_live_B = outcome.num_emitted_B > 0
    grow = lambda sum_B, num_B: jnp.where(
      is_live_B, self.decay * sum_B + num_B, sum_B
    )
    return Past(
      grow(past.num_tested_B, num_tested_B),
      grow(past.num_accepted_B, outcome.num_accepted_B),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
  """As many drafts as are probably all accepted, judged by the row's past.

  With `a` the row's running acceptance, draft i = 1, 2, ... is made while
  a ** i >= least; the first one always is.

  Lossless: it looks at earlier steps alone.
  Source: Leviathan et al., arXiv:2211.17192, section 3.1, for the assumption
    that drafts are accepted independently of each other; the threshold is ours.

  Attributes:
    least: above 0 and at most 1.
    running: the average.

  Raises:
    ValueError: `least` is out of range.
  """

  least: float = 0.4
  running: RunningAcceptance = RunningAcceptance()
  reads_logits = False

  def __post_init__(self):
    if not 0 < self.least <= 1:
      raise ValueError(
        f'least must be above 0 and at most 1, got {self.least}.'
      )

  def init(self, batch_size: int) -> Past:
    """Rows without a past."""
    return self.running.init(batch_size)

  def most(self, state: Past, num_draft_tokens: int) -> Array:
    """The largest i with a ** i >= least, 1..K, int32 [B]."""
    power_BK = _powers(self.running.rate(state), num_draft_tokens)
    num_B = jnp.sum(power_BK >= self.least, axis=1, dtype=jnp.int32)
    return jnp.maximum(num_B, 1)

  def goes_on(self, state: Past, logits_BV: Array, i: Array) -> Array:
    """True, bool [B]: `most` has said it all."""
    del state, i
    return jnp.ones(logits_BV.shape[0], bool)

  def observe(self, state: Past, outcome: Outcome) -> Past:
    """For the running acceptance."""
    return self.running.observe(state, outcome)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
  """The number of drafts with the most expected tokens per time, 0 included.

    k = argmax (1 + a + ... + a ** k) / step_costs[k]

  `a` is the row's running acceptance. Where k is 0 it goes back to its prior,
  and the row tries again.

  Lossless: it looks at earlier steps alone.
  Source: Liu et al., SmartSpec, arXiv:2406.14066. Deviation: a row decides by
    itself, as if the others did the same.

  Attributes:
    step_costs: measured costs of a step with 0, 1, 2, ... drafts, in any unit,
      above 0; more drafts are never made.
    running: the average.

  Raises:
    ValueError: there are no costs, or one is not above 0.
  """

  step_costs: tuple[float, ...]
  running: RunningAcceptance = RunningAcceptance()
  reads_logits = False

  def __post_init__(self):
    if not self.step_costs or not all(
      0 < c < math.inf for c in self.step_costs
    ):
      raise ValueError(
        f'step_costs must be one or more numbers > 0, got {self.step_costs}.'
      )

  def init(self, batch_size: int) -> Past:
    """Rows without a past."""
    return self.running.init(batch_size)

  def most(self, state: Past, num_draft_tokens: int) -> Array:
    """The arg-max over k, 0..K, int32 [B]; of equals the fewest drafts."""
    costs = self.step_costs[: num_draft_tokens + 1]
    power_BK = _powers(self.running.rate(state), len(costs) - 1)
    tokens_B = jnp.ones_like(state.num_tested_B)
    rates = [tokens_B / costs[0]]
    for k, cost in enumerate(costs[1:]):
      tokens_B = tokens_B + power_BK[:, k]
      rates.append(tokens_B / cost)
    return jnp.argmax(jnp.stack(rates), axis=0).astype(jnp.int32)

  def goes_on(self, state: Past, logits_BV: Array, i: Array) -> Array:
    """True, bool [B]: `most` has said it all."""
    del state, i
    return jnp.ones(logits_BV.shape[0], bool)

  def observe(self, state: Past, outcome: Outcome) -> Past:
    """For the running acceptance."""
    return self.running.observe(state, outcome)


def _powers(a_B: Array, num: int) -> Array:
  """a, a ** 2, ..., a ** num: float32 [B, num]."""
  return jnp.cumprod(
    jnp.broadcast_to(a_B[:, None], (a_B.shape[0], num)), axis=1
  )

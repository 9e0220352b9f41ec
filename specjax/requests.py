"""What is asked for and what became of it, on the host."""

import dataclasses

import numpy as np

from specjax import metrics, noise
from specjax.sampling import SamplingOptions

MAX_NEW_TOKENS = 2**31 - 1


def check_max_new_tokens(value: int) -> int:
  """Returns `value`; raises ValueError unless it is in 0..2**31 - 1.

  >>> check_max_new_tokens(-1)
  Traceback (most recent call last):
  ...
  ValueError: max_new_tokens must be a whole number in 0..2147483647, got -1.
  """
  is_whole = isinstance(value, int) and not isinstance(value, bool)
  if not is_whole or not 0 <= value <= MAX_NEW_TOKENS:
    raise ValueError(
      f'max_new_tokens must be a whole number in 0..{MAX_NEW_TOKENS}, got '
      f'{value!r}.'
    )
  return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """One prompt and how to continue it.

  Attributes:
    prompt: the text as fed, for the record.
    prompt_tokens: its ids, at least one.
    options: sampling settings.
    seed: 0..2**32 - 1.
    max_new_tokens: at least 0.
    stop: texts at which the output ends, themselves not included.
    stop_ids: ids that end the output.

  Raises:
    ValueError: naming the field, the rule and the value.

  >>> Request(prompt_tokens=(), max_new_tokens=5)
  Traceback (most recent call last):
  ...
  ValueError: the prompt must have at least one token.
  """

  prompt: str = ''
  prompt_tokens: tuple[int, ...]
  options: SamplingOptions = SamplingOptions()
  seed: int = 0
  max_new_tokens: int
  stop: tuple[str, ...] = ()
  stop_ids: tuple[int, ...] = ()

  def __post_init__(self):
    if not self.prompt_tokens:
      raise ValueError('the prompt must have at least one token.')
    for name in ('prompt_tokens', 'stop_ids'):
      for token in getattr(self, name):
        if not isinstance(token, int) or not 0 <= token < 2**31:
          raise ValueError(
            f'{name} must be whole numbers in 0..{2**31 - 1}, got {token!r}.'
          )
    noise.check_seed(self.seed)
    check_max_new_tokens(self.max_new_tokens)
    is_tuple = isinstance(self.stop, tuple)
    if not is_tuple or not all(isinstance(x, str) and x for x in self.stop):
      raise ValueError(
        f'stop must be a tuple of texts that are not empty, got {self.stop!r}.'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
  """Seconds of a batch; compilation is apart."""

  compile: float
  prefill: float
  decode: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """What became of a request.

  Attributes:
    request: the request.
    tokens: emitted ids; a stop id, or the token that completed a stop string,
      is the last of them.
    text: their text, without special tokens and the stop id, ending before a
      stop string.
    finish_reason: 'stop', 'length', 'context' or 'error'.
    logprobs: nats of each token under the raw target law.
    tally: counts of its verifications, after cuts.
    timing: of the batch it was in.
  """

  request: Request
  tokens: tuple[int, ...]
  text: str
  finish_reason: str
  logprobs: tuple[float, ...]
  tally: metrics.Tally
  timing: Timing


def unanswered(request: Request, num_draft_tokens: int) -> Result:
  """The result of a prompt that no buffer can hold any more: no tokens."""
  nothing = np.zeros(0)
  return Result(
    request=request,
    tokens=(),
    text='',
    finish_reason='context',
    logprobs=(),
    tally=metrics.tally(
      step=nothing,
      source=nothing,
      num_draft=nothing,
      overlap=nothing,
      num_draft_tokens=num_draft_tokens,
      is_stopped=False,
    ),
    timing=Timing(compile=0.0, prefill=0.0, decode=0.0),
  )

"""Flags that name token ids."""

import math


def parse_ids(text: str, name: str) -> tuple[int, ...]:
  """Token ids from a comma-separated list; '' has none.

  Args:
    text: such as '1,2,3'.
    name: the flag, for the error.

  Raises:
    ValueError: an item is not an integer in 0..2**31 - 1.

  >>> parse_ids('3,1', '--banned_ids')
  (3, 1)
  """
  ids = [_natural(item) for item in _items(text)]
  if None in ids:
    raise ValueError(
      f'{name} must be token ids joined by commas, as in 1,2,3, got {text!r}.'
    )
  return tuple(ids)


def parse_logit_bias(text: str) -> tuple[tuple[int, float], ...]:
  """Pairs of token id and bias from 'ID:X,ID:X'; '' has none.

  Raises:
    ValueError: an item is not ID:X with a finite X, or an id comes twice.

  >>> parse_logit_bias('5:-1.5,7:2')
  ((5, -1.5), (7, 2.0))
  """
  bias = {}
  for item in _items(text):
    left, _, right = item.partition(':')
    try:
      token, value = _natural(left), float(right)
    except ValueError:
      token, value = None, math.nan
    if token is None or token in bias or not math.isfinite(value):
      raise ValueError(
        '--logit_bias must be ID:X,ID:X with different token ids and finite '
        f'numbers, got {item!r} in {text!r}.'
      )
    bias[token] = value
  return tuple(bias.items())


def _items(text: str) -> list[str]:
  return [item.strip() for item in text.split(',')] if text.strip() else []


def _natural(text: str) -> int | None:
  """The int32 >= 0 that the text spells in plain digits, or None."""
  is_plain = text.isascii() and text.isdigit() and len(text) <= 10
  return int(text) if is_plain and int(text) < 2**31 else None

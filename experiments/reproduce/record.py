"""What every reproduction does: compare, print, and write its record.

A reproduction is a file with a docstring that is its record, and a function
`reproduce(quick)` that returns findings. What follows from what a paper prints
is asserted; a printed number that does not follow is shown beside ours.
"""

import dataclasses
import pathlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import flags

from experiments import surroundings, text_files
from experiments.progress import Progress

STORED = pathlib.Path(__file__).parent / 'stored'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
  """One claim and what became of it.

  Attributes:
    name: what is claimed.
    expected: a number or a list of them, from the paper or its formulas.
    got: the same from the code here.
    within: the tolerance, with its reason in `note`; None: it is only shown.
    holds: whether they agree; None where nothing is asserted.
    note: where the numbers come from.
    is_headline: whether the table of all papers shows it.
  """

  name: str
  expected: Any
  got: Any
  within: float | None
  holds: bool | None
  note: str = ''
  is_headline: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
  """What a run on models found.

  Attributes:
    findings: claims.
    rows: by name, for a table; numbers, texts, and (value, low, high).
  """

  findings: Sequence[Finding]
  rows: Sequence[dict[str, Any]] = ()


def close(name: str, expected: Any, got: Any, within: float, **rest) -> Finding:
  """A claim of numbers that agree within an absolute tolerance."""
  expected, got = np.asarray(expected, float), np.asarray(got, float)
  if expected.shape != got.shape:
    raise ValueError(
      f'{name}: shapes must agree, got {expected.shape} and {got.shape}.'
    )
  return Finding(
    name=name,
    expected=expected.tolist(),
    got=got.tolist(),
    within=within,
    holds=bool(np.all(np.abs(expected - got) <= within)),
    **rest,
  )


def true(name: str, expected: Any, got: Any, holds: bool, **rest) -> Finding:
  """A claim that is no equality, such as an inequality over many cases."""
  return Finding(
    name=name,
    expected=expected,
    got=got,
    within=0.0,
    holds=bool(holds),
    **rest,
  )


def shown(name: str, printed: Any, got: Any, note: str, **rest) -> Finding:
  """A printed number that does not follow from the printed inputs."""
  return Finding(
    name=name,
    expected=printed,
    got=np.asarray(got, float).tolist(),
    within=None,
    holds=None,
    note=note,
    **rest,
  )


def within_error(
  name: str, expected: float, samples: np.ndarray, **rest
) -> Finding:
  """A claim about a mean of independent samples.

  It holds within 4.5 standard errors, which a right claim misses with a chance
  below 1e-5.
  """
  error = float(np.std(samples, ddof=1) / np.sqrt(len(samples)))
  note = f'{len(samples)} samples, standard error {error:.2g}'
  mean = float(np.mean(samples))
  return close(name, expected, mean, 4.5 * error, note=note, **rest)


def define_flags(values: flags.FlagValues):
  flags.DEFINE_boolean(
    'quick',
    False,
    'Fewer samples and cases; every kind of them is still there.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'json_out', None, 'Write the record to this file.', flag_values=values
  )


FLAG_GROUPS = (('Reproduction', define_flags),)


def run(
  name: str,
  reproduce: Callable[[bool], Sequence[Finding] | Measured],
  values: flags.FlagValues,
) -> int:
  """Reproduces, prints what was found, and writes --json_out.

  Args:
    name: of the script, without its ending.
    reproduce: takes `quick`; what was measured has level 'measured'.
    values: of the flags above.

  Returns:
    0, or 1 if an asserted claim does not hold.
  """
  if values.json_out is not None:
    text_files.check_writable(values.json_out)
  clock = time.perf_counter()
  with Progress(f'reproducing {name}'):
    found = reproduce(values.quick)
  is_measured = isinstance(found, Measured)
  findings = list(found.findings if is_measured else found)
  for finding in findings:
    print(line(dataclasses.asdict(finding)))
  result = {
    'name': name,
    'config': {'quick': values.quick},
    'environment': surroundings.environment(),
    'seconds': time.perf_counter() - clock,
    'level': 'measured' if is_measured else 'exact',
    'findings': findings,
    'rows': found.rows if is_measured else (),
    'passed': all(finding.holds is not False for finding in findings),
  }
  if values.json_out is not None:
    text_files.write_json(values.json_out, result)
  if not result['passed']:
    print(f'{name}: a claim does not hold', file=sys.stderr)
  return 0 if result['passed'] else 1


def number(value: Any) -> str:
  """Four digits of a number; lists joined by blanks; texts as they are.

  >>> number([0.5, 2 / 3]), number('all')
  ('0.5 0.6667', 'all')
  """
  if isinstance(value, list):
    return ' '.join(map(number, value))
  return f'{value:.4g}' if isinstance(value, float) else str(value)


def line(finding: dict[str, Any]) -> str:
  """One finding as a line of text."""
  mark = {True: 'holds', False: 'FAILS', None: 'shown'}[finding['holds']]
  text = f'{mark}  {finding["name"]}: expected {number(finding["expected"])}'
  text += f', got {number(finding["got"])}'
  return text + (f' ({finding["note"]})' if finding['note'] else '')


def got_text(result: dict[str, Any]) -> str:
  """What a result says in the table and in its script's docstring."""
  findings = result['findings']
  asserted = [f for f in findings if f['holds'] is not None]
  num_shown = len(findings) - len(asserted)
  parts = [
    f'{f["name"]}: {number(f["got"])}' for f in findings if f['is_headline']
  ]
  if asserted:
    parts.append(f'{sum(f["holds"] for f in asserted)} of {len(asserted)} hold')
  if num_shown:
    parts.append(f'{num_shown} shown, not asserted')
  return '; '.join(parts)


def paragraph(doc: str, title: str) -> str:
  """A paragraph of a record, such as 'Expected', on one line.

  >>> paragraph('''Claim: one
  ...   two.
  ... Got: three.''', 'Claim')
  'one two.'
  """
  found = re.search(rf'^{title}:(.*?)(?=^\w+:|\Z)', doc, re.M | re.S)
  if found is None:
    raise ValueError(f'the record has no paragraph {title!r}.')
  return ' '.join(found[1].split())

"""Certifies the decoder: its output has exactly the law of the target alone.

  certify.py --quick

Every proposer x rule x sampling transform runs through the whole loop, and the
joint law of what it emits, over three steps at least, is compared with an
enumeration that shares no code with it. Then deliberate bugs are run, each of
which must be caught. Exit code 1 if a case fails or a bug survives.
"""

import re
import sys
from typing import Any

from absl import flags

from experiments import script, surroundings, text_files
from experiments.progress import Progress
from specjax.testing import certificate, certified

Certificate = certificate.Certificate


def define_flags(values: flags.FlagValues):
  flags.DEFINE_bool(
    'quick',
    False,
    'Two drafts only, and fewer rows; under three minutes on two cores.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'json_out', None, 'File for all results, as JSON.', flag_values=values
  )


FLAG_GROUPS = (('Certificate', define_flags),)


def summary(result: Certificate) -> str:
  """The tables for people."""
  lines = [
    f'{"proposer":9} {"verify":10} {"drafts":>6} {"cases":>6} {"rows":>7} '
    f'{"least p":>9}'
  ]
  loops = {}
  for case in result.cases:
    remark = re.search(r'pair \w+|window \d+|$', case.transform).group()
    key = (case.proposer, case.verify, case.num_draft_tokens, remark)
    loops.setdefault(key, []).append(case)
  for (proposer, verify, k, remark), cases in loops.items():
    p_value = min(case.p_value for case in cases)
    lines.append(
      f'{proposer:9} {verify:10} {k:6} {len(cases):6} {cases[0].batch:7} '
      f'{p_value:9.2g} {_mark(all(c.passed for c in cases))} {remark}'.rstrip()
    )
  lines.append('')
  for case in result.cases:
    if not case.passed:
      lines.append(f'FAILED: {case}')
  errors = [x.max_error for x in result.enumerations]
  lines.append(
    f'{len(errors)} enumerations of one verification: largest error '
    f'{max(errors):.1g} {_mark(all(x.passed for x in result.enumerations))}'
  )
  lines.append('')
  lines.append(f'{"deliberate bug":34} {"seen by":10} {"p":>9}')
  for mutant in result.mutants:
    p_value = '' if mutant.p_value is None else f'{mutant.p_value:.2g}'
    lines.append(
      f'{mutant.name:34} {mutant.caught_by:10} {p_value:>9} '
      f'{"caught" if mutant.caught else "SURVIVED"}'
    )
  lines.append('')
  lines.append(
    f'{len(result.cases)} cases, p-value at least {result.threshold:.1g} each '
    f'(chance {certificate.FAMILY_ALPHA:g} over all, fixed seeds); '
    f'{sum(m.caught for m in result.mutants)} of {len(result.mutants)} bugs '
    f'caught: {"PASSED" if result.passed else "FAILED"}'
  )
  return '\n'.join(lines)


def _mark(passed: bool) -> str:
  return 'ok' if passed else 'FAILED'


def report(result: Certificate, *, quick: bool) -> dict[str, Any]:
  """What --json_out holds."""
  return {
    'config': {
      'quick': quick,
      'threshold': result.threshold,
      'family_alpha': certificate.FAMILY_ALPHA,
      'num_tokens': certified.NUM_TOKENS,
      'vocab_size': certified.VOCAB_SIZE,
    },
    'environment': surroundings.environment(),
    'cases': list(result.cases),
    'enumerations': list(result.enumerations),
    'mutants': list(result.mutants),
    'passed': result.passed,
  }


def main(values: flags.FlagValues) -> int:
  if values.json_out is not None:
    text_files.check_writable(values.json_out)
  with Progress('certifying') as progress:
    result = certificate.certify(quick=values.quick, report=progress.update)
  print(summary(result))
  if values.json_out is not None:
    text_files.write_json(values.json_out, report(result, quick=values.quick))
  return 0 if result.passed else 1


if __name__ == '__main__':
  sys.exit(script.run_main(main, FLAG_GROUPS))

"""The certificate: whole decoding loops against enumerated laws.

Thousands of rows with seeds of their own run through one compiled loop, and
the joint law of what they emit is compared with `enumerate_exact`. Sampling
settings, prompts and stop ids are traced, so one batch holds all of them, side
by side and ragged.

Seven tokens with two drafts take three steps at least (a step emits three at
most), so what one step leaves behind for the next is part of the law.
"""

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable

import numpy as np

from specjax.testing import exact, loops, mutants, rules
from specjax.testing.certified import ROWS, programs

# The chance that a right decoder fails a certificate of fixed seeds, shared
# among its tests (Bonferroni). A wrong one lies orders of magnitude beyond.
FAMILY_ALPHA = 1e-4

# float32 sums of up to V ** 3 products; a wrong rule is off by 1e-2.
MAX_ERROR = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One comparison of a group's outcomes with their law.

  Attributes:
    proposer: 'none', 'draft' or 'ngram', and what ends its drafts.
    verify: the rule's name.
    transform: the group's name.
    temperature: its temperature.
    num_draft_tokens: K.
    batch: rows of the program, groups of other settings included.
    statistic, dof, p_value: of the chi-square test.
    passed: the p-value is not below the threshold; for coupled verification
      the tokens equal those of plain sampling, too.
  """

  proposer: str
  verify: str
  transform: str
  temperature: float
  num_draft_tokens: int
  batch: int
  statistic: float
  dof: int
  p_value: float
  passed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Enumeration:
  """One rule enumerated on a context-free or random pair.

  Attributes:
    verify: the rule's name.
    pair: the pair's name.
    num_draft_tokens: K.
    max_error: largest difference from the target's joint law.
    expected_accepted: mean number of accepted drafts.
    passed: the error is rounding, and no more is accepted than can be.
  """

  verify: str
  pair: str
  num_draft_tokens: int
  max_error: float
  expected_accepted: float
  passed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
  """Whether a mutant was caught; `p_value` is None where none was tested."""

  name: str
  caught_by: str
  p_value: float | None
  caught: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certificate:
  """Everything that was tested.

  Attributes:
    threshold: least p-value that passes, `FAMILY_ALPHA` over the cases.
    passed: every case and enumeration passed, every mutant was caught.
  """

  threshold: float
  cases: tuple[Case, ...]
  enumerations: tuple[Enumeration, ...]
  mutants: tuple[Verdict, ...]
  passed: bool


def certify(
  *, quick: bool, report: Callable[[str], None] = lambda text: None
) -> Certificate:
  """Runs the whole certificate.

  Args:
    quick: see `programs`.
    report: called with one line of text as each part is done.
  """
  checked = programs(quick=quick)
  threshold = FAMILY_ALPHA / sum(len(p.groups) for p in checked)
  # Threads, because XLA compiles without the interpreter's lock.
  with concurrent.futures.ThreadPoolExecutor(min(os.cpu_count(), 4)) as pool:
    running = [pool.submit(_observe, p, report) for p in checked]
    hunts = [
      pool.submit(catch, mutant, threshold, report)
      for mutant in mutants.all_mutants(8 * ROWS)
    ]
    enumerations = enumerate_rules()
    report(f'{len(enumerations)} enumerations of rules')
    cases = judge(checked, [run.result() for run in running], threshold)
    report(f'{len(cases)} cases compared with their laws')
    verdicts = tuple(hunt.result() for hunt in hunts)
  return Certificate(
    threshold=threshold,
    cases=cases,
    enumerations=enumerations,
    mutants=verdicts,
    passed=all(x.passed for x in (*cases, *enumerations))
    and all(verdict.caught for verdict in verdicts),
  )


def _observe(
  program: loops.Program, report: Callable[[str], None]
) -> list[np.ndarray]:
  found = loops.observe(program)
  verify = program.decoder.verify.name
  k = program.decoder.proposer.num_draft_tokens
  report(f'{program.proposer} x {verify}, {k} drafts')
  return found


def judge(
  checked: list[loops.Program],
  outcomes: list[list[np.ndarray]],
  threshold: float,
) -> tuple[Case, ...]:
  """Compares every group of every program with its law."""
  laws, plain, cases = {}, {}, []
  for program, found in zip(checked, outcomes):
    target, rule = program.decoder.target, program.decoder.verify
    if rule.name == 'coupled' and program.proposer == 'none':
      plain[target] = found
  for program, found in zip(checked, outcomes):
    target, rule = program.decoder.target, program.decoder.verify
    for g, group in enumerate(program.groups):
      if (target, group) not in laws:
        laws[target, group] = law_of(program, group)
      result = compare(laws[target, group], found[g])
      is_equal = rule.name != 'coupled' or np.array_equal(
        found[g], plain[target][g]
      )
      cases.append(
        Case(
          proposer=program.proposer,
          verify=rule.name,
          transform=group.transform,
          temperature=group.options.temperature,
          num_draft_tokens=program.decoder.proposer.num_draft_tokens,
          batch=len(program.groups) * program.rows,
          **result._asdict(),
          passed=result.p_value >= threshold and is_equal,
        )
      )
  return tuple(cases)


def law_of(program: loops.Program, group: loops.Group) -> exact.Law:
  """What the group must emit, by the reference."""
  return exact.enumerate_exact(
    exact.toy_logits(program.decoder.target, program.params['target']),
    group.prompt,
    group.num_tokens,
    group.options,
    group.stop_ids,
  )


def compare(law: exact.Law, outcomes: np.ndarray) -> exact.ChiSquare:
  """The chi-square test of outcomes against a law."""
  return exact.chi_square(law.count(outcomes), np.append(law.probs_M, 0.0))


def catch(
  mutant: mutants.Mutant,
  threshold: float,
  report: Callable[[str], None] = lambda text: None,
) -> Verdict:
  """Runs a mutant and the test that must fail on it."""
  if mutant.caught_by == 'acceptance':
    num_drafted, num_accepted = loops.count_drafts(mutant.program)
    p_value, caught = None, num_accepted < num_drafted
  else:
    outcomes = loops.observe(mutant.program)[0]
    law = law_of(mutant.program, mutant.expected)
    p_value = compare(law, outcomes).p_value
    caught = p_value < threshold
  report(f'mutant {mutant.name}: {"caught" if caught else "NOT CAUGHT"}')
  return Verdict(
    name=mutant.name,
    caught_by=mutant.caught_by,
    p_value=p_value,
    caught=bool(caught),
  )


def random_path_law(seed: int, vocab_size: int) -> rules.PathLaw:
  """A law that depends on the whole path, fixed by the seed."""

  @functools.cache
  def law(path: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng((seed, len(path), *path))
    return rng.dirichlet(np.ones(vocab_size))

  return law


def enumerate_rules() -> tuple[Enumeration, ...]:
  """The rules that judge by probabilities, without a sampling error."""
  constant = lambda probs: lambda path: probs
  pairs = {
    name: (len(p), constant(p), constant(q))
    for name, (p, q) in mutants.PAIRS.items()
  }
  pairs['random'] = 3, random_path_law(1, 3), random_path_law(2, 3)
  found = []
  for name in rules.RULE_PROBS:
    for pair, (vocab_size, p, q) in pairs.items():
      for k in (1, 2, 3):
        result = rules.enumerate_rule(name, p, q, vocab_size, k)
        right = rules.path_law(p, vocab_size, k + 1)
        error = float(np.max(np.abs(result.law - right)))
        ideal = rules.ideal_accepted(p, q, vocab_size, k)
        found.append(
          Enumeration(
            verify=name,
            pair=pair,
            num_draft_tokens=k,
            max_error=error,
            expected_accepted=result.expected_accepted,
            passed=error < MAX_ERROR
            and result.expected_accepted < ideal + MAX_ERROR,
          )
        )
  return tuple(found)

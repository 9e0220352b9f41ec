"""Context-free pairs whose every number is known, and counts of their steps."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax import state as states
from specjax.decode import Decoder
from specjax.proposers.draft_model import DraftModel
from specjax.sampling import SamplingOptions
from specjax.testing import loops, rules
from specjax.verify import chain

# Target p and draft q of single positions; BV is the example of Sun et al.
PAIRS = {
  'BV': ((1 / 3, 2 / 3), (2 / 3, 1 / 3)),
  'V3': ((0.6, 0.3, 0.1), (0.2, 0.3, 0.5)),
  'V4': ((0.5, 0.25, 0.15, 0.1), (0.1, 0.2, 0.3, 0.4)),
  'V4b': ((0.4, 0.35, 0.15, 0.1), (0.1, 0.2, 0.3, 0.4)),
}


def overlap(p: Sequence[float], q: Sequence[float]) -> float:
  """alpha = sum min(p, q)."""
  return float(np.minimum(p, q).sum())


def path_laws(name: str) -> tuple[rules.PathLaw, rules.PathLaw]:
  """A pair's p and q as laws that do not look at the path."""
  p, q = PAIRS[name]
  return (lambda path: p), (lambda path: q)


def pair_program(
  pair: tuple[Sequence[float], Sequence[float]],
  rule: chain.Rule,
  num_draft_tokens: int,
  *,
  rows: int,
  num_tokens: int,
) -> loops.Program:
  """A loop at temperature 1 in which q drafts for p, at every position alike.

  The rows' seeds differ; nothing else does.
  """
  p, q = pair
  model, target = loops.table_model(p)
  _, draft = loops.table_model(q)
  prompt = (0, 1)
  return loops.Program(
    proposer='draft',
    decoder=Decoder(
      target=model,
      proposer=DraftModel(model=model, num_draft_tokens=num_draft_tokens),
      verify=rule,
      max_length=len(prompt) + num_tokens,
    ),
    params={'target': target, 'proposer': draft},
    groups=(
      loops.Group(
        transform='none',
        options=SamplingOptions(temperature=1.0),
        prompt=prompt,
        num_tokens=num_tokens,
      ),
    ),
    rows=rows,
  )


class Steps(NamedTuple):
  """Every verification of a run, row after row.

  Attributes:
    row: int [n], the row it belongs to.
    num_draft: int [n].
    num_accepted: int [n].
    num_emitted: int [n].
  """

  row: np.ndarray
  num_draft: np.ndarray
  num_accepted: np.ndarray
  num_emitted: np.ndarray


def steps(program: loops.Program) -> Steps:
  """Runs a program and counts its steps from the records of its rows."""
  found = []
  for state in loops.run_states(program):
    begin = np.asarray(state.prompt_length_B)[:, None]
    end = np.asarray(state.length_B)[:, None]
    index = np.arange(state.tokens_BL.shape[1])[None]
    row, place = np.nonzero((index >= begin) & (index < end))
    step = np.asarray(state.step_BL)[row, place]
    is_first = (np.diff(step, prepend=-1) != 0) | (np.diff(row, prepend=-1) > 0)
    first = np.flatnonzero(is_first)
    is_accepted = np.asarray(state.source_BL)[row, place] == states.ACCEPTED
    found.append(
      (
        row[first],
        np.asarray(state.num_draft_BL)[row, place][first].astype(int),
        np.add.reduceat(is_accepted.astype(int), first),
        np.diff(first, append=len(row)),
      )
    )
  return Steps(*map(np.concatenate, zip(*found)))

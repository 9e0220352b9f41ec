"""What `device_check.py` runs on a device, part by part."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import random_pair, step_costs
from specjax import decode
from specjax.decode import Decoder
from specjax.proposers.base import Nothing
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.ngram import NGram
from specjax.sampling import SamplingOptions, stack_options
from specjax.testing import certificate, loops
from specjax.verify import chain

Row = dict[str, Any]

NUM_DRAFT_TOKENS = 5
WIDTH = NUM_DRAFT_TOKENS + 1
LENGTH, NUM_SLOTS = 128, 256  # Of the cache that step costs are taken at.
NUM_TIMED = 3  # Runs of each generation.
# One length for all loops: the smallest check compiles each of them once.
MAX_LENGTH = 128
_UNBOUNDED = jnp.iinfo(jnp.int32).max


def proposers(pair: random_pair.Pair) -> dict[str, Any]:
  return {
    'none': Nothing(),
    'draft': DraftModel(model=pair.draft, num_draft_tokens=NUM_DRAFT_TOKENS),
    'ngram': NGram(num_draft_tokens=NUM_DRAFT_TOKENS),
  }


def check_exactness(pair: random_pair.Pair, smallest: bool) -> list[Row]:
  """Every proposer against plain decoding, and plain at another width.

  Rows of the same width must be equal, for every target pass has one shape;
  the others say whether this device rounds alike at every width.
  """
  length_B = np.array([1, 5, 9, 16])
  requests = random_pair.make_requests(pair.target, length_B, 40, MAX_LENGTH)
  found = proposers(pair)
  runs = [('none', WIDTH), ('draft', None), ('ngram', None), ('none', None)]
  rule, modes = chain.Coupled(), {'greedy': 0.0, 'coupled': 0.5}
  if smallest:
    rule, modes = chain.Greedy(), {'greedy': 0.0}
    runs.remove(('ngram', None))
  rows = []
  for mode, temperature in modes.items():
    settings = stack_options(
      [SamplingOptions(temperature=temperature)] * len(length_B),
      pair.target.vocab_size,
    )
    for name, width in runs:
      decoder = Decoder(
        target=pair.target,
        proposer=found[name],
        verify=rule,
        max_length=MAX_LENGTH,
        width=width,
      )
      state = decode.init(decoder, pair.params, requests)
      state = decode.run(decoder, pair.params, state, settings, _UNBOUNDED)
      tokens_BL = np.asarray(state.tokens_BL)
      if width is not None:
        plain_BL = tokens_BL
        continue
      is_other_BL = tokens_BL != plain_BL
      rows.append(
        {
          'dtype': pair.target.dtype,
          'text': mode,
          'proposer': name,
          'same_width': decoder.num_rows == WIDTH,
          'equal': not np.any(is_other_BL),
          'first_difference': _first(is_other_BL, length_B),
          **random_pair.counts(state),
        }
      )
  return rows


def _first(is_other_BL: np.ndarray, length_B: np.ndarray) -> str | None:
  """Where the earliest emitted token differs."""
  if not np.any(is_other_BL):
    return None
  index_B = np.where(
    np.any(is_other_BL, axis=1), np.argmax(is_other_BL, axis=1), 2**31
  )
  row = int(np.argmin(index_B - length_B))
  return f'row {row}, token {index_B[row] - length_B[row]}'


def certify(smallest: bool) -> list[Row]:
  """`certify.py --quick` on this device, or one greedy program of it."""
  if smallest:
    checked = [
      program
      for program in certificate.programs(quick=True)
      if (program.proposer, program.decoder.verify.name) == ('ngram', 'greedy')
    ]
    outcomes = [loops.observe(program) for program in checked]
    cases = certificate.judge(checked, outcomes, certificate.FAMILY_ALPHA)
    bugs = ()
  else:
    result = certificate.certify(quick=True)
    cases, bugs = (*result.cases, *result.enumerations), result.mutants
  failed = [case for case in cases if not case.passed]
  failed += [bug for bug in bugs if not bug.caught]
  return [
    {
      'num_cases': len(cases),
      'num_bugs': len(bugs),
      'failed': failed,
      'passed': not failed,
    }
  ]


def measure_step(
  pair: random_pair.Pair, name: str, batch_size: int, num_rows: int
) -> list[Row]:
  model, params = pair.of(name)
  cost = step_costs.measure(
    model,
    params,
    batch_size=batch_size,
    num_rows=num_rows,
    length=LENGTH,
    num_slots=NUM_SLOTS,
  )
  return [
    {
      'model': name,
      'dtype': model.dtype,
      'batch': batch_size,
      'rows': num_rows,
      **dataclasses.asdict(cost),
    }
  ]


def time_generation(
  pair: random_pair.Pair, batch_size: int, smallest: bool, steps: list[Row]
) -> list[Row]:
  """Greedy decoding by every proposer; prefill is not counted.

  Args:
    pair: the models.
    batch_size: B.
    smallest: leave prompt lookup out.
    steps: rows of `measure_step`, from which the speed-up is predicted.
  """
  cost = {
    (row['model'], row['rows']): row['median']
    for row in steps
    if (row['dtype'], row['batch']) == (pair.target.dtype, batch_size)
  }
  plain = cost.get(('target', 1))
  verify, draft = cost.get(('target', WIDTH)), cost.get(('draft', 1))
  length_B = 16 + np.arange(batch_size) % 4
  requests = random_pair.make_requests(pair.target, length_B, 96, MAX_LENGTH)
  settings = stack_options(
    [SamplingOptions()] * batch_size, pair.target.vocab_size
  )
  found = proposers(pair)
  if smallest:
    del found['ngram']
  rows = []
  for name, proposer in found.items():
    decoder = Decoder(
      target=pair.target,
      proposer=proposer,
      verify=chain.Greedy(),
      max_length=MAX_LENGTH,
    )
    seconds = []
    for _ in range(1 + NUM_TIMED):  # The first compiles.
      state = decode.init(decoder, pair.params, requests)
      jax.block_until_ready(state)
      clock = time.perf_counter()
      state = decode.run(decoder, pair.params, state, settings, _UNBOUNDED)
      jax.block_until_ready(state)
      seconds.append(time.perf_counter() - clock)
    counts = random_pair.counts(state)
    rate = counts['num_emitted'] / float(np.median(seconds[1:]))
    rows.append(
      {
        'dtype': pair.target.dtype,
        'batch': batch_size,
        'proposer': name,
        **counts,
        'tokens_per_second': rate,
        'block_efficiency': counts['num_emitted'] / counts['num_steps'],
      }
    )
    rows[-1]['predicted_speedup'] = None
    rows[-1]['speedup'] = rate / rows[0]['tokens_per_second']
    needed = [plain, verify] + [draft] * (name == 'draft')
    is_known = name != 'none' and None not in needed
    if is_known:
      rows[-1]['predicted_speedup'] = step_costs.predicted_speedup(
        rows[-1]['block_efficiency'],
        plain=plain,
        verify=verify,
        draft=draft if name == 'draft' else 0.0,
        num_draft_tokens=NUM_DRAFT_TOKENS,
      )
  return rows

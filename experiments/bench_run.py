"""A benchmark under way: what is loaded, and rounds in which all take turns."""

import dataclasses
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import (
  bench_cells,
  conversions,
  generate,
  lengths,
  prompts,
  step_costs,
)
from experiments.bench_cells import Cell, Run
from experiments.progress import Progress
from experiments.run_config import RunConfig
from specjax.decode import Decoder
from specjax.models import load
from specjax.models.base import LanguageModel
from specjax.proposers.base import Proposer
from specjax.requests import Request
from specjax.shapes import Params
from specjax.verify import chain, forced

if TYPE_CHECKING:
  from experiments.benchmark import BenchConfig
  from experiments.peers import Peer

PLAIN_WIDTHS = (1, 2)  # Of these, the cheaper one is the baseline.
_COST_SECONDS = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostKey:
  """A pass whose cost is measured: whose, over how many rows.

  Attributes:
    who: 'target', or the proposer whose model drafts.
    batch_size: B.
    num_rows: T.
    num_slots: S.
  """

  who: str
  batch_size: int
  num_rows: int
  num_slots: int


@dataclasses.dataclass(eq=False)
class Rounds:
  """What the rounds so far have found.

  Attributes:
    runs: by cell, for each repeat a run of every batch.
    costs: by pass, milliseconds of each repeat.
    peer: what a peer said of each repeat.
  """

  runs: dict[Cell, list[list[Run]]]
  costs: dict[CostKey, list[float]]
  peer: list[dict[str, Any]]

  @property
  def num_done(self) -> int:
    return len(next(iter(self.runs.values())))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Bench:
  """Models in memory, the cells, and what was found before the timing.

  Attributes:
    requests: of all prompts.
    rule: that verifies.
    max_length: of all buffers.
    num_slots: of the longest cache; a few more or less cost nothing, so all
      passes are measured with as many.
    cells: all; those of one batch size stand together, its baseline first.
    baselines: by batch size, the fastest plain decoding.
    costs: by pass, the model and the parameters it is measured with, and the
      text's length.
    plain_costs: by batch size and width, milliseconds of a plain step.
    seconds_compile: by cell.
  """

  requests: list[Request]
  rule: chain.Rule
  max_length: int
  num_slots: int
  cells: list[Cell]
  baselines: dict[int, Cell]
  costs: dict[CostKey, tuple[LanguageModel, Params, int]]
  plain_costs: dict[int, dict[int, float]]
  seconds_compile: dict[Cell, float]

  def target_key(self, cell: Cell, width: int) -> CostKey:
    return self._key('target', cell, width)

  def draft_keys(self, cell: Cell) -> tuple[CostKey, CostKey] | None:
    """Of a draft pass over one row, and of the pass that absorbs."""
    if cell.drafting is None:
      return None
    return tuple(
      self._key(cell.proposer, cell, t) for t in (1, cell.drafting[2])
    )

  def _key(self, who: str, cell: Cell, num_rows: int) -> CostKey:
    return CostKey(
      who=who,
      batch_size=cell.batch_size,
      num_rows=num_rows,
      num_slots=self.num_slots,
    )

  def rounds(self, repeats: int, peer: 'Peer | None') -> Iterator[Rounds]:
    """Runs every cell on every batch, over and over; yields what it has."""
    found = Rounds(
      runs={cell: [] for cell in self.cells},
      costs={key: [] for key in self.costs},
      peer=[],
    )
    total = repeats * sum(len(cell.batches) for cell in self.cells)
    done = 0
    clock = time.perf_counter()
    with Progress('measuring') as progress:

      def say(what: str):
        text = f'repeat {repeat + 1} of {repeats}, {what}'
        if done:
          left = (time.perf_counter() - clock) / done * (total - done)
          text += f', about {left:.0f} s left'
        progress.update(text)

      for repeat in range(repeats):
        for cell in self.cells:
          found.runs[cell].append([])
        for size in self.baselines:
          cells = [cell for cell in self.cells if cell.batch_size == size]
          # Whoever comes first has a warmer or a cooler machine than the rest.
          turn = repeat % len(cells)
          cells = cells[turn:] + cells[:turn]
          for index in range(len(cells[0].batches)):
            for cell in cells:
              say(f'{cell.proposer} K={cell.num_draft_tokens} B={size}')
              run = bench_cells.run(
                cell, cell.batches[index], time_propose=index == 0
              )
              found.runs[cell][-1].append(run)
              done += 1
        for key in self.costs:
          say(f'{key.who}, pass over {key.num_rows} rows')
          found.costs[key].append(_measure(key, self.costs, num_calls=1))
        if peer is not None:
          say('the peer')
          found.peer.append(peer.round())
        yield found

  def peer_job(self, config: 'BenchConfig') -> dict[str, Any]:
    """What a peer is told."""
    plain = config.runs['none']
    for row, request in enumerate(self.requests):
      if request.max_new_tokens < 2:
        raise ValueError(
          f'--peers={config.peers} needs max_new_tokens of at least 2, got '
          f'{request.max_new_tokens} in row {row}.'
        )
    return {
      'target': plain.target,
      'draft': config.draft,
      'dtype': config.peers_dtype or plain.dtype,
      'prompts': [list(row.prompt_tokens) for row in self.requests],
      'num_tokens': [row.max_new_tokens for row in self.requests],
      'draft_lengths': list(config.draft_lengths),
      'num_threads': len(os.sched_getaffinity(0)),
    }


def _measure(
  key: CostKey,
  costs: dict[CostKey, tuple[LanguageModel, Params, int]],
  num_calls: int,
) -> float:
  """Milliseconds of a pass, the median."""
  model, params, length = costs[key]
  return step_costs.measure(
    model,
    params,
    batch_size=key.batch_size,
    num_rows=key.num_rows,
    length=length,
    num_slots=key.num_slots,
    num_calls=num_calls,
    call_seconds=_COST_SECONDS,
  ).median


def prepare(config: 'BenchConfig') -> Bench:
  """Loads the models, compiles everything, and finds the baselines."""
  plain = config.runs['none']
  rows = generate.read_rows(plain)
  rule = generate.choose_rule(plain.verify, rows)
  if config.accept is not None:
    if not isinstance(rule, chain.Rejection):
      raise ValueError(f'--accept needs --verify=rejection, got {rule.name}.')
    rule = forced.Forced(config.accept)
  with Progress(f'loading target {plain.target}'):
    target = conversions.load_model(
      plain.target,
      plain.dtype,
      plain.quantize,
      plain.views()[0],
      cache_dtype=plain.cache_dtype,
      cache_dir=plain.cache_dir,
    )
  requests, max_length = _requests(plain, target, rows)
  make = _CellMaker(
    target=target,
    rule=rule,
    max_length=max_length,
    runs=config.runs,
    proposers={
      name: generate.make_proposer(run, target, run.views()[1])
      for name, run in config.runs.items()
    },
  )
  length = int(
    np.mean([len(r.prompt_tokens) + r.max_new_tokens / 2 for r in requests])
  )
  num_slots = max_length + max(*config.draft_lengths, 1) + 1
  cells, baselines, plain_costs, costs = [], {}, {}, {}
  for size in config.batch_sizes:
    batches = bench_cells.make_batches(
      requests, size, max_length, target.model.vocab_size
    )
    plain_cells = {t: make('none', 0, batches, t) for t in PLAIN_WIDTHS}
    with Progress(f'measuring plain steps, batch size {size}'):
      plain_costs[size] = {}
      for width, candidate in plain_cells.items():
        key = CostKey(
          who='target', batch_size=size, num_rows=width, num_slots=num_slots
        )
        costs[key] = target.model, target.params, length
        plain_costs[size][width] = _measure(key, costs, num_calls=5)
    cheapest = min(PLAIN_WIDTHS, key=plain_costs[size].get)
    baselines[size] = plain_cells[cheapest]
    cells.append(baselines[size])
    if plain.exact:
      cells += [
        make('none', 0, batches, k + 1)
        for k in config.draft_lengths
        if k + 1 != cheapest
      ]
    for name in config.runs:
      if name != 'none':
        cells += [make(name, k, batches) for k in config.draft_lengths]
        if config.stop_rule != 'fixed':
          most = max(config.draft_lengths)
          cells.append(make(name, most, batches, None, config.stop_rule))
  seconds_compile = {}
  with Progress('compiling cell') as progress:
    for i, cell in enumerate(cells):
      progress.update(f'{i + 1} of {len(cells)}')
      seconds_compile[cell] = bench_cells.warm_up(cell)
  bench = Bench(
    requests=requests,
    rule=rule,
    max_length=max_length,
    num_slots=num_slots,
    cells=cells,
    baselines=baselines,
    costs=costs,
    plain_costs=plain_costs,
    seconds_compile=seconds_compile,
  )
  for cell in cells:
    for width in cell.widths:
      key = bench.target_key(cell, width)
      costs[key] = target.model, target.params, length
    for key in bench.draft_keys(cell) or ():
      costs[key] = (*cell.drafting[:2], length)
  with Progress('compiling pass') as progress:
    for i, key in enumerate(costs):
      progress.update(f'{i + 1} of {len(costs)}')
      _measure(key, costs, num_calls=1)
  return bench


def _requests(
  plain: RunConfig, target: load.Loaded, rows: list[prompts.Conversation]
) -> tuple[list[Request], int]:
  """The first turns, without stop ids, and the length of all buffers."""
  requests = [
    dataclasses.replace(
      generate.Talk(plain, target, row).ask(0), stop=(), stop_ids=()
    )
    for row in rows
  ]
  for row, request in enumerate(requests):
    if request.max_new_tokens < 1:
      raise ValueError(
        f'max_new_tokens must be at least 1, got 0 in row {row}.'
      )
  most = max(len(r.prompt_tokens) + r.max_new_tokens for r in requests)
  max_length = generate.max_length_of(plain, target, most)
  if most > max_length:
    raise ValueError(
      f'prompt and new tokens must be at most {max_length} together '
      f'(max_length), got {most}.'
    )
  return requests, max_length


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _CellMaker:
  """Makes cells that share models, buffers and rule."""

  target: load.Loaded
  rule: chain.Rule
  max_length: int
  runs: dict[str, RunConfig]
  proposers: dict[str, tuple[Proposer, Params]]

  def __call__(
    self,
    name: str,
    num_draft_tokens: int,
    batches: list[bench_cells.Batch],
    width: int | None = None,
    stop_rule: str = 'fixed',
  ) -> Cell:
    proposer, proposer_params = self.proposers[name]
    widths = None
    if num_draft_tokens:
      proposer = dataclasses.replace(
        proposer, num_draft_tokens=num_draft_tokens
      )
      widths = self._widths(name, num_draft_tokens, stop_rule)
    decoder = Decoder(
      target=self.target.model,
      proposer=proposer,
      verify=self.rule,
      max_length=self.max_length,
      width=width,
      widths=widths,
    )
    params = {'target': self.target.params, 'proposer': proposer_params}
    if stop_rule != 'fixed':
      decoder = self._stopping(decoder, params, stop_rule, batches[0].size)
    return Cell(
      proposer=name,
      num_draft_tokens=num_draft_tokens,
      decoder=decoder,
      params=params,
      batches=batches,
      stop_rule=stop_rule,
    )

  def _widths(
    self, name: str, num_draft_tokens: int, stop_rule: str
  ) -> tuple[int, ...] | None:
    """As generate.py chooses them."""
    run = dataclasses.replace(
      self.runs[name], num_draft_tokens=num_draft_tokens, stop_rule=stop_rule
    )
    return run.widths(self.target.model.has_independent_rows)

  def _stopping(
    self, decoder: Decoder, params: Params, stop_rule: str, batch_size: int
  ) -> Decoder:
    if stop_rule == 'cost':
      return lengths.with_costs(decoder, params, batch_size)[0]
    proposer = dataclasses.replace(
      decoder.proposer, stop=lengths.parse(stop_rule)
    )
    return dataclasses.replace(decoder, proposer=proposer)

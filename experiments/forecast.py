"""What a pair of models would need and take on a slice of chips.

Every program is compiled at 2 and at 4 layers, which gives a line, and at 6,
which checks it; layers are alike, so a deep model's figures lie on the line.
The loop has two depths, and its points span a plane.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from experiments import chips, hlo, programs
from experiments.programs import Compiled, Pair
from specjax import metrics
from specjax.models.transformer import Transformer

DEPTHS = (2, 4, 6)

# Kinds that move an array as it is; full-vocabulary logits have no business
# in any of them.
_MOVES = ('all-gather', 'all-to-all', 'collective-permute')

# What a collective is for, by its size and place.
WIDE, SMALL, FILTER = 'wide', 'small', 'filter'

Depth = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
  """A program's figures at full depth, per device.

  Attributes:
    numbers: as `Compiled.numbers`.
    collectives: {part: {class: {kind: {'count', 'bytes'}}}}. Parts of a loop
      are its 'turn' and the draft 'scan' inside; other programs have one,
      'step'. Classes: 'wide' for what is as large as activations, 'small' for
      the rest (both sides of a branch are counted), 'filter' for what stands
      in the bisections of top-k and top-p.
    depths: (target, draft) layers that were compiled.
    miss: the largest relative error at the depth that was left out of the
      fit; None where the whole model was compiled.
  """

  numbers: dict[str, float]
  collectives: dict[str, dict[str, dict[str, dict[str, float]]]]
  depths: tuple[Depth, ...]
  miss: float | None


def is_alike(model: Transformer) -> bool:
  """Whether all layers have the same program."""
  return len(set(zip(model.windows, model.ropes))) == 1


def depths(model: Transformer, whole: bool) -> tuple[int, ...]:
  """The depths to compile: three of them, or the model's own."""
  if whole or model.num_layers <= DEPTHS[-1] or not is_alike(model):
    return (model.num_layers,)
  return DEPTHS


def grid(target: Sequence[int], draft: Sequence[int]) -> tuple[Depth, ...]:
  """Points for two depths, the one that checks the others last.

  >>> grid((2, 4, 6), (2, 4, 6))
  ((2, 2), (4, 2), (2, 4), (6, 6))
  >>> grid((2, 4, 6), (1,))
  ((2, 1), (4, 1), (6, 1))
  """
  if len(target) == 1 or len(draft) == 1:
    return tuple((t, d) for t in target for d in draft)
  low, high, check = target
  return ((low, draft[0]), (high, draft[0]), (low, draft[1]), (check, draft[2]))


def extrapolate(
  points: Sequence[Depth], values: Sequence[dict[str, float]], at: Depth
) -> tuple[dict[str, float], float | None]:
  """Each number at a depth, from numbers at other depths.

  A + B * target layers + C * draft layers, through all points but the last.

  Returns:
    The numbers, and the largest relative error at the last point; of a single
    point, its own numbers and None.

  >>> extrapolate(((2, 1), (4, 1), (6, 1)),
  ...             ({'x': 7.0}, {'x': 9.0}, {'x': 11.0}), (80, 1))
  ({'x': 85.0}, 0.0)
  """
  if len(points) == 1:
    return dict(values[0]), None
  rows = np.array([(1, *point) for point in points], float)
  # A depth that never changes is no variable.
  used = [0, *(i for i in (1, 2) if len(set(rows[:, i])) > 1)]
  inverse = np.linalg.inv(rows[:-1][:, used])
  names = sorted({name for value in values for name in value})
  numbers, misses = {}, [0.0]
  for name in names:
    seen = np.array([value.get(name, 0.0) for value in values])
    line = inverse @ seen[:-1]
    predicted = float(rows[-1, used] @ line)
    misses.append(abs(predicted - seen[-1]) / max(abs(seen[-1]), 1e-12))
    # Rounding to twelve digits takes the inverse's own error out.
    numbers[name] = float(f'{np.array((1, *at))[used] @ line:.12g}')
  return numbers, float(f'{max(misses):.3g}')


def study(
  name: str,
  pair: Pair,
  points: Sequence[Depth],
  compile_at: Callable[[str, Pair], Compiled],
) -> tuple[Estimate, list[str]]:
  """Compiles a program at every depth.

  Returns:
    Its figures at full depth, and what is wrong with it, if anything.
  """
  values, problems = [], []
  for depth in points:
    small = pair.cut(*depth)
    compiled = compile_at(name, small)
    tally = count(name, small, compiled.collectives)
    flat = {
      f'{part}/{size}/{kind}/{what}': number
      for (part, size, kind), found in tally.items()
      for what, number in found.items()
    }
    values.append({**compiled.numbers, **flat})
    for problem in check(name, small, compiled.collectives):
      if problem not in problems:
        problems.append(problem)
  whole = (pair.target.num_layers, pair.draft.num_layers)
  numbers, miss = extrapolate(points, values, whole)
  collectives: dict[str, Any] = {}
  for key in [key for key in numbers if '/' in key]:
    part, size, kind, what = key.split('/')
    of_kind = collectives.setdefault(part, {}).setdefault(size, {})
    of_kind.setdefault(kind, {})[what] = numbers.pop(key)
  return Estimate(
    numbers=numbers, collectives=collectives, depths=tuple(points), miss=miss
  ), problems


def _part(name: str, path: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
  """The part of a program a collective is in, and its path from there."""
  if name != 'loop':
    return 'step', path
  path = path[1:]  # The loop itself.
  if path[:1] == ('while',):
    return 'scan', path[1:]
  return 'turn', path


def _local_rows(model: Transformer, pair: Pair) -> int:
  return math.ceil(pair.batch_size / model.placement.num_shards('batch'))


def _wide_bytes(name: str, pair: Pair) -> float:
  """Half of the least that a pass's activations take on a device."""
  if name == 'verify':
    model, rows = pair.target, pair.num_draft_tokens + 1
  else:
    model, rows = pair.draft, 1
  itemsize = np.dtype('float32').itemsize if model.dtype == 'float32' else 2
  return _local_rows(model, pair) * rows * model.embed_dim * itemsize / 2


def count(
  name: str, pair: Pair, collectives: Iterable[hlo.Collective]
) -> dict[tuple[str, str, str], dict[str, int]]:
  """{(part, class, kind): {'count', 'bytes'}}, see `Estimate`."""
  limit = _wide_bytes(name, pair)
  tally: dict[tuple[str, str, str], dict[str, int]] = {}
  for collective in collectives:
    part, path = _part(name, collective.path)
    largest = max((a.num_bytes for a in collective.arrays), default=0)
    size = FILTER if 'while' in path else SMALL
    size = WIDE if largest >= limit else size
    found = tally.setdefault(
      (part, size, collective.kind), {'count': 0, 'bytes': 0}
    )
    found['count'] += 1
    found['bytes'] += collective.num_bytes
  return tally


def asked_for(model: Transformer) -> int:
  """All-reduces of activations in one pass that its placement asks for.

  One behind attention, one behind the feed-forward of each layer, and one for
  a vocabulary-sharded embedding.
  """
  split = lambda axis: int(model.placement.num_shards(axis) > 1)
  return model.num_layers * (split('heads') + split('ffn')) + split('vocab')


def is_replicated(model: Transformer) -> bool:
  return all(
    model.placement.num_shards(name) == 1 for name, _ in model.placement.axes
  )


def check(
  name: str, pair: Pair, collectives: Sequence[hlo.Collective]
) -> list[str]:
  """What a program has that it must not: a sentence for each finding."""
  problems = [
    f'{name}: logits, or as much as them, are moved by {collective}.'
    for collective in collectives
    if moves_logits(pair, collective)
  ]
  # Of the loop, the drafts inside a turn: around them stands a verification.
  part = 'scan' if name == 'loop' else 'step'
  model = pair.target if name == 'verify' else pair.draft
  tally = {
    key: figures['count']
    for key, figures in count(name, pair, collectives).items()
    if key[0] == part
  }
  if model is pair.draft and is_replicated(model) and tally:
    problems.append(
      f'{name}: {sum(tally.values())} collectives, where the draft is whole '
      'on every device.'
    )
    return problems
  wide = {kind: n for (_, size, kind), n in tally.items() if size == WIDE}
  asked = asked_for(model)
  if sum(wide.values()) > asked or set(wide) - {'all-reduce'}:
    what = ', '.join(f'{n} {kind}' for kind, n in sorted(wide.items()))
    problems.append(
      f'{name}: {what} of activations at {model.num_layers} layers, where the '
      f'placement asks for {asked} all-reduce.'
    )
  return problems


def moves_logits(pair: Pair, collective: hlo.Collective) -> bool:
  """Whether a collective yields logits, whole or a device's part of them.

  Candidates for an arg-max, one from each device, are none of these.
  """
  vocab_size = pair.target.vocab_size
  largest = max((n for a in collective.arrays for n in a.shape), default=0)
  if largest >= vocab_size:
    return True
  if collective.kind not in _MOVES:
    return False
  shards = max(
    m.placement.num_shards('vocab') for m in (pair.target, pair.draft)
  )
  part = vocab_size / shards / 2
  rows = _local_rows(pair.target, pair)
  return largest >= part and collective.num_bytes >= rows * part * 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Bytes per device, from shapes and shardings alone: no padding."""

  target_weights: int
  draft_weights: int
  target_cache: int
  draft_cache: int

  @property
  def total(self) -> int:
    return sum(dataclasses.astuple(self))


def sizes(pair: Pair) -> Sizes:
  params, state = pair.params(), pair.state()
  return Sizes(
    target_weights=programs.device_bytes(params['target']),
    draft_weights=programs.device_bytes(params['proposer']),
    target_cache=programs.device_bytes(state.target_cache),
    draft_cache=programs.device_bytes(state.proposer_state),
  )


def bound_seconds(
  pair: Pair, chip: chips.Chip, is_int8: bool
) -> dict[str, float]:
  """The least seconds of a draft step and of a verification.

  Weights (without an embedding that only looks rows up) and the whole cache
  are read once from memory, or the matrices' products are computed at the
  chip's peak, whichever takes longer.
  """
  params, size = pair.params(), sizes(pair)
  peak = chip.int8_ops if is_int8 else chip.bfloat16_flops
  passes = {
    'draft': ('proposer', pair.draft, size.draft_weights, size.draft_cache, 1),
    'verify': (
      'target',
      pair.target,
      size.target_weights,
      size.target_cache,
      pair.num_draft_tokens + 1,
    ),
  }
  found = {}
  for step, (name, model, weights, cache, rows) in passes.items():
    tree = dict(params[name])
    embed = tree if model.tied else {'embed': tree.pop('embed')}
    if not model.tied:
      weights -= programs.device_bytes(embed['embed'])
    elements = programs.matrix_elements(tree)
    rows *= _local_rows(model, pair)
    found[step] = max(
      (weights + cache) / chip.hbm_bandwidth, 2 * elements * rows / peak
    )
  return found


def speed(
  pair: Pair, seconds: dict[str, float], acceptance: float
) -> dict[str, float]:
  """What a step's seconds come to: K draft steps, then a verification.

  Args:
    pair: for K and the batch.
    seconds: of 'draft' and 'verify'.
    acceptance: probability that a draft is accepted, alike for all.
  """
  k = pair.num_draft_tokens
  step = k * seconds['draft'] + seconds['verify']
  tokens = metrics.expected_tokens(acceptance, k)
  return {
    'draft_seconds': seconds['draft'],
    'verify_seconds': seconds['verify'],
    'step_seconds': step,
    'tokens_per_step': tokens,
    'tokens_per_second': pair.batch_size * tokens / step,
  }

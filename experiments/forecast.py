"""What a pair of models would need and take on a slice of chips."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax.numpy as jnp

from experiments import chips, hlo, programs
from experiments.programs import Pair
from specjax import metrics
from specjax.models.transformer import Transformer

# Kinds that move an array as it is; full-vocabulary logits have no business
# in any of them.
_MOVES = ('all-gather', 'all-to-all', 'collective-permute')

# What a collective is for, by its size and place.
WIDE, SMALL, FILTER = 'wide', 'small', 'filter'


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


def _is_wide(name: str, pair: Pair, collective: hlo.Collective) -> bool:
  """Whether it is as large as a pass's activations, or half as large.

  Candidates for an arg-max are no activations: many devices may send many of
  them, but their axes are short.
  """
  if name == 'verify':
    model, rows = pair.target, pair.num_draft_tokens + 1
  else:
    model, rows = pair.draft, 1
  size = model.embed_dim / 2
  num_bytes = (
    _local_rows(model, pair) * rows * size * jnp.dtype(model.dtype).itemsize
  )
  return any(
    a.num_bytes >= num_bytes and max(a.shape, default=0) >= size
    for a in collective.arrays
  )


def count(
  name: str, pair: Pair, collectives: Iterable[hlo.Collective]
) -> dict[tuple[str, str, str], dict[str, int]]:
  """How many collectives there are, and of what size.

  Args:
    name: one of `programs.PROGRAMS`.
    pair: the program's.
    collectives: all of the program's.

  Returns:
    {(part, class, kind): {'count', 'bytes'}}. Parts of the loop are its 'turn'
    and the draft 'scan' in it; other programs have one, 'step'. Classes: 'wide'
    for what is as large as activations, 'small' for the rest (both sides of a
    branch are counted), 'filter' for what is small and stands in the
    bisections of top-k and top-p, up to 32 turns each.
  """
  tally: dict[tuple[str, str, str], dict[str, int]] = {}
  for collective in collectives:
    part, path = _part(name, collective.path)
    size = FILTER if 'while' in path else SMALL
    size = WIDE if _is_wide(name, pair, collective) else size
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
  tally = {
    key: figures['count']
    for key, figures in count(name, pair, collectives).items()
  }
  for part, passes in _passes(name, pair, tally).items():
    found = {key: n for key, n in tally.items() if key[0] == part}
    wide = {kind: n for (_, size, kind), n in found.items() if size == WIDE}
    asked = sum(map(asked_for, passes))
    layers = ' and '.join(f'{model.num_layers}' for model in passes)
    if sum(wide.values()) > asked or set(wide) - {'all-reduce'}:
      what = ', '.join(f'{n} {kind}' for kind, n in sorted(wide.items()))
      problems.append(
        f'{name}: {what} of activations in a {part} of {layers} layers, where '
        f'the placement asks for {asked} all-reduce.'
      )
    # Rows that the target splits are gathered once, before the drafts.
    may_gather = part == 'step' and _local_rows(
      pair.target, pair
    ) < _local_rows(pair.draft, pair)
    if found and all(map(is_replicated, passes)) and not may_gather:
      problems.append(
        f'{name}: {sum(found.values())} collectives in a {part}, where the '
        'draft is whole on every device.'
      )
  return problems


def _passes(
  name: str, pair: Pair, tally: dict[tuple[str, str, str], int]
) -> dict[str, list[Transformer]]:
  """The models whose passes stand in each part of a program, once each."""
  if name != 'loop':
    return {'step': [pair.target if name == 'verify' else pair.draft]}
  # The first draft stands before the scan over the others. Without a scan (it
  # may be unrolled, or need no collectives) all may stand in the open.
  num_open = 1 if any(part == 'scan' for part, _, _ in tally) else None
  drafts = [pair.draft] * (num_open or pair.num_draft_tokens)
  return {'turn': [pair.target, *drafts], 'scan': [pair.draft]}


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

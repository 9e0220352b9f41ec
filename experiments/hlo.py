"""Reads the text of a compiled program: collectives and copies, and where.

A program is a set of computations that call each other. What is called from
inside a loop or a branch is told apart, so that a step's own collectives are
not mixed with those of a loop that runs inside it.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

KINDS = (
  'all-reduce',
  'all-gather',
  'all-to-all',
  'reduce-scatter',
  'collective-permute',
  'collective-broadcast',
)

_BITS = re.compile(r'^[a-z]+?(\d+)')
_ARRAY = re.compile(r'\b([a-z]+\d+\w*|pred|token)\[([\d,]*)\]')
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?([\w.-]+) = ')
_OPCODE = re.compile(r'\s([a-z][\w-]*)\(')
_HEADER = re.compile(r'^(ENTRY )?%?([\w.-]+) \(.*\{$')
_CALLED = re.compile(
  r'\b(calls|to_apply|body|condition|true_computation|false_computation'
  r'|branch_computations|called_computations)='
  r'(?:\{([^}]*)\}|%?([\w.-]+))'
)
_OPERAND = re.compile(r'%([\w.-]+)')
_OP_NAME = re.compile(r'metadata=\{[^}]*?op_name="([^"]*)"')
_GROUPS = re.compile(
  r'replica_groups=(\{\{.*?\}\}|\{\}|\[[^\]]*\]|mesh\[[^\]]*\] \{[^}]*\})'
)
_PAIRS = re.compile(r'source_target_pairs=\{(.*?)\}(?:,|$)')


@dataclasses.dataclass(frozen=True)
class Array:
  """One array of an instruction's result."""

  dtype: str
  shape: tuple[int, ...]

  @property
  def num_bytes(self) -> int:
    bits = 8 if self.dtype == 'pred' else 0
    found = _BITS.match(self.dtype)
    if found is not None:
      bits = int(found[1])
    return math.prod(self.shape) * bits // 8

  def __str__(self) -> str:
    return f'{self.dtype}[{",".join(map(str, self.shape))}]'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """A collective operation as the compiler left it.

  Attributes:
    kind: one of KINDS.
    arrays: what it yields on each device.
    op_name: the JAX operation it stems from, '' where that is lost.
    path: the loops and branches around it, from the outside: 'while' and
      'conditional'.
  """

  kind: str
  arrays: tuple[Array, ...]
  op_name: str
  path: tuple[str, ...]

  @property
  def num_bytes(self) -> int:
    return sum(array.num_bytes for array in self.arrays)

  def __str__(self) -> str:
    shapes = ', '.join(map(str, self.arrays))
    return f'{self.kind} of {shapes} ({self.op_name or "no name"})'


@dataclasses.dataclass(frozen=True)
class _Instruction:
  name: str
  opcode: str
  arrays: tuple[Array, ...]
  line: str
  called: tuple[str, ...]


def collectives(text: str) -> list[Collective]:
  """Every collective between two or more devices, once for each place.

  Args:
    text: optimised HLO, as `jax.stages.Compiled.as_text` gives it.

  Raises:
    ValueError: it has no entry computation.
  """
  computations, entry = _parse(text)
  if entry is None:
    raise ValueError('HLO text must have an ENTRY computation, got none.')
  return list(_walk(computations, entry, ()))


def beside_branches(text: str) -> list[tuple[str, str]]:
  """Communication that no data orders before or after that of a branch or loop.

  XLA:CPU orders the collectives of one computation, but not those inside a
  branch against those beside it: devices then send in different orders, and
  wait for each other for ever.

  Args:
    text: optimised HLO.

  Returns:
    Pairs of names: two conditionals or loops that communicate, or one such and
    a collective.
  """
  computations, _ = _parse(text)
  found = []
  for instructions in computations.values():
    before: dict[str, set[str]] = {}  # All that must have run, by name.
    nested = {}
    for instruction in instructions:
      name, right = instruction.name, instruction.line.split(' = ', 1)[1]
      operands = [x for x in _OPERAND.findall(right) if x in before]
      before[name] = set(operands).union(*(before[x] for x in operands))
      inside = [
        c
        for called in instruction.called
        for c in _walk(computations, called, ())
      ]
      is_own = instruction.opcode.removesuffix('-start') in KINDS
      if inside or (is_own and _num_participants(instruction.line) != 1):
        found += [
          (other, name)
          for other, is_other_own in nested.items()
          if other not in before[name] and not (is_own and is_other_own)
        ]
        nested[name] = is_own
  return found


def copies(text: str, shape: tuple[int, ...]) -> dict[str, int]:
  """How many copies of arrays of a shape each computation makes.

  Args:
    text: optimised HLO.
    shape: of the arrays that count, as that of a cache.

  Returns:
    Copies by the name of the computation; empty if there are none.
  """
  computations, _ = _parse(text)
  found = {
    name: sum(
      instruction.opcode in ('copy', 'copy-start')
      and instruction.arrays[0].shape == shape
      for instruction in instructions
    )
    for name, instructions in computations.items()
  }
  return {name: count for name, count in found.items() if count}


def _walk(
  computations: dict[str, list[_Instruction]], name: str, path: tuple[str, ...]
) -> Iterator[Collective]:
  for instruction in computations.get(name, ()):
    opcode = instruction.opcode
    kind = opcode.removesuffix('-start')
    if kind in KINDS:
      if _num_participants(instruction.line) != 1:
        found = _OP_NAME.search(instruction.line)
        yield Collective(
          kind=kind,
          arrays=_results(opcode, instruction.arrays),
          op_name='' if found is None else found[1],
          path=path,
        )
      continue  # What it calls is the sum of two numbers.
    # The end of an asynchronous operation names the computation once more.
    if opcode.endswith(('-done', '-update')):
      continue
    inside = (*path, opcode) if opcode in ('while', 'conditional') else path
    for called in instruction.called:
      yield from _walk(computations, called, inside)


def _results(opcode: str, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
  """The results alone: a start also holds its operands, and contexts."""
  if not opcode.endswith('-start') or opcode == 'all-reduce-start':
    return arrays
  arrays = tuple(a for a in arrays if a.shape)
  return arrays[len(arrays) // 2 :]


def _num_participants(line: str) -> int | None:
  """Devices in a group, or None for all of them or an unknown spelling."""
  pairs = _PAIRS.search(line)
  if pairs is not None:
    ends = re.findall(r'(\d+),\s*(\d+)', pairs[1])
    return 2 if any(a != b for a, b in ends) else 1
  found = _GROUPS.search(line)
  if found is None or found[1] == '{}':
    return None
  groups = found[1]
  if groups.startswith('mesh'):
    # mesh['x'=2,'y'=4] {'y'}, and 'y':(2)2 for a part of an axis.
    sizes, axes = groups.split('] ', 1)
    size = dict(re.findall(r"'(\w+)'=(\d+)", sizes))
    named = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", axes)
    return math.prod(int(part or size[name]) for name, part in named)
  if groups.startswith('['):
    return int(groups.strip('[]').split(',')[-1])
  return max(len(group.split(',')) for group in groups[2:-2].split('},{'))


def _parse(
  text: str,
) -> tuple[dict[str, list[_Instruction]], str | None]:
  computations: dict[str, list[_Instruction]] = {}
  entry = current = None
  for line in text.splitlines():
    header = _HEADER.match(line)
    if header is not None:
      current = computations.setdefault(header[2], [])
      entry = header[2] if header[1] else entry
    elif current is not None:
      instruction = _instruction(line)
      if instruction is not None:
        current.append(instruction)
  return computations, entry


def _instruction(line: str) -> _Instruction | None:
  start = _INSTRUCTION.match(line)
  if start is None:
    return None
  # The result's shape stands before the operation and may be a tuple.
  opcode = _OPCODE.search(line, start.end() - 1)
  if opcode is None:
    return None
  shape = line[start.end() : opcode.start()]
  arrays = tuple(
    Array(dtype, tuple(int(n) for n in sizes.split(',') if n))
    for dtype, sizes in _ARRAY.findall(re.sub(r'\{[^}]*\}', '', shape))
  )
  called = []
  for _, many, one in _CALLED.findall(line):
    names = many.split(',') if many else [one]
    called += [name.strip().removeprefix('%') for name in names]
  return _Instruction(start[1], opcode[1], arrays, line, tuple(called))

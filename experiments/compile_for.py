"""Compiles a speculative decoder for machines that are not here.

  compile_for.py --topology=v5e:8x8 --target=llama-3.1-70b \\
    --draft=llama-3.1-8b --mesh=data:4,model:16 --batch_size=64

A draft step, a verification and the whole generate loop are compiled for a
TPU slice by its own compiler, from shapes alone: no chip is needed and nothing
is allocated. All layers are compiled, unrolled, so nothing is extrapolated; a
large pair takes minutes. Shown are bytes per device, collectives, and the speed
that XLA expects next to a bound computed by hand; nothing is measured.

Exit code 1 if it does not fit the chip, if a pass has collectives that its
placement does not ask for, or if logits over the vocabulary are moved.

TPUs need libtpu: `make aot` installs it in an environment of its own.
--lower_only=cuda or tpu needs nothing: it lowers the same programs.
"""

import dataclasses
import importlib.metadata
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from experiments import (
  chips,
  forecast,
  forecast_report,
  programs,
  script,
  surroundings,
  text_files,
)
from experiments.programs import Pair
from experiments.progress import Progress
from specjax import mesh as meshes
from specjax.models import presets
from specjax.models.transformer import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """What is asked of the compiler, as given on the command line."""

  topology: str
  target: str
  draft: str | None = None
  head: int | None = None
  mesh: str | None = None
  draft_mesh: str | None = None
  batch_size: int = 1
  context: int = 4096
  num_draft_tokens: int = 4
  quantize: str = 'none'
  acceptance: float = 0.8
  lower_only: str | None = None

  def __post_init__(self):
    if (self.draft is None) == (self.head is None):
      raise ValueError(
        'either --draft or --head must be given, got '
        f'{self.draft!r} and {self.head}.'
      )
    for name, low, high in (
      ('head', 1, 64),
      ('batch_size', 1, 65536),
      ('context', 2, 2**24),
      ('num_draft_tokens', 1, 64),
    ):
      value = getattr(self, name)
      if value is not None and not low <= value <= high:
        raise ValueError(f'--{name} must be in {low}..{high}, got {value}.')
    if not 0 <= self.acceptance <= 1:
      raise ValueError(
        f'--acceptance must be in [0, 1], got {self.acceptance}.'
      )


def define_flags(values: flags.FlagValues):
  string = lambda name, default, text: flags.DEFINE_string(
    name, default, text, flag_values=values
  )
  whole = lambda name, default, text: flags.DEFINE_integer(
    name, default, text, flag_values=values
  )
  enum = lambda name, default, allowed, text: flags.DEFINE_enum(
    name, default, allowed, text, flag_values=values
  )
  string(
    'topology',
    None,
    'The slice: v5e:2x4, v5e:8x8, v5p:4x4x4, v6e:8x8, ...; cpu:8 for fake CPU '
    'devices; h100:8 and the like with --lower_only.',
  )
  string('target', None, 'A published shape by name.')
  string('draft', None, 'Another one, with the same vocabulary.')
  whole(
    'head',
    None,
    "Instead of --draft: this many layers of the target's own width, with an "
    'embedding and an output head of their own.',
  )
  string(
    'mesh',
    None,
    'How the target lies on the slice, as in data:4,model:16. If not given: '
    'model over all of it.',
  )
  string(
    'draft_mesh',
    None,
    'How the draft lies on the same devices, as in model:8; it is copied over '
    'the rest. If not given: as the target.',
  )
  whole('batch_size', 1, 'Rows decoded together.')
  whole('context', 4096, 'Tokens per row; caches are read whole.')
  whole('num_draft_tokens', 4, 'Drafts per step, 1..64.')
  enum('quantize', 'none', ('none', 'int8'), 'Weights of both models.')
  flags.DEFINE_float(
    'acceptance',
    0.8,
    'Probability that a draft is accepted, for tokens per second.',
    flag_values=values,
  )
  enum(
    'lower_only',
    None,
    ('cuda', 'tpu'),
    'Only lower the programs for this platform; --topology gives the number '
    'of devices.',
  )
  string('json_out', None, 'File for the result, as JSON.')


FLAG_GROUPS = (('What to compile, and for what', define_flags),)


def options_from(values: flags.FlagValues) -> Options:
  for name in ('topology', 'target'):
    if values[name].value is None:
      raise ValueError(f'--{name} must be given.')
  names = [field.name for field in dataclasses.fields(Options)]
  return Options(**{name: values[name].value for name in names})


def make_pair(options: Options, devices: Sequence[Any]) -> Pair:
  """The two models, placed on the devices.

  Raises:
    ValueError: a name, a mesh or a size that does not go together.
  """
  target = _model(options.target, options.quantize)
  if options.draft is None:
    if options.head > target.num_layers:
      raise ValueError(
        f'--head must be at most {target.num_layers}, the layers of '
        f'{options.target}, got {options.head}.'
      )
    draft = programs.cut(target, options.head)
  else:
    draft = _model(options.draft, options.quantize)
  if draft.vocab_size != target.vocab_size:
    raise ValueError(
      f"--draft must have the target's vocabulary of {target.vocab_size}, got "
      f'{draft.vocab_size} of {options.draft}.'
    )
  if options.context > draft.context_length:
    raise ValueError(
      f'--context must be at most {draft.context_length}, that of '
      f'{options.draft or options.target}, got {options.context}.'
    )
  shape = meshes.parse_mesh(options.mesh or f'model:{len(devices)}')
  if shape.num_devices != len(devices):
    raise ValueError(
      f'--mesh must have the {len(devices)} devices of {options.topology}, '
      f'got {shape}.'
    )
  draft_shape = None
  if options.draft_mesh is not None:
    draft_shape = meshes.parse_mesh(options.draft_mesh, '--draft_mesh')
  view, draft_view = meshes.refine(shape, draft_shape, devices)
  for name, parts in (('--mesh', shape), ('--draft_mesh', draft_shape)):
    if parts is not None and options.batch_size % parts.data:
      raise ValueError(
        f'--batch_size must be a multiple of {parts.data}, data in {name}, '
        f'got {options.batch_size}.'
      )
  return Pair(
    target=_placed(target, view),
    draft=_placed(draft, draft_view),
    batch_size=options.batch_size,
    context=options.context,
    num_draft_tokens=options.num_draft_tokens,
  )


def _model(name: str, quantize: str) -> Transformer:
  model = presets.preset(name)
  if quantize == 'none':
    return model
  return dataclasses.replace(model, quantize=quantize)


def _placed(model: Transformer, view: meshes.View) -> Transformer:
  placement = meshes.place(model.param_specs(), view)
  return dataclasses.replace(model, placement=placement)


def find_devices(topology: chips.Topology, lower_only: bool) -> Sequence[Any]:
  """Descriptions of the slice's devices, or fake CPU devices.

  Raises:
    ValueError: libtpu is not installed or does not know the slice.
  """
  if lower_only or topology.chip is None:
    return _cpu_devices(topology.num_devices)
  if not topology.is_tpu:
    raise ValueError(
      f'--topology={topology.name} can only be lowered for here: add '
      '--lower_only=cuda.'
    )
  # Without these, libtpu asks the network what machine it is on.
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v5litepod-8')
  os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
  # A chip has one owner; several processes may compile.
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', 'true')
  try:
    importlib.metadata.version('libtpu')
  except importlib.metadata.PackageNotFoundError:
    raise ValueError(
      f'--topology={topology.name} needs libtpu, which is not installed: '
      "pip install 'specjax[tpu-aot]' in an environment of its own, or add "
      '--lower_only=tpu.'
    ) from None
  from jax.experimental import topologies

  try:
    return topologies.get_topology_desc(topology.name, 'tpu').devices
  except jax.errors.JaxRuntimeError as error:
    reason = ' '.join(str(error).split())
    raise ValueError(
      f'--topology must be a slice that exists, got {topology.name!r}: {reason}'
    ) from None


def _cpu_devices(num: int) -> Sequence[Any]:
  jax.config.update('jax_platforms', 'cpu')
  try:
    jax.config.update('jax_num_cpu_devices', num)
  except RuntimeError:
    pass  # The backend runs, with as many as it was started with.
  devices = jax.devices('cpu')
  if len(devices) < num:
    raise ValueError(
      f'--topology must have at most {len(devices)} devices in this process, '
      f'got {num}.'
    )
  return devices[:num]


def forecast_for(options: Options) -> dict[str, Any]:
  """The result for --json_out; its 'problems' decide the exit code.

  Raises:
    ValueError: the options do not go together.
  """
  topology = chips.parse_topology(options.topology)
  is_lowered = options.lower_only is not None
  pair = make_pair(options, find_devices(topology, is_lowered))
  size = forecast.sizes(pair)
  result = {
    'topology': topology.name,
    'num_devices': topology.num_devices,
    'placement': _placement(pair),
    'bytes_per_device': dataclasses.asdict(size),
    'problems': [],
  }
  chip = topology.chip
  if chip is not None:
    seconds = forecast.bound_seconds(pair, chip, options.quantize == 'int8')
    result['bound'] = forecast.speed(pair, seconds, options.acceptance)
    result['hbm_bytes'] = chip.hbm_bytes
  is_too_large = chip is not None and size.total > chip.hbm_bytes
  if is_too_large:
    result['bytes_per_device']['total'] = size.total
    result['problems'].append(_too_large(size.total, chip))
  if is_lowered:
    result['stablehlo_bytes'] = {}
    for name in programs.PROGRAMS:
      with Progress(f'lowering {name}'):
        num_bytes = programs.lower_only(name, pair, options.lower_only)
      result['stablehlo_bytes'][name] = num_bytes
  elif not is_too_large:
    _compile(options, topology, pair, result)
  return result


def _compile(
  options: Options,
  topology: chips.Topology,
  pair: Pair,
  result: dict[str, Any],
):
  """Adds what the compiler says to the result."""
  chip = topology.chip
  seconds = {}
  for name in programs.PROGRAMS:
    try:
      with Progress(f'compiling {name}'):
        compiled = programs.compile_program(
          name, pair, 'tpu' if topology.is_tpu else 'cpu'
        )
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      reason = ' '.join(str(error).split())
      result['problems'].append(f'{name} does not fit: {reason:.300}')
      needed = re.search(r'\(([\d.]+)G\) exceeds', reason)
      if needed is not None:
        result['bytes_per_device']['total'] = float(needed[1]) * 2**30
      return
    seconds[name] = compiled.numbers.get('seconds')
    tally = forecast.count(name, pair, compiled.collectives)
    result[name] = {
      **compiled.numbers,
      'collectives': [
        {'part': part, 'class': size, 'kind': kind, **figures}
        for (part, size, kind), figures in sorted(tally.items())
      ],
    }
    result['problems'] += forecast.check(name, pair, compiled.collectives)
  loop = result['loop']
  stated = forecast.sizes(pair).total
  # What the loop yields takes the place of what it is given.
  temporaries = loop['temporaries'] + loop['outputs'] - loop['aliases']
  total = loop['arguments'] + temporaries + loop['code']
  result['bytes_per_device'].update(
    rest_and_padding=loop['arguments'] - stated,
    temporaries=temporaries,
    code=loop['code'],
    total=total,
  )
  if chip is not None:
    if total > chip.hbm_bytes:
      result['problems'].append(_too_large(total, chip))
    # XLA's seconds are known up to whole ones (`compile_program`).
    bound = result['bound']
    if max(bound['draft_seconds'], bound['verify_seconds']) < 0.5:
      result['xla'] = forecast.speed(pair, seconds, options.acceptance)


def _too_large(num_bytes: float, chip: chips.Chip) -> str:
  gib = 2**30
  return (
    f'does not fit: {num_bytes / gib:.2f} GiB per device, '
    f'{(num_bytes - chip.hbm_bytes) / gib:.2f} GiB more than the '
    f'{chip.hbm_bytes / gib:.2f} GiB of a {chip.name}.'
  )


def _placement(pair: Pair) -> dict[str, dict[str, int]]:
  """How many parts each logical axis is split into, where it is split."""
  found = {}
  for name, model in (('target', pair.target), ('draft', pair.draft)):
    parts = {
      axis: model.placement.num_shards(axis) for axis, _ in model.placement.axes
    }
    found[name] = {axis: n for axis, n in parts.items() if n > 1}
  return found


def main(values: flags.FlagValues) -> int:
  options = options_from(values)
  if values.json_out is not None:
    text_files.check_writable(values.json_out)
  result = forecast_for(options)
  print(forecast_report.report(options, result))
  if values.json_out is not None:
    text_files.write_json(
      values.json_out,
      {
        'config': options,
        'environment': environment(),
        'result': result,
      },
    )
  return int(bool(result['problems']))


def environment() -> dict[str, Any]:
  """What the result depends on besides its configuration."""
  try:
    libtpu = importlib.metadata.version('libtpu')
  except importlib.metadata.PackageNotFoundError:
    libtpu = None
  return {**surroundings.environment(), 'libtpu': libtpu}


if __name__ == '__main__':
  # What is compiled for is named by --topology; nothing runs on this machine.
  jax.config.update('jax_platforms', 'cpu')
  sys.exit(script.run_main(main, FLAG_GROUPS, keeps_compiled=False))

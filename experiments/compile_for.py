"""Compiles a speculative decoder for machines that are not here.

  compile_for.py --topology=v5e:8x8 --target=llama-3.1-70b \\
    --draft=llama-3.1-8b --mesh=data:4,model:16 --batch_size=64

A draft step, a verification and the whole generate loop are compiled for a
TPU slice by its own compiler, from shapes alone: no chip is needed and nothing
is allocated. Shown are bytes per device, collectives, and the speed that XLA
expects next to a bound computed by hand; nothing is measured. Deep models are
compiled at 2, 4 and 6 layers and extrapolated, unless --whole is given.

Exit code 1 if it does not fit the chip, if a pass has collectives that its
placement does not ask for, or if logits over the vocabulary are moved.

TPUs need libtpu: `make compile-for` installs it in an environment of its own.
--lower_only=cuda or tpu needs nothing: it lowers the same programs.
"""

import dataclasses
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from experiments import chips, common, forecast, programs
from experiments.forecast import Estimate
from experiments.programs import Pair
from specjax import mesh as meshes
from specjax.models import presets
from specjax.models.transformer import Transformer

GIB = 2**30


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
  whole: bool = False
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
  flags.DEFINE_bool(
    'whole', False, 'Compile all layers (slow).', flag_values=values
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
      f'{options.draft}, got {options.context}.'
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
  """The result for --json_out, 'problems' in it."""
  topology = chips.parse_topology(options.topology)
  pair = make_pair(
    options, find_devices(topology, options.lower_only is not None)
  )
  size = forecast.sizes(pair)
  result = {
    'compiled_for': topology.name,
    'num_devices': topology.num_devices,
    'placement': _placement(pair),
    'bytes_per_device': dataclasses.asdict(size),
    'problems': [],
  }
  chip = topology.chip
  if chip is not None:
    is_int8 = options.quantize == 'int8'
    seconds = forecast.bound_seconds(pair, chip, is_int8)
    result['bound'] = forecast.speed(pair, seconds, options.acceptance)
    result['hbm_bytes'] = chip.hbm_bytes
  if options.lower_only is not None:
    result['lowered_for'] = options.lower_only
    result['stablehlo_bytes'] = {}
    for name in programs.PROGRAMS:
      with common.Progress(f'lowering {name}'):
        result['stablehlo_bytes'][name] = programs.lower_only(
          name, pair, options.lower_only
        )
    return result
  if chip is not None and size.total > chip.hbm_bytes:
    result['problems'].append(_too_large(size.total, chip))
    return result
  return _compile(options, topology, pair, result)


def _compile(
  options: Options,
  topology: chips.Topology,
  pair: Pair,
  result: dict[str, Any],
) -> dict[str, Any]:
  """Adds what the compiler says."""
  platform = 'tpu' if topology.is_tpu else 'cpu'
  target = forecast.depths(pair.target, options.whole)
  draft = forecast.depths(pair.draft, options.whole)
  points = {
    'draft': forecast.grid((pair.target.num_layers,), draft),
    'verify': forecast.grid(target, (pair.draft.num_layers,)),
    'loop': forecast.grid(target, draft),
  }
  estimates = {}
  for name in programs.PROGRAMS:
    with common.Progress(f'compiling {name}') as progress:

      def compile_at(name: str, small: Pair) -> programs.Compiled:
        depth = (small.target.num_layers, small.draft.num_layers)
        progress.update('at {} and {} layers'.format(*depth))
        return programs.compile_program(name, small, platform)

      try:
        estimate, problems = forecast.study(
          name, pair, points[name], compile_at
        )
      except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
          raise
        reason = ' '.join(str(error).split())
        result['problems'].append(f'{name} does not fit: {reason}')
        return result
    estimates[name] = estimate
    result[name] = dataclasses.asdict(estimate)
    result['problems'] += problems
  memory = _memory(estimates['loop'], forecast.sizes(pair).total)
  result['bytes_per_device'].update(memory)
  if topology.chip is not None and memory['total'] > topology.chip.hbm_bytes:
    result['problems'].append(_too_large(memory['total'], topology.chip))
  if topology.is_tpu:
    seconds = {
      name: estimates[name].numbers['seconds'] for name in ('draft', 'verify')
    }
    result['xla'] = forecast.speed(pair, seconds, options.acceptance)
  return result


def _memory(loop: Estimate, stated: int) -> dict[str, float]:
  numbers = loop.numbers
  arguments = numbers['arguments']
  temporaries = numbers['outputs'] - numbers['aliases'] + numbers['temporaries']
  return {
    'rest_and_padding': arguments - stated,
    'temporaries': temporaries,
    'code': numbers['code'],
    'total': arguments + temporaries + numbers['code'],
  }


def _too_large(num_bytes: float, chip: chips.Chip) -> str:
  return (
    f'does not fit: {num_bytes / GIB:.2f} GiB per device, '
    f'{(num_bytes - chip.hbm_bytes) / GIB:.2f} GiB more than the '
    f'{chip.hbm_bytes / GIB:.2f} GiB of a {chip.name}.'
  )


def _placement(pair: Pair) -> dict[str, dict[str, int]]:
  models = {'target': pair.target, 'draft': pair.draft}
  return {
    name: {
      axis: model.placement.num_shards(axis)
      for axis, _ in model.placement.axes
      if model.placement.num_shards(axis) > 1
    }
    for name, model in models.items()
  }


def report(options: Options, result: dict[str, Any]) -> str:
  """The result for people."""
  where = f'compiled for {result["compiled_for"]}'
  lines = [_title(options), '']
  for name, axes in result['placement'].items():
    split = ', '.join(f'{axis} {n} ways' for axis, n in axes.items())
    lines.append(
      f'{name}: split {split}' if split else f'{name}: on each device'
    )
  if 'lowered_for' in result:
    for name, num_bytes in result['stablehlo_bytes'].items():
      lines.append(
        f'{name}: lowers for {result["lowered_for"]} ({num_bytes} bytes of '
        'StableHLO)'
      )
    where = f'from shapes, for {result["compiled_for"]}'
  lines += ['', f'GiB per device, {where}']
  for name, num_bytes in result['bytes_per_device'].items():
    lines.append(f'  {name.replace("_", " "):18} {num_bytes / GIB:9.3f}')
  if 'hbm_bytes' in result:
    lines.append(f'  {"HBM of the chip":18} {result["hbm_bytes"] / GIB:9.3f}')
  for name in programs.PROGRAMS:
    if name in result:
      lines += _program_lines(name, result[name], where)
  if 'bound' in result:
    lines += _speed_lines(options, result, where)
  lines.append('')
  lines += [f'PROBLEM: {problem}' for problem in result['problems']]
  if not result['problems']:
    lines.append('no problem found')
  return '\n'.join(lines)


def _title(options: Options) -> str:
  draft = options.draft
  if draft is None:
    draft = f"a head of {options.head} of the target's layers"
  return (
    f'{options.target} with {draft}, batch {options.batch_size}, context '
    f'{options.context}, K = {options.num_draft_tokens}, quantize '
    f'{options.quantize}'
  )


def _program_lines(name: str, found: dict[str, Any], where: str) -> list[str]:
  numbers = found['numbers']
  depths = ', '.join(f'{t} + {d}' for t, d in found['depths'])
  how = f'layers {depths}'
  if found['miss'] is not None:
    how += f', the last one off the line by {found["miss"]:.2%} at most'
  lines = [
    '',
    f'{name}, {where} at {how}',
    f'  {numbers["flops"] / 1e9:.3f} GFLOP and '
    f'{numbers["bytes_accessed"] / 1e9:.3f} GB accessed per device, inner '
    'loops counted once',
  ]
  for part, sizes in sorted(found['collectives'].items()):
    for size, kinds in sorted(sizes.items(), reverse=True):
      for kind, figures in sorted(kinds.items()):
        lines.append(
          f'  {part}: {figures["count"]:.0f} {size} {kind}, '
          f'{figures["bytes"]:.0f} bytes'
        )
  return lines


def _speed_lines(
  options: Options, result: dict[str, Any], where: str
) -> list[str]:
  lines = [
    '',
    f'speed at acceptance {options.acceptance:g}, '
    f'{result["bound"]["tokens_per_step"]:.2f} tokens per row and step',
    f'  {"":26} {"draft ms":>9} {"verify ms":>9} {"step ms":>9} '
    f'{"tokens/s":>9}',
  ]
  for name, label in (('xla', f'XLA, {where}'), ('bound', 'bound by hand')):
    if name in result:
      x = result[name]
      lines.append(
        f'  {label:26} {1e3 * x["draft_seconds"]:9.3f} '
        f'{1e3 * x["verify_seconds"]:9.3f} {1e3 * x["step_seconds"]:9.3f} '
        f'{x["tokens_per_second"]:9.1f}'
      )
  return lines


def main(values: flags.FlagValues) -> int:
  options = options_from(values)
  if values.json_out is not None:
    common.check_writable(values.json_out)
  result = forecast_for(options)
  print(report(options, result))
  if values.json_out is not None:
    common.write_json(
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
  return {**common.environment(), 'libtpu': libtpu}


if __name__ == '__main__':
  # What is compiled for is named by --topology; nothing runs on this machine.
  jax.config.update('jax_platforms', 'cpu')
  sys.exit(common.run_main(main, FLAG_GROUPS))

"""What `compile_for.py` found, as text and as a row of a table."""

from typing import TYPE_CHECKING, Any

from experiments import programs

if TYPE_CHECKING:
  from experiments.compile_for import Options

GIB = 2**30
COLUMNS = (
  'target',
  'draft',
  'compiled for',
  'mesh',
  'B',
  'K',
  'weights',
  'caches',
  'rest',
  'of',
  'draft ms',
  'verify ms',
  'tokens/s',
  'bound',
)


def report(options: 'Options', result: dict[str, Any]) -> str:
  """The result for people."""
  lines = [_title(options), '']
  for name, axes in result['placement'].items():
    split = ', '.join(f'{axis} {n} ways' for axis, n in axes.items())
    lines.append(f'{name}: {split or "whole on every device"}')
  where = f'compiled for {result["topology"]}'
  if options.lower_only is not None:
    where = f'by shapes, for {result["topology"]}'
    for name, num_bytes in result['stablehlo_bytes'].items():
      lines.append(
        f'{name}: lowers for {options.lower_only}, {num_bytes} bytes of '
        'StableHLO'
      )
  lines += ['', f'GiB per device, {where}']
  memory = {**result['bytes_per_device']}
  if 'hbm_bytes' in result:
    memory['hbm_of_the_chip'] = result['hbm_bytes']
  for name, num_bytes in memory.items():
    lines.append(f'  {name.replace("_", " "):18} {num_bytes / GIB:9.3f}')
  for name in programs.PROGRAMS:
    if name in result:
      lines += _program(name, result[name], where)
  if 'bound' in result:
    lines += _speed(options, result, where)
  lines.append('')
  lines += [f'PROBLEM: {problem}' for problem in result['problems']]
  if not result['problems']:
    lines.append('no problem found')
  return '\n'.join(lines)


def _draft(options: 'Options') -> str:
  return options.draft or f'{options.head}-layer head'


def _title(options: 'Options') -> str:
  return (
    f'{options.target} with {_draft(options)}, batch {options.batch_size}, '
    f'context {options.context}, K = {options.num_draft_tokens}, quantize '
    f'{options.quantize}'
  )


def _program(name: str, found: dict[str, Any], where: str) -> list[str]:
  lines = [
    '',
    f'{name}, {where}, per device',
    f'  {found["flops"] / 1e9:.3f} GFLOP, {found["bytes_accessed"] / 1e9:.3f} '
    'GB accessed (inner loops counted once)',
  ]
  for x in found['collectives']:
    lines.append(
      f'  {x["part"]}: {x["count"]} {x["class"]} {x["kind"]}, {x["bytes"]} '
      'bytes'
    )
  return lines


def _speed(options: 'Options', result: dict[str, Any], where: str) -> list[str]:
  lines = [
    '',
    f'speed at acceptance {options.acceptance:g}: '
    f'{result["bound"]["tokens_per_step"]:.2f} tokens per row and step',
    f'  {"":30}{"draft ms":>10}{"verify ms":>10}{"step ms":>10}'
    f'{"tokens/s":>10}',
  ]
  for name, label in (('xla', f'XLA, {where}'), ('bound', 'bound by hand')):
    if name in result:
      x = result[name]
      lines.append(
        f'  {label:30}{1e3 * x["draft_seconds"]:10.3f}'
        f'{1e3 * x["verify_seconds"]:10.3f}{1e3 * x["step_seconds"]:10.3f}'
        f'{x["tokens_per_second"]:10.1f}'
      )
  return lines


def row(options: 'Options', result: dict[str, Any]) -> tuple[str, ...]:
  """The cells under COLUMNS; gibibytes per device."""
  memory = result['bytes_per_device']
  gib = lambda *names: f'{sum(memory[n] for n in names) / GIB:.2f}'
  mesh = options.mesh or f'model:{result["num_devices"]}'
  if options.draft_mesh is not None:
    mesh += f'; {options.draft_mesh}'
  suffix = ' int8' if options.quantize == 'int8' else ''
  cells = (
    options.target + suffix,
    _draft(options) + suffix,
    result['topology'],
    mesh,
    str(options.batch_size),
    str(options.num_draft_tokens),
    gib('target_weights', 'draft_weights'),
    gib('target_cache', 'draft_cache'),
  )
  of = f'{result["hbm_bytes"] / GIB:.2f}'
  bound = f'{result["bound"]["tokens_per_second"]:.0f}'
  if 'xla' not in result:
    verdict = 'does not fit' if result['problems'] else 'no estimate'
    over = memory.get('total', 0) - result['hbm_bytes']
    if over > 0:
      verdict += f', by {over / GIB:.2f}'
    return (*cells, '', of, verdict, '', '', bound)
  xla = result['xla']
  return (
    *cells,
    gib('rest_and_padding', 'temporaries', 'code'),
    of,
    f'{1e3 * xla["draft_seconds"]:.2f}',
    f'{1e3 * xla["verify_seconds"]:.2f}',
    f'{xla["tokens_per_second"]:.0f}',
    bound,
  )

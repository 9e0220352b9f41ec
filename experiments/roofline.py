r"""The least time of a step on a device, and what speculation gains by it.

  python experiments/roofline.py --target=llama-3.1-8b --draft=llama-3.2-1b \
    --device=h100 --batch_sizes=1,16,64 --contexts=1024,8192

A pass reads every weight and the whole cache once, and multiplies; whichever
takes longer is its least time. Decoding one row is bound by memory, so a pass
over a few rows more costs the same: the verify curve is flat up to the width at
which computing takes as long as reading, and drafts are checked for nothing.

A model is a published shape by name or a config.json; a device is one of the
table, or --measure for the one at hand. Launches, activations and communication
are not counted. Acceptance is the probability that a draft is accepted, alike
for all. The table goes to stdout, everything to --json_out.
"""

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from experiments import chips, measure_chip, script, surroundings, text_files
from experiments.progress import Progress
from specjax import metrics, sharding
from specjax.models import config as model_config
from specjax.models import presets, quantize
from specjax.models.transformer import Transformer

MAX_DRAFT_TOKENS = 64
_MAX_WIDTH = 2**20
_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)


def make_model(name: str, dtype: str, scheme: str) -> Transformer:
  """A published shape by name, or that of a config.json."""
  if name in presets.PRESETS:
    model = presets.preset(name, dtype)
  else:
    path = pathlib.Path(name)
    if not path.is_file():
      raise ValueError(
        f'a model must be a config.json or one of {", ".join(presets.PRESETS)},'
        f' got {name!r}.'
      )
    try:
      settings = json.loads(text_files.read_text(name))
    except (ValueError, RecursionError) as error:
      raise ValueError(f'{name!r} is not JSON: {error}.') from None
    if not isinstance(settings, dict):
      raise ValueError(f'{name!r} must hold a JSON object.')
    model = model_config.config_from_hf(settings, dtype=dtype)
  # As on an accelerator, whatever this is computed on.
  return dataclasses.replace(model, quantize=scheme, cache_dtype=dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
  """A forward pass over new tokens.

  Attributes:
    weight_bytes: read, an embedding that only looks rows up left out.
    cache_bytes: read, and written for the new tokens.
    matrix_flops: of the products with weights.
    attention_flops: of scores and their sums over the cache.
  """

  weight_bytes: int
  cache_bytes: int
  matrix_flops: int
  attention_flops: int

  @property
  def num_bytes(self) -> int:
    return self.weight_bytes + self.cache_bytes


def cache_bytes_per_token(model: Transformer) -> int:
  """Bytes of a token's keys and values in one layer."""

  def size(num_slots: int) -> int:
    cache = jax.eval_shape(lambda: model.init_cache(1, num_slots, max_rewind=0))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))

  # The difference, over a span that blocks of slots divide.
  return (size(2048) - size(1024)) // 1024 // model.num_layers


def count(
  model: Transformer, batch_size: int, num_rows: int, context: int
) -> Pass:
  """What a pass over `num_rows` tokens per batch row reads and multiplies.

  Args:
    model: any transformer.
    batch_size: B.
    num_rows: T.
    context: tokens in the cache, the new ones included; a layer with a window
      sees no more than the window.
  """
  specs = dict(model.param_specs())
  looked_up = 0
  if not model.tied:
    specs.pop('embed')
    looked_up = batch_size * num_rows * model.embed_dim
    looked_up *= (
      1 if model.quantize == 'int8' else jnp.dtype(model.dtype).itemsize
    )
  leaves = jax.tree.leaves(specs, is_leaf=sharding.is_spec)
  weight_bytes = sum(
    math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves
  )
  elements = sum(
    math.prod(leaf.shape) for leaf in leaves if quantize.is_quantized(leaf)
  )
  seen = [min(context, window or context) for window in model.windows]
  per_token = cache_bytes_per_token(model)
  rows = batch_size * num_rows
  return Pass(
    weight_bytes=weight_bytes + looked_up,
    cache_bytes=per_token * (batch_size * sum(seen) + rows * model.num_layers),
    matrix_flops=2 * elements * rows,
    attention_flops=4 * rows * sum(seen) * model.num_heads * model.head_dim,
  )


def seconds(work: Pass, chip: chips.Chip, is_int8: bool) -> tuple[float, float]:
  """Least seconds of memory and of computing; a pass takes the longer one.

  Source: Williams et al., Roofline, CACM 52(4), 2009.
  """
  peak = chip.int8_ops if is_int8 else chip.bfloat16_flops
  return (
    work.num_bytes / chip.hbm_bandwidth,
    work.matrix_flops / peak + work.attention_flops / chip.bfloat16_flops,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roof:
  """A model on a chip, for rows of one length.

  Attributes:
    model: the model.
    chip: the chip.
    batch_size: B.
    context: tokens in each row's cache.
  """

  model: Transformer
  chip: chips.Chip
  batch_size: int
  context: int

  def work(self, num_rows: int) -> Pass:
    return count(self.model, self.batch_size, num_rows, self.context)

  def parts(self, num_rows: int) -> tuple[float, float]:
    is_int8 = self.model.quantize == 'int8'
    return seconds(self.work(num_rows), self.chip, is_int8)

  def step(self, num_rows: int) -> float:
    """Least seconds of a pass."""
    return max(self.parts(num_rows))

  def flat_width(self) -> int | None:
    """The most rows whose computing hides behind reading.

    0 if not even one does; None if any number does.
    """
    fits = lambda rows: self.parts(rows)[1] <= self.parts(rows)[0]
    if not fits(1):
      return 0
    if fits(_MAX_WIDTH):
      return None
    low, high = 1, _MAX_WIDTH
    while high - low > 1:
      middle = (low + high) // 2
      low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def best(
  target: Roof, draft: Roof | None, acceptance: float, most: int
) -> dict[str, Any]:
  """The K in 0..most with the largest speed-up; 0 is plain decoding.

  Args:
    target: verifies.
    draft: drafts one row a pass; None is free, as a lookup is.
    acceptance: alpha of `metrics.speedup`.
    most: the largest K.
  """
  plain = target.step(1)
  ratio = draft.step(1) / plain if draft else 0.0
  gain = {
    k: metrics.speedup(acceptance, k, ratio, target.step(k + 1) / plain)
    for k in range(most + 1)
  }
  k = max(gain, key=gain.get)
  return {'acceptance': acceptance, 'K': k, 'speedup': gain[k]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """What is asked for, checked."""

  target: str
  draft: str | None
  dtype: str
  quantize: str
  draft_quantize: str
  chip: str | None
  acceptance: tuple[float, ...]
  batch_sizes: tuple[int, ...]
  contexts: tuple[int, ...]
  max_draft_tokens: int
  json_out: str | None = None

  def __post_init__(self):
    for name in ('batch_sizes', 'contexts'):
      if not all(1 <= n <= 2**24 for n in getattr(self, name)):
        raise ValueError(
          f'--{name} must be in 1..{2**24}, got {getattr(self, name)}.'
        )
    if not all(0 <= a <= 1 for a in self.acceptance):
      raise ValueError(f'--acceptance must be in 0..1, got {self.acceptance}.')
    if not 1 <= self.max_draft_tokens <= MAX_DRAFT_TOKENS:
      raise ValueError(
        f'--max_draft_tokens must be in 1..{MAX_DRAFT_TOKENS}, got '
        f'{self.max_draft_tokens}.'
      )
    if self.json_out is not None:
      text_files.check_writable(self.json_out)


def table(options: Options, chip: chips.Chip) -> list[dict[str, Any]]:
  """A row for every batch size and context."""
  target = make_model(options.target, options.dtype, options.quantize)
  draft = None
  if options.draft is not None:
    draft = make_model(options.draft, options.dtype, options.draft_quantize)
  found = []
  for batch_size in options.batch_sizes:
    for context in options.contexts:
      sizes = {'chip': chip, 'batch_size': batch_size, 'context': context}
      roof = Roof(model=target, **sizes)
      under = draft and Roof(model=draft, **sizes)
      plain = roof.work(1)
      held = plain.num_bytes + (under.work(1).num_bytes if under else 0)
      found.append(
        {
          'batch': batch_size,
          'context': context,
          'weight_bytes': plain.weight_bytes,
          'cache_bytes': plain.cache_bytes,
          'fits': held <= chip.hbm_bytes,
          'seconds_plain': roof.step(1),
          'seconds_draft': under and under.step(1),
          'seconds_verify': {n: roof.step(n) for n in _WIDTHS},
          'flat_width': roof.flat_width(),
          'best': [
            best(roof, under, a, options.max_draft_tokens)
            for a in options.acceptance
          ],
        }
      )
  return found


def _scheme(quantize: str) -> str:
  return '' if quantize == 'none' else f' in {quantize}'


def markdown(options: Options, chip: chips.Chip, rows: Sequence[dict]) -> str:
  names = ['B', 'context', 'weights GB', 'cache GB', 'fits', 'plain ms']
  names += ['draft ms'] * (options.draft is not None)
  names += [f'verify({n})' for n in _WIDTHS[1:]]
  names += ['flat up to']
  names += [f'{a:g}: K, speed-up' for a in options.acceptance]
  lines = [
    f'{options.target}{_scheme(options.quantize)}'
    + (
      f' with {options.draft}{_scheme(options.draft_quantize)}'
      if options.draft
      else ''
    )
    + f' on {chip.name}: {chip.hbm_bandwidth / 1e9:.4g} GB/s, '
    f'{chip.bfloat16_flops / 1e12:.4g} bfloat16 and '
    f'{chip.int8_ops / 1e12:.4g} int8 tera-operations per second. Verifying is '
    'given as a multiple of a plain step.',
    '',
    f'| {" | ".join(names)} |',
    '|---' * len(names) + '|',
  ]
  for row in rows:
    plain = row['seconds_plain']
    cells = [
      str(row['batch']),
      str(row['context']),
      f'{row["weight_bytes"] / 1e9:.3f}',
      f'{row["cache_bytes"] / 1e9:.3f}',
      'yes' if row['fits'] else 'NO',
      f'{1e3 * plain:.3f}',
    ]
    if options.draft is not None:
      cells.append(f'{1e3 * row["seconds_draft"]:.3f}')
    cells += [f'{row["seconds_verify"][n] / plain:.2f}' for n in _WIDTHS[1:]]
    flat = row['flat_width']
    cells.append('any width' if flat is None else f'{flat} rows')
    cells += [f'{x["K"]}, {x["speedup"]:.2f}' for x in row['best']]
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join(lines)


def define_flags(values: flags.FlagValues):
  string = lambda name, default, text: flags.DEFINE_string(
    name, default, text, flag_values=values
  )
  many = lambda name, default, text: flags.DEFINE_list(
    name, default, text, flag_values=values
  )
  enum = lambda name, default, allowed, text: flags.DEFINE_enum(
    name, default, allowed, text, flag_values=values
  )
  string('target', None, 'A published shape, or a config.json.')
  string('draft', None, 'Likewise; if not given, drafts cost nothing.')
  enum('dtype', 'bfloat16', ['bfloat16', 'float32'], 'Of weights and cache.')
  schemes = list(quantize.SCHEMES)
  enum('quantize', 'none', schemes, 'int8: weights, and the rate of products.')
  enum('draft_quantize', None, schemes, 'If not as --quantize.')
  enum('device', 'h100', list(chips.CHIPS), 'What the makers say it can do.')
  flags.DEFINE_boolean(
    'measure',
    False,
    'Measure the device at hand instead: a large copy or sum, and products.',
    flag_values=values,
  )
  many('acceptance', '0.6,0.8,0.9', 'Probabilities that a draft is accepted.')
  many('batch_sizes', '1,4,16,64', 'Rows decoded side by side.')
  many('contexts', '1024,8192', 'Tokens in the cache of each row.')
  flags.DEFINE_integer(
    'max_draft_tokens', 16, 'The largest K that is tried.', flag_values=values
  )
  string('json_out', None, 'Write everything to this file.')


FLAG_GROUPS = (('Roofline', define_flags),)


def options_from_flags(values: flags.FlagValues) -> Options:
  def numbers(name: str, kind: Callable) -> tuple:
    try:
      found = tuple(kind(item) for item in values[name].value)
    except ValueError:
      found = ()
    if not found:
      raise ValueError(
        f'--{name} must be numbers joined by commas, got '
        f'{",".join(values[name].value)!r}.'
      )
    return found

  if not values.target:
    raise ValueError('--target must name a model; --help says how.')
  if values.measure and values['device'].present:
    raise ValueError('--measure and --device exclude each other; drop one.')
  if values.draft_quantize and not values.draft:
    raise ValueError('--draft_quantize needs --draft.')
  return Options(
    target=values.target,
    draft=values.draft,
    dtype=values.dtype,
    quantize=values.quantize,
    draft_quantize=values.draft_quantize or values.quantize,
    chip=None if values.measure else values.device,
    acceptance=numbers('acceptance', float),
    batch_sizes=numbers('batch_sizes', int),
    contexts=numbers('contexts', int),
    max_draft_tokens=values.max_draft_tokens,
    json_out=values.json_out,
  )


def main(values: flags.FlagValues):
  options = options_from_flags(values)
  rates = None
  if options.chip is not None:
    chip = chips.CHIPS[options.chip]
  else:
    is_cpu = jax.default_backend() == 'cpu'
    with Progress('measuring the device'):
      chip, rates = measure_chip.measure(
        2**28 if is_cpu else 2**31, 1024 if is_cpu else 8192
      )
  rows = table(options, chip)
  if options.json_out is not None:
    report = {
      'config': options,
      'environment': surroundings.environment(),
      'chip': chip,
      'matrix_rates': rates,
      'rows': rows,
    }
    text_files.write_json(options.json_out, report)
  print(markdown(options, chip, rows))


if __name__ == '__main__':
  sys.exit(script.run_main(main, FLAG_GROUPS))

r"""Times the parts that steps are made of, each alone.

  python experiments/microbench.py --parts=products,attention --json_out=x.json

products: [rows, in] by [out, in], as the layers make them, in three types;
kernels: those of specjax beside XLA, where they are built; attention: a layer
without a feed-forward to speak of, by slots and by text; layer: a whole one, in
int8, whose weights partly stay in the processor's caches; sampling: the
transforms of a law over a large vocabulary; cache: writing new rows into one.
The table of medians goes to stdout, everything to --json_out. Compare within
one run: another minute has another clock.
"""

import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import script, surroundings, text_files
from experiments.progress import Progress
from specjax import ranking, sampling
from specjax.kernels import products as kernels
from specjax.models import config, layers, quantize, slots
from specjax.sampling import SamplingOptions

_CALL_SECONDS = 0.05
_NUM_MATRICES = 8  # In turn, so that none stays in a CPU's caches.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """What is timed; `QUICK` only shows that it runs.

  Attributes:
    shape: [out, in] of the products.
    rows: of the products.
    slots: (slots of a cache, tokens in it).
    attention_rows: new tokens of an attention.
    heads: query heads, key-value heads, head size.
    vocab_size: of the sampled laws.
    sampling_rows: laws at once.
    num_calls: timed calls of each.
  """

  shape: tuple[int, int] = (8960, 1536)
  rows: tuple[int, ...] = (1, 2, 4, 6, 8, 16)
  slots: tuple[tuple[int, int], ...] = (
    (256, 200),
    (1024, 200),
    (4096, 200),
    (4096, 3000),
  )
  attention_rows: tuple[int, ...] = (1, 6)
  heads: tuple[int, int, int] = (12, 2, 128)
  vocab_size: int = 151936
  sampling_rows: tuple[int, ...] = (1, 6)
  num_calls: int = 5


QUICK = Sizes(
  shape=(64, 32),
  rows=(1, 2),
  slots=((256, 20),),
  attention_rows=(2,),
  heads=(4, 2, 8),
  vocab_size=512,
  sampling_rows=(2,),
  num_calls=2,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """Something to time.

  Attributes:
    part: a key of `PARTS`.
    name: what it is, with its sizes.
    call: jitted; called with `arguments`.
    arguments: its arrays.
    num_inside: how often one call does it.
    keeps: the result is the first argument of the next call (donated).
  """

  part: str
  name: str
  call: Callable
  arguments: tuple
  num_inside: int = 1
  keeps: bool = False


def products(sizes: Sizes) -> Iterator[Case]:
  """Products as the layers make them; int8 rounds its rows as well."""
  num_out, num_in = sizes.shape
  for dtype in ('int8', 'bfloat16', 'float32'):
    key = jax.random.key(0)
    plain = [
      jax.random.normal(k, sizes.shape, jnp.bfloat16)
      for k in jax.random.split(key, _NUM_MATRICES)
    ]
    if dtype == 'int8':
      weights = [quantize.quantize_weight(w) for w in plain]
    else:
      weights = [w.astype(dtype) for w in plain]
    x_dtype = 'float32' if dtype == 'float32' else 'bfloat16'
    for rows in sizes.rows:
      x_1TI = jnp.ones((1, rows, num_in), x_dtype)

      @jax.jit
      def call(x_1TI, weights):
        return [layers.dense(x_1TI, w, dtype=jnp.float32) for w in weights]

      yield Case(
        part='products',
        name=f'{dtype} {rows} x {num_in} by {num_out}',
        call=call,
        arguments=(x_1TI, weights),
        num_inside=_NUM_MATRICES,
      )


def kernel_products(sizes: Sizes) -> Iterator[Case]:
  """The kernels of specjax, each beside what XLA makes of its product.

  Nothing where this installation has none.
  """
  if not kernels.is_available():
    return
  cases = itertools.product(
    (sizes.shape, sizes.shape[::-1]),
    (
      ('int8', kernels.int8_product, kernels.pure_int8_product),
      ('bfloat16', kernels.bfloat16_product, kernels.pure_bfloat16_product),
    ),
  )
  for (num_out, num_in), (dtype, own, pure) in cases:
    weights = [
      jnp.full((num_out, num_in), i + 1, dtype) for i in range(_NUM_MATRICES)
    ]
    for rows in sizes.rows:
      for name, product in (('kernel', own), ('XLA', pure)):

        @jax.jit
        def call(x_MI, weights, product=product):
          return [product(x_MI, weight_OI) for weight_OI in weights]

        yield Case(
          part='kernels',
          name=f'{name}, {dtype} {rows} x {num_in} by {num_out}',
          call=call,
          arguments=(jnp.ones((rows, num_in), dtype), weights),
          num_inside=_NUM_MATRICES,
        )


def attention(sizes: Sizes) -> Iterator[Case]:
  """A pass through one layer whose feed-forward is as small as can be."""
  return _layer_passes('attention', sizes, ffn_dim=8)


def layer(sizes: Sizes) -> Iterator[Case]:
  """A pass through one whole layer, in int8."""
  ffn_dim = sizes.shape[0]
  return _layer_passes('layer', sizes, ffn_dim=ffn_dim, scheme='int8')


def _layer_passes(
  part: str, sizes: Sizes, *, ffn_dim: int, scheme: str = 'none'
) -> Iterator[Case]:
  heads, kv_heads, head_dim = sizes.heads
  settings = {
    'model_type': 'llama',
    'vocab_size': 16,
    'hidden_size': heads * head_dim,
    'intermediate_size': ffn_dim,
    'num_hidden_layers': 1,
    'num_attention_heads': heads,
    'num_key_value_heads': kv_heads,
    'max_position_embeddings': 8192,
    'hidden_act': 'silu',
    'rms_norm_eps': 1e-5,
    'rope_theta': 10000.0,
    'tie_word_embeddings': True,
  }
  model = config.config_from_hf(settings, dtype='bfloat16', quantize=scheme)
  params = model.init(jax.random.key(0))

  @functools.partial(jax.jit, donate_argnums=0)
  def call(kept, params, tokens_1T, length_1):
    hidden, cache = model.apply(params, tokens_1T, kept[0])
    cache = model.keep(cache, length_1, None, jnp.zeros_like(length_1))
    # Without the outcome nothing behind the written keys would be computed.
    return cache, hidden.last_BTD

  for num_slots, length in sizes.slots:
    for rows in sizes.attention_rows:
      length_1 = jnp.full(1, length, jnp.int32)
      cache = model.init_cache(1, num_slots, max_rewind=rows)
      cache = model.keep(cache, length_1, None, jnp.zeros_like(length_1))
      tokens_1T = jnp.zeros((1, rows), jnp.int32)
      outcome = jnp.zeros((1, rows, heads * head_dim), model.dtype)
      yield Case(
        part=part,
        name=f'{rows} rows, {length} of {num_slots} slots',
        call=call,
        arguments=((cache, outcome), params, tokens_1T, length_1),
        keeps=True,
      )


def transforms(sizes: Sizes) -> Iterator[Case]:
  """What stands between logits and a token, setting by setting."""
  settings = {
    'greedy': SamplingOptions(),
    'temperature': SamplingOptions(temperature=0.7),
    'top-k': SamplingOptions(temperature=0.7, top_k=50),
    'top-p': SamplingOptions(temperature=0.7, top_p=0.9),
    'min-p': SamplingOptions(temperature=0.7, min_p=0.05),
    'top-k and top-p': SamplingOptions(temperature=0.7, top_k=50, top_p=0.9),
  }

  @jax.jit
  def law(logits_1NV, rows):
    return sampling.transform(rows, logits_1NV, None)

  @jax.jit
  def noise(logits_1NV, key):
    shape = logits_1NV.shape
    return ranking.best(logits_1NV + jax.random.gumbel(key, shape))

  @jax.jit
  def argmax(logits_1NV):
    return jnp.argmax(logits_1NV, axis=-1)

  @jax.jit
  def sort(logits_1NV):
    return jnp.sort(logits_1NV, axis=-1)

  for rows in sizes.sampling_rows:
    logits_1NV = 3 * jax.random.normal(
      jax.random.key(0), (1, rows, sizes.vocab_size)
    )
    where = f'{rows} x {sizes.vocab_size}'
    for name, options in settings.items():
      yield Case(
        part='sampling',
        name=f'{name}, {where}',
        call=law,
        arguments=(
          logits_1NV,
          sampling.stack_options([options], sizes.vocab_size),
        ),
      )
    yield Case(
      part='sampling',
      name=f'Gumbel noise and the best, {where}',
      call=noise,
      arguments=(logits_1NV, jax.random.key(1)),
    )
    for name, call in (
      ('the best', jax.jit(ranking.best)),
      ("XLA's arg-max, for comparison", argmax),
      ('a full sort, for comparison', sort),
    ):
      yield Case(
        part='sampling',
        name=f'{name}, {where}',
        call=call,
        arguments=(logits_1NV,),
      )


def cache_writes(sizes: Sizes) -> Iterator[Case]:
  """New rows at a row's own slots, into one side of one layer's cache."""
  _, kv_heads, head_dim = sizes.heads

  @functools.partial(jax.jit, donate_argnums=0)
  def call(cache_1GSC, new_1GTC, slot_1T):
    return slots.write(cache_1GSC, new_1GTC, slot_1T)

  for num_slots, length in sizes.slots:
    for rows in sizes.attention_rows:
      shape = 1, kv_heads, num_slots, head_dim
      slot_1T = length + jnp.arange(rows, dtype=jnp.int32)[None]
      yield Case(
        part='cache',
        name=f'{rows} rows into {num_slots} slots',
        call=call,
        arguments=(
          jnp.zeros(shape, jnp.bfloat16),
          jnp.ones((1, kv_heads, rows, head_dim), jnp.bfloat16),
          slot_1T,
        ),
        keeps=True,
      )


PARTS = {
  'products': products,
  'kernels': kernel_products,
  'attention': attention,
  'layer': layer,
  'sampling': transforms,
  'cache': cache_writes,
}


def time_case(case: Case, num_calls: int) -> dict[str, Any]:
  """Milliseconds of one of what the case does; the first call compiles."""
  first, rest = case.arguments[0], case.arguments[1:]

  def call(repeats: int) -> float:
    nonlocal first
    clock = time.perf_counter()
    for _ in range(repeats):
      result = case.call(first, *rest)
      first = result if case.keeps else first
    jax.block_until_ready(result)
    return time.perf_counter() - clock

  call(1)
  repeats = int(np.clip(_CALL_SECONDS / call(1), 1, 1000))
  scale = 1e3 / (repeats * case.num_inside)
  found = [call(repeats) * scale for _ in range(num_calls)]
  return {
    'part': case.part,
    'name': case.name,
    'milliseconds': float(np.median(found)),
    'least': min(found),
    'most': max(found),
    'num_calls': num_calls,
  }


def run(parts: tuple[str, ...], sizes: Sizes) -> list[dict[str, Any]]:
  rows = []
  for part in parts:
    with Progress(part) as progress:
      for case in PARTS[part](sizes):
        progress.update(case.name)
        rows.append(time_case(case, sizes.num_calls))
  return rows


def markdown(rows: list[dict[str, Any]]) -> str:
  lines = ['| part | what | ms | least..most |', '|---|---|---|---|']
  for row in rows:
    lines.append(
      f'| {row["part"]} | {row["name"]} | {row["milliseconds"]:.4g} | '
      f'{row["least"]:.4g}..{row["most"]:.4g} |'
    )
  return '\n'.join(lines)


def define_flags(values: flags.FlagValues):
  flags.DEFINE_list(
    'parts', list(PARTS), f'Of {", ".join(PARTS)}.', flag_values=values
  )
  flags.DEFINE_boolean(
    'quick', False, 'Tiny sizes, which say nothing.', flag_values=values
  )
  flags.DEFINE_string(
    'json_out', None, 'Write everything to this file.', flag_values=values
  )


FLAG_GROUPS = (('Micro-benchmarks', define_flags),)


def main(values: flags.FlagValues):
  for part in values.parts:
    if part not in PARTS:
      raise ValueError(
        f'--parts must be some of {", ".join(PARTS)}, got {part!r}.'
      )
  if not values.parts:
    raise ValueError(f'--parts must be some of {", ".join(PARTS)}, got none.')
  if values.json_out is not None:
    text_files.check_writable(values.json_out)
  sizes = QUICK if values.quick else Sizes()
  rows = run(tuple(dict.fromkeys(values.parts)), sizes)
  if values.json_out is not None:
    report = {
      'config': {'quick': values.quick, 'sizes': sizes},
      'environment': surroundings.environment(),
      'rows': rows,
    }
    text_files.write_json(values.json_out, report)
  print(markdown(rows))


if __name__ == '__main__':
  sys.exit(script.run_main(main, FLAG_GROUPS))

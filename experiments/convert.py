r"""Converts a model into an orbax folder, tokenizer included.

  python experiments/convert.py --model=model.gguf --out=model.orbax

The folder is a model for --target and --draft: nothing is de-quantised or
renamed when it is loaded. With --quantize=int8 it is half as large as in
bfloat16, and --target needs --quantize=int8 too. A model is a .gguf file, a
folder with config.json and safetensors, an orbax folder, or hf:ORG/NAME.
"""

import dataclasses
import math
import pathlib
import sys

import jax
from absl import flags

from experiments import script
from experiments.progress import Progress
from experiments.run_config import DTYPES
from specjax import sharding
from specjax.models import load
from specjax.models.checkpoints import orbax
from specjax.models.quantize import SCHEMES


def define_flags(values: flags.FlagValues):
  flags.DEFINE_string('model', None, 'What to convert.', flag_values=values)
  flags.DEFINE_string(
    'out',
    None,
    'The folder to write; it is absent or empty.',
    flag_values=values,
  )
  flags.DEFINE_enum(
    'dtype', 'bfloat16', list(DTYPES), 'Of the weights.', flag_values=values
  )
  flags.DEFINE_enum(
    'quantize',
    'none',
    list(SCHEMES),
    'int8: matrices are rounded to it; --dtype is of the rest.',
    flag_values=values,
  )


FLAG_GROUPS = (('Conversion', define_flags),)


def convert(model: str, out: str, dtype: str, quantize: str = 'none') -> int:
  """Writes the folder, whole or not at all; returns its parameters' number."""
  path = pathlib.Path(out)
  orbax.check_free(path)
  with Progress(f'loading {model}'):
    loaded = load.load(model, dtype, quantize)
  with Progress(f'writing {out}'):
    load.save(path, loaded)
  # The scales of int8 weights are no parameters of the model.
  specs = dataclasses.replace(loaded.model, quantize='none').param_specs()
  leaves = jax.tree.leaves(specs, is_leaf=sharding.is_spec)
  return sum(math.prod(spec.shape) for spec in leaves)


def main(values: flags.FlagValues):
  for name in ('model', 'out'):
    if not values[name].value:
      raise ValueError(f'--{name} must be given; --help says how.')
  num_params = convert(values.model, values.out, values.dtype, values.quantize)
  kind = values.dtype if values.quantize == 'none' else values.quantize
  print(f'{values.out}: {num_params:,} parameters in {kind}')


if __name__ == '__main__':
  sys.exit(script.run_main(main, FLAG_GROUPS))

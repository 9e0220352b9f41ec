r"""Converts a model into an orbax folder, tokenizer included.

  python experiments/convert.py --model=model.gguf --out=model.orbax

The folder is a model for --target and --draft: nothing is de-quantised or
renamed when it is loaded. A model is a .gguf file, a folder with config.json
and safetensors, an orbax folder, or hf:ORG/NAME.
"""

import pathlib
import sys

import jax
from absl import flags

from experiments import common
from experiments.run_config import DTYPES
from specjax.models import load
from specjax.models.checkpoints import orbax


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


FLAG_GROUPS = (('Conversion', define_flags),)


def convert(model: str, out: str, dtype: str) -> int:
  """Writes the folder, whole or not at all; returns its parameters' number."""
  path = pathlib.Path(out)
  orbax.check_free(path)
  with common.Progress(f'loading {model}'):
    loaded = load.load(model, dtype)
  with common.Progress(f'writing {out}'):
    load.save(path, loaded)
  return sum(leaf.size for leaf in jax.tree.leaves(loaded.params))


def main(values: flags.FlagValues):
  for name in ('model', 'out'):
    if not values[name].value:
      raise ValueError(f'--{name} must be given; --help says how.')
  num_params = convert(values.model, values.out, values.dtype)
  print(f'{values.out}: {num_params:,} parameters in {values.dtype}')


if __name__ == '__main__':
  sys.exit(common.run_main(main, FLAG_GROUPS))

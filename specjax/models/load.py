"""From a model's name to a model, its parameters and its tokenizer."""

import dataclasses
import os
import pathlib
from typing import Any

from specjax import atomic, gguf_tokenizer, tokenizer_files, tokenizers
from specjax.mesh import View, place
from specjax.models.base import LanguageModel
from specjax.models.checkpoints import base as checkpoints
from specjax.models.checkpoints import gguf, orbax, safetensors
from specjax.models.config import config_from_hf
from specjax.models.quantize import check_scheme
from specjax.shapes import Params

# Trained by experiments/train.py; MODEL_CARD.md there says how.
_DEMO = pathlib.Path(__file__).with_name('demo')
DEMO_MODELS = ('demo:target', 'demo:draft')
DEMO_HEADS = ('demo:medusa', 'demo:mtp')


@dataclasses.dataclass(frozen=True)
class Loaded:
  """A model ready to run.

  Attributes:
    name: as it was asked for.
    model: static.
    params: its parameters.
    tokenizer: its tokenizer.
    stop_ids: ids at which the model says it is done.
    config: in the form of a config.json; None for a model built in code.
  """

  name: str
  model: LanguageModel
  params: Params
  tokenizer: tokenizers.Tokenizer
  stop_ids: tuple[int, ...]
  config: dict[str, Any] | None = None


def load(
  name: str, dtype: str, quantize: str = 'none', view: View | None = None
) -> Loaded:
  """Loads a model by name.

  Args:
    name: 'demo:target' or 'demo:draft' (they come along), a .gguf
      file, a folder with config.json and safetensors, an orbax folder, or
      'hf:ORG/NAME' through huggingface_hub, its cache and its offline mode.
    dtype: 'float32' or 'bfloat16', of weights, activations and cache.
    quantize: 'int8' rounds every matrix when it is loaded; 'none' leaves it.
    view: of the mesh on which the model is placed; tensors go straight into
      their shards. None is one device.

  Raises:
    ValueError: one sentence on what is wrong with the name or the files.
  """
  check_scheme('quantize', quantize)
  path = _find(name)
  if path.is_dir():
    return _load_folder(name, path, dtype, quantize, view)
  return _load_gguf(name, path, dtype, quantize, view)


def load_tokenizer(name: str) -> tokenizers.Tokenizer:
  """The tokenizer of a model by name, without the model.

  Args:
    name: as for `load`.

  Raises:
    ValueError: one sentence on what is wrong with the name or the files.

  >>> load_tokenizer('demo:target').encode('hi', add_special=True)
  [256, 104, 105]
  """
  path = _find(name)
  if path.is_dir():
    return tokenizer_files.read_tokenizer(path)
  return gguf_tokenizer.from_gguf(gguf.read_metadata(path))


def _find(name: str) -> pathlib.Path:
  """The file or folder of a model."""
  if name.startswith('demo:'):
    return demo_folder(name)
  if name.startswith('hf:'):
    return _download(name)
  path = pathlib.Path(name)
  if not path.exists():
    raise ValueError(
      f'no such model {name!r}: allowed are demo:target, demo:draft, a .gguf '
      'file, a folder, or hf:ORG/NAME.'
    )
  return path


def demo_folder(
  name: str, names: tuple[str, ...] = DEMO_MODELS
) -> pathlib.Path:
  """Where what comes along lies.

  Args:
    name: 'demo:target' and the like.
    names: those that are allowed here.

  Raises:
    ValueError: it is not one of them.
  """
  if name not in names:
    raise ValueError(
      f'no such demo model {name!r}: allowed are {", ".join(names)}.'
    )
  return _DEMO / name.removeprefix('demo:')


def head_folder(name: str) -> pathlib.Path:
  """Where a head lies: one of `DEMO_HEADS`, or a folder."""
  if name.startswith('demo:'):
    return demo_folder(name, DEMO_HEADS)
  return pathlib.Path(name)


def _download(name: str) -> pathlib.Path:
  import huggingface_hub
  from huggingface_hub import errors

  repository = name.removeprefix('hf:')
  try:
    folder = huggingface_hub.snapshot_download(
      repository,
      allow_patterns=['*.safetensors', '*.json', '*.jinja'],
      ignore_patterns=['*/*'],
    )
  except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
    reason = str(error).strip().splitlines()[0]
    raise ValueError(f'cannot download {name!r}: {reason}') from None
  return pathlib.Path(folder)


def _placed(model: LanguageModel, view: View | None) -> LanguageModel:
  if view is None:
    return model
  return dataclasses.replace(model, placement=place(model.param_specs(), view))


def _load_gguf(
  name: str,
  path: pathlib.Path,
  dtype: str,
  quantize: str,
  view: View | None,
) -> Loaded:
  checkpoint = gguf.read_gguf(path)
  tokenizer = gguf_tokenizer.from_gguf(gguf.read_metadata(path))
  return _build(name, checkpoint, tokenizer, dtype, quantize, view)


def _load_folder(
  name: str,
  path: pathlib.Path,
  dtype: str,
  quantize: str,
  view: View | None,
) -> Loaded:
  tokenizer = tokenizer_files.read_tokenizer(path)
  if (path / orbax.SETTINGS_FILE).exists():
    restored = orbax.restore(path, dtype, quantize, view)
    return Loaded(
      name,
      restored.model,
      restored.params,
      tokenizer,
      restored.stop_ids,
      restored.config,
    )
  checkpoint = safetensors.read_folder(path)
  return _build(name, checkpoint, tokenizer, dtype, quantize, view)


def _build(
  name: str,
  checkpoint: checkpoints.Checkpoint,
  tokenizer: tokenizers.Tokenizer,
  dtype: str,
  quantize: str,
  view: View | None,
) -> Loaded:
  num_rows = checkpoint.config['vocab_size']
  model = config_from_hf(
    checkpoint.config, min(tokenizer.vocab_size, num_rows), dtype, quantize
  )
  model = _placed(model, view)
  params = checkpoints.load_params(model, checkpoint)
  stop_ids = tuple(sorted({*checkpoint.stop_ids, *tokenizer.stop_ids}))
  return Loaded(name, model, params, tokenizer, stop_ids, checkpoint.config)


def save(path: str | os.PathLike, loaded: Loaded):
  """Writes an orbax folder, tokenizer included, that `load` accepts.

  Everything goes to a temporary folder beside the target, which is renamed
  when complete.

  Args:
    path: must not exist, or be an empty folder.
    loaded: of any kind that comes from files.

  Raises:
    ValueError: if `path` holds something, or the model or its tokenizer cannot
      be saved.
  """
  path = pathlib.Path(path).absolute()
  orbax.check_free(path)
  if loaded.config is None:
    raise ValueError(f'{loaded.name} is built in code and cannot be saved.')
  with atomic.replacing(path) as unfinished:
    orbax.save(
      unfinished,
      loaded.config,
      loaded.params,
      vocab_size=loaded.model.vocab_size,
      stop_ids=loaded.stop_ids,
      quantize=loaded.model.quantize,
    )
    tokenizer_files.save_tokenizer(unfinished, loaded.tokenizer)

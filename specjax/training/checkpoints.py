"""Training states on disk: whole or not at all, and never edited unnoticed.

  DIRECTORY/step-00000200/
    checkpoint.json   the step, what was run, and a hash of every other file
    state/            orbax's files: parameters and optimizer

A folder is written under another name and renamed when it is complete: a run
that is killed leaves none that is half written. Orbax would read a changed byte
as a weight, so every file is hashed. Keys and the data's position follow from
the step and the seed among what was run.
"""

import dataclasses
import hashlib
import json
import pathlib
import re
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp

from specjax import atomic
from specjax.training.step import TrainState

_FILE = 'checkpoint.json'
_FORMAT = 'specjax training checkpoint'
_VERSION = 1
_NAME = re.compile(r'step-(\d{8})')
_MAX_JSON_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
  """The checkpoints of one run.

  Attributes:
    directory: made if it is missing.
    run: a hash of everything the parameters depend on: objective, optimizer,
      seed, data. A run goes on from its own checkpoints only.
    num_kept: the newest so many stay.

  Raises:
    ValueError: `num_kept` is below 1.
  """

  directory: pathlib.Path
  run: str
  num_kept: int = 2

  def __post_init__(self):
    if self.num_kept < 1:
      raise ValueError(f'num_kept must be >= 1, got {self.num_kept}.')

  def steps(self) -> list[int]:
    """The steps of which there is a checkpoint, ascending."""
    if not self.directory.is_dir():
      return []
    found = (_NAME.fullmatch(p.name) for p in self.directory.iterdir())
    return sorted(int(match[1]) for match in found if match)

  def save(self, state: TrainState):
    """Writes the state's checkpoint and removes those too old to be kept."""
    step = int(state.step)
    folder = self._folder(step)
    # One run writes here: what a killed one has left is nobody's.
    for left in self.directory.glob('.step-*.unfinished'):
      shutil.rmtree(left, ignore_errors=True)
    self.directory.mkdir(parents=True, exist_ok=True)
    with atomic.replacing(folder) as unfinished:
      unfinished.mkdir()
      with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(unfinished / 'state', state)
      about = {
        'format': _FORMAT,
        'version': _VERSION,
        'step': step,
        'run': self.run,
        'files': _hashes(unfinished),
      }
      text = json.dumps(about, indent=1) + '\n'
      (unfinished / _FILE).write_text(text, encoding='utf-8')
      shutil.rmtree(folder, ignore_errors=True)
    for old in self.steps()[: -self.num_kept]:
      shutil.rmtree(self._folder(old))

  def restore(self, like: TrainState) -> TrainState | None:
    """The newest state, bit for bit; None if there is none.

    Args:
      like: a state of this run, for shapes, dtypes and placement; it may be
        abstract.

    Raises:
      ValueError: the newest checkpoint is damaged or of another run. The
        sentence names the one before it, which a person may go back to.
    """
    steps = self.steps()
    if not steps:
      return None
    folder = self._folder(steps[-1])
    try:
      if _whole(folder, steps[-1]).get('run') == self.run:
        return _load(folder, steps[-1], like)
    except ValueError as error:
      advice = f'remove {folder} to '
      advice += f'go on from step {steps[-2]}' if steps[1:] else 'begin anew'
      raise ValueError(f'{str(error).rstrip(".")}; {advice}.') from None
    raise ValueError(
      f'{folder} is of a run with other settings, another objective or other '
      'data; this one needs a folder of its own.'
    )

  def _folder(self, step: int) -> pathlib.Path:
    return self.directory / f'step-{step:08d}'


def _whole(folder: pathlib.Path, step: int) -> dict[str, Any]:
  """What a checkpoint says of itself, once every file is as it was written."""
  about = _read(folder / _FILE)
  if about.get('format') != _FORMAT or about.get('version') != _VERSION:
    raise ValueError(
      f'{folder} must be a {_FORMAT} of version {_VERSION}, it is not.'
    )
  files, got = about.get('files'), _hashes(folder)
  if files != got or about.get('step') != step:
    files = files if isinstance(files, dict) else {}
    wrong = sorted(k for k in {*files, *got} if files.get(k) != got.get(k))
    raise ValueError(
      f'{folder} is damaged, not as it was written: '
      f'{", ".join(wrong[:5]) or _FILE}.'
    )
  return about


def _load(folder: pathlib.Path, step: int, like: TrainState) -> TrainState:
  abstract = jax.tree.map(_abstract, like)
  with ocp.StandardCheckpointer() as checkpointer:
    try:
      state = checkpointer.restore(folder.absolute() / 'state', abstract)
    except Exception as error:  # It raises nothing more precise.
      reason = ' '.join(str(error).split())[:300]
      raise ValueError(f'{folder} cannot be read: {reason}.') from None
  if int(state.step) != step:
    raise ValueError(f'{folder} is damaged: it has step {int(state.step)}.')
  return state


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _read(file: pathlib.Path) -> dict[str, Any]:
  if not file.is_file():
    raise ValueError(f'{file.parent} is damaged: it lacks {file.name}.')
  if file.stat().st_size > _MAX_JSON_BYTES:
    raise ValueError(f'{file} must have at most {_MAX_JSON_BYTES} bytes.')
  try:
    about = json.loads(file.read_text(encoding='utf-8'))
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{file} must be JSON: {error}.') from None
  if not isinstance(about, dict):
    raise ValueError(f'{file} must hold a JSON object.')
  return about


def _hashes(folder: pathlib.Path) -> dict[str, str]:
  """Every file but ours, by its path in the folder."""
  hashes = {}
  for path in sorted(folder.rglob('*')):
    name = path.relative_to(folder).as_posix()
    if path.is_file() and name != _FILE:
      with path.open('rb') as file:
        hashes[name] = hashlib.file_digest(file, 'sha256').hexdigest()
  return hashes

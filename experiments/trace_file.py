"""The format of recorded runs: arrays that NumPy alone can read.

  data = numpy.load('run.npz'); data['law_p'] ...

Three tables lie side by side. Laws are those of the models before temperature
and filters; positions are the emitted tokens, and the laws at each stand behind
the committed text before it. They include every draft that was tested; of a
draft behind a rejection the id alone is kept.

  request  R  prompt_length, num_tokens, seed, temperature, max_new_tokens,
              is_stopped (at a stop id or a stop string)
  prompt      prompt_token, the prompts one after the other
  position P  the tokens of request 0, then of request 1, ...: token, step,
              source (1 accepted, 2 correction, 3 bonus), num_draft (at a step's
              first token), chosen_p and chosen_q (log-probabilities of the
              token as it was sampled, after every setting), entropy_p and
              entropy_q (nats), law_id, law_p and law_q [P, M] (the ids with the
              largest max(p, q), and their log-probabilities), tail_p and tail_q
              (probability of all other ids). A proposer that is no language
              model has NaN for q.
  step     S  step_request, step_index, draft [S, K], drafted, accepted,
              emitted, seconds (of the batch's step, the host's time included)

`about` is a JSON text, as UTF-8 bytes: version, config, environment,
vocab_size, num_draft_tokens, verify, and the options of every request.
"""

import dataclasses
import json
import math
import os
import pathlib
import zipfile
from typing import Any

import numpy as np

VERSION = 2
_MOST_IDS, _MOST_DRAFTS = 1 << 24, 64
_MOST_BYTES = 1 << 34  # Of all arrays together.

_REQUEST = {
  'prompt_length': np.int32,
  'num_tokens': np.int32,
  'seed': np.uint32,
  'temperature': np.float32,
  'max_new_tokens': np.int32,
  'is_stopped': np.bool_,
}
_POSITION = {
  'token': np.int32,
  'step': np.int32,
  'source': np.int8,
  'num_draft': np.int8,
  'chosen_p': np.float32,
  'chosen_q': np.float32,
  'entropy_p': np.float32,
  'entropy_q': np.float32,
  'tail_p': np.float32,
  'tail_q': np.float32,
}
_LAW = {'law_id': np.int32, 'law_p': np.float32, 'law_q': np.float32}
_STEP = {
  'step_request': np.int32,
  'step_index': np.int32,
  'drafted': np.int32,
  'accepted': np.int32,
  'emitted': np.int32,
  'seconds': np.float32,
}
STEP_NAMES = tuple(_STEP)
DTYPES = {
  **_REQUEST,
  **_POSITION,
  **_LAW,
  **_STEP,
  'draft': np.int32,
  'prompt_token': np.int32,
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TraceFile:
  """A recorded run.

  Attributes:
    about: the texts and numbers, see above.
    arrays: by name, as above.
  """

  about: dict[str, Any]
  arrays: dict[str, np.ndarray]

  def __getitem__(self, name: str) -> np.ndarray:
    return self.arrays[name]

  @property
  def num_requests(self) -> int:
    return len(self['num_tokens'])

  @property
  def begin(self) -> np.ndarray:
    """Where each request's positions begin, int64 [R]."""
    return _begin(self['num_tokens'])

  @property
  def prompt_begin(self) -> np.ndarray:
    """Where each request's prompt begins in prompt_token, int64 [R]."""
    return _begin(self['prompt_length'])

  def select(self, is_kept_R: np.ndarray) -> 'TraceFile':
    """The trace of some of the requests.

    Args:
      is_kept_R: bool [R].
    """
    is_kept_P = np.repeat(is_kept_R, self['num_tokens'])
    rows = {
      **dict.fromkeys(_REQUEST, is_kept_R),
      **dict.fromkeys((*_POSITION, *_LAW), is_kept_P),
      **dict.fromkeys((*_STEP, 'draft'), is_kept_R[self['step_request']]),
      'prompt_token': np.repeat(is_kept_R, self['prompt_length']),
    }
    arrays = {name: self[name][kept] for name, kept in rows.items()}
    new_index_R = np.cumsum(is_kept_R) - 1
    arrays['step_request'] = new_index_R[arrays['step_request']].astype(
      np.int32
    )
    options = self.about['options']
    kept = [options[i] for i in np.flatnonzero(is_kept_R)]
    return TraceFile(about={**self.about, 'options': kept}, arrays=arrays)


def _begin(num: np.ndarray) -> np.ndarray:
  return np.cumsum(num, dtype=np.int64) - num


def save(path: str, trace: TraceFile):
  """Writes all of a trace or nothing."""
  target = pathlib.Path(os.path.realpath(path))
  temporary = target.with_name(f'.{target.name}.{os.getpid()}.tmp')
  about = json.dumps({'version': VERSION, **trace.about}).encode('utf-8')
  try:
    with open(temporary, 'wb') as file:
      np.savez_compressed(
        file, about=np.frombuffer(about, np.uint8), **trace.arrays
      )
    os.replace(temporary, target)
  finally:
    temporary.unlink(missing_ok=True)


def load(path: str) -> TraceFile:
  """Reads a trace; sizes are checked before memory is taken.

  Raises:
    OSError: the file cannot be opened.
    ValueError: it is no trace, of another version, or its tables do not fit.
  """
  with open(path, 'rb') as file:
    try:
      with zipfile.ZipFile(file) as archive:
        total = sum(_num_bytes(archive, name) for name in archive.namelist())
      if total <= _MOST_BYTES:
        file.seek(0)
        with np.load(file, allow_pickle=False) as data:
          arrays = {name: data[name] for name in data.files}
        if 'about' not in arrays:
          raise ValueError('it has no array named about')
        about = json.loads(arrays.pop('about').tobytes())
    except Exception as error:
      # Damaged bytes find their way into every kind of it, in three libraries.
      reason = ' '.join(str(error).split()) or type(error).__name__
      raise ValueError(f'{path} is no trace: {reason:.200}.') from None
  if total > _MOST_BYTES:
    raise ValueError(
      f'{path} holds {total} bytes of arrays; at most {_MOST_BYTES} are read.'
    )
  version = about.get('version') if isinstance(about, dict) else None
  if version != VERSION:
    raise ValueError(
      f'{path} must be a trace of version {VERSION}, got {version!r}.'
    )
  _check(path, about, arrays)
  return TraceFile(about=about, arrays=arrays)


def _num_bytes(archive: zipfile.ZipFile, name: str) -> int:
  """What an array takes, by its own header; no more than the file has.

  Raises:
    ValueError: its header says more than there is, or is no header.
  """
  header = np.lib.format
  with archive.open(name) as file:
    version = header.read_magic(file)
    read = {
      (1, 0): header.read_array_header_1_0,
      (2, 0): header.read_array_header_2_0,
    }
    if version not in read:
      raise ValueError(f'{name} has format {version}')
    shape, _, dtype = read[version](file)
  size = math.prod(shape) * dtype.itemsize
  if size > archive.getinfo(name).file_size:
    raise ValueError(f'{name} is shorter than its header says')
  return size


def _check(path: str, about: dict[str, Any], arrays: dict[str, np.ndarray]):
  """Raises ValueError unless every array is there and fits the others."""

  def need(ok: bool, what: str):
    if not ok:
      raise ValueError(f'{path} is no whole trace: {what}.')

  for name, dtype in DTYPES.items():
    need(name in arrays, f'{name} is missing')
    need(arrays[name].dtype == dtype, f'{name} must be {np.dtype(dtype)}')
    num_axes = 2 if name in (*_LAW, 'draft') else 1
    need(arrays[name].ndim == num_axes, f'{name} must have {num_axes} axes')
  for name in ('config', 'environment'):
    need(isinstance(about.get(name), dict), f'{name} must be an object')
  need(isinstance(about.get('verify'), str), 'verify must be a text')
  config = about['config']
  sizes = {name: about.get(name) for name in ('num_draft_tokens', 'vocab_size')}
  if config.get('proposer') == 'ngram':
    sizes |= {name: config.get(name) for name in ('ngram_min', 'ngram_max')}
  for name, size in sizes.items():
    need(type(size) is int and size > 0, f'{name} must be a whole number > 0')
  need(about['vocab_size'] <= _MOST_IDS, f'vocab_size must be <= {_MOST_IDS}')
  need(
    about['num_draft_tokens'] <= _MOST_DRAFTS,
    f'num_draft_tokens must be <= {_MOST_DRAFTS}',
  )
  for name in ('token', 'prompt_token', 'law_id'):
    is_id = (arrays[name] >= 0) & (arrays[name] < about['vocab_size'])
    need(bool(np.all(is_id)), f'{name} must be in the vocabulary')
  options = about.get('options')
  need(
    isinstance(options, list)
    and len(options) == len(arrays['num_tokens'])
    and all(isinstance(item, dict) for item in options),
    'options must be one object per request',
  )
  for table in (_REQUEST, _POSITION, _STEP):
    length = len(arrays[next(iter(table))])
    for name in table:
      need(arrays[name].shape == (length,), f'{name} must have {length} rows')
  for name, of in (('num_tokens', 'token'), ('prompt_length', 'prompt_token')):
    need(bool(np.all(arrays[name] >= 0)), f'{name} must not be negative')
    total = int(arrays[name].sum(dtype=np.int64))
    need(arrays[of].shape == (total,), f'{of} must have {total} rows')
  num_positions = len(arrays['token'])
  is_row = arrays['step_request'] < len(arrays['num_tokens'])
  need(
    bool(np.all(is_row & (arrays['step_request'] >= 0))),
    'step_request must name requests',
  )
  width = arrays['law_id'].shape[-1]
  for name in _LAW:
    need(
      arrays[name].shape == (num_positions, width),
      f'{name} must be [{num_positions}, {width}]',
    )
  need(width > 0, 'law_id must have a column')
  need(
    arrays['draft'].shape
    == (len(arrays['drafted']), about['num_draft_tokens']),
    'draft must be [steps, K]',
  )
  _check_values(need, arrays)


def _check_values(need, arrays: dict[str, np.ndarray]):
  """Refuses numbers that no run writes."""
  heat = arrays['temperature']
  need(bool(np.all((heat >= 0) & (heat < np.inf))), 'temperature must be >= 0')
  for name in ('law_p', 'law_q', 'chosen_p', 'chosen_q'):
    value = arrays[name]
    # Without a law of the draft there is NaN, and -inf where it has no id.
    is_absent = np.isnan(value) & name.endswith('q')
    need(bool(np.all((value < 1e-3) | is_absent)), f'{name} must be <= 0')
  for name in ('tail_p', 'tail_q'):
    value = arrays[name]
    is_absent = np.isnan(value) & name.endswith('q')
    is_share = (value > -1e-3) & (value < 1 + 1e-3)
    need(bool(np.all(is_share | is_absent)), f'{name} must be in 0..1')
  ids = np.sort(arrays['law_id'], axis=1)
  need(bool(np.all(ids[:, 1:] > ids[:, :-1])), 'law_id must name an id once')
  accepted, drafted = arrays['accepted'], arrays['drafted']
  need(
    bool(
      np.all(
        (0 <= accepted)
        & (accepted <= drafted)
        & (drafted <= arrays['draft'].shape[1])
        & (arrays['emitted'] >= accepted)
      )
    ),
    'accepted must be <= drafted, emitted and K',
  )

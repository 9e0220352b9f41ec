"""What every script does on the host: flags, errors, result files, progress.

A script defines its flags in groups, and `main` takes their parsed values:

  FLAG_GROUPS = (('Model', define_model_flags), ('Sampling', ...))

  def main(values):
    ...

  if __name__ == '__main__':
    sys.exit(common.run_main(main, FLAG_GROUPS))

Each run has flag values of its own: two scripts may define the same flag in
one process, and a test may call `run_main(main, FLAG_GROUPS, ['--seed=1'])`.
"""

import dataclasses
import datetime
import difflib
import json
import math
import os
import pathlib
import platform
import re
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import flax
import jax
import jaxlib
import numpy as np
from absl import flags, logging

import specjax
from experiments import compilation_cache
from specjax import atomic

# A title, and a function that defines the flags under it on the given values.
FlagGroup = tuple[str, Callable[[flags.FlagValues], None]]

BAD_INPUT = 2  # Exit code.
# The extra that each comes with.
OPTIONAL_PACKAGES = {
  'huggingface_hub': 'models',
  'jinja2': 'models',
  'pdoc': 'docs',
  'safetensors': 'models',
  'tokenizers': 'models',
}
_OUT_OF_MEMORY = (
  'not enough memory for these sizes; a smaller model, --batch_size, '
  '--max_length or --dtype may fit.'
)
ROOT = pathlib.Path(__file__).resolve().parents[1]


def run_main(
  main: Callable[[flags.FlagValues], int | None],
  flag_groups: Sequence[FlagGroup],
  argv: Sequence[str] | None = None,
  *,
  keeps_compiled: bool = True,
) -> int:
  """Parses the flags, calls `main`, and turns bad input into one sentence.

  Args:
    main: takes the parsed flag values; may return an exit code. The docstring
      of its module opens the help.
    flag_groups: the script's flags, in the order of the help.
    argv: the arguments without the program's name; None: those of the process.
    keeps_compiled: whether compiled programs are kept for the next start; not
      where compiling is what is looked at.

  Returns:
    The exit code: that of `main` (None is 0), 0 after `--help`, or 2 after a
    sentence on stderr for an unknown flag, a stray argument, a `ValueError` or
    `OSError` from `main`, a lack of memory, or of an optional package. Other
    errors that stem from JAX are bugs: they are raised on, and end the process
    with a traceback and exit code 1.
  """
  # What libraries warn of would stand between the lines that are ours.
  logging.set_verbosity(logging.ERROR)
  module = sys.modules[main.__module__]
  name = os.path.basename(getattr(module, '__file__', None) or 'specjax')
  argv = list(sys.argv[1:] if argv is None else argv)
  values = flags.FlagValues()
  titles = _define(values, flag_groups)
  if any(arg in ('-h', '-help', '--help') for arg in argv):
    print(help_text(module.__doc__ or '', values, titles))
    return 0
  try:
    _parse(values, argv)
    # Processes that share programs compile them together.
    if keeps_compiled and not _is_given(values, 'num_processes'):
      _keep_compiled(name)
    return main(values) or 0
  except BrokenPipeError:
    # Whoever read the output has left. Python would complain once more when
    # it flushes stdout at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
  except (MemoryError, jax.errors.JaxRuntimeError) as error:
    if isinstance(error, MemoryError) or 'RESOURCE_EXHAUSTED' in str(error):
      print(f'{name}: {_OUT_OF_MEMORY}', file=sys.stderr)
      return BAD_INPUT
    raise
  except ModuleNotFoundError as error:
    if error.name not in OPTIONAL_PACKAGES:
      raise
    print(
      f'{name}: this needs the package {error.name}: '
      f"pip install 'specjax[{OPTIONAL_PACKAGES[error.name]}]'.",
      file=sys.stderr,
    )
    return BAD_INPUT
  except (ValueError, OSError, flags.Error) as error:
    if _is_bug(error):
      raise
    print(f'{name}: {sentence(error)}', file=sys.stderr)
    return BAD_INPUT
  except KeyboardInterrupt:
    print(f'{name}: interrupted.', file=sys.stderr)
    return 130


def _is_given(values: flags.FlagValues, name: str) -> bool:
  return name in values and values[name].value is not None


def _keep_compiled(name: str):
  try:
    compilation_cache.use()
  except OSError as error:
    print(
      f'{name}: compiled programs are not kept: {sentence(error)}',
      file=sys.stderr,
    )


def _define(
  values: flags.FlagValues, flag_groups: Sequence[FlagGroup]
) -> dict[str, list[str]]:
  """Defines all flags; returns the names under each title, in order."""
  titles = {}
  for title, define in flag_groups:
    before = set(values)
    define(values)
    titles[title] = [name for name in values if name not in before]
  return titles


def _parse(values: flags.FlagValues, argv: list[str]):
  for index, arg in enumerate(argv, 1):
    try:
      arg.encode('utf-8')
    except UnicodeEncodeError:
      raise ValueError(f'argument {index} is not valid UTF-8.') from None
  try:
    stray = values([sys.argv[0], *argv])[1:]
  except flags.UnrecognizedFlagError as error:
    name = error.flagname
    near = difflib.get_close_matches(name, list(values), n=1)
    advice = f'did you mean --{near[0]}?' if near else '--help lists all.'
    raise ValueError(f'unknown flag --{name}; {advice}') from None
  except flags.IllegalFlagValueError as error:
    raise _in_words(error, values) from None
  if stray:
    raise ValueError(
      f'unexpected argument {stray[0]!r}; flags are written --name=value.'
    )


def _in_words(
  error: flags.IllegalFlagValueError, values: flags.FlagValues
) -> ValueError:
  """What absl says about a value, with what is allowed."""
  found = re.fullmatch('flag --(.*?)=(.*?): .*', str(error), re.DOTALL)
  if found is None or found[1] not in values:
    return ValueError(str(error))
  allowed = _allowed(values[found[1]])
  return ValueError(f'--{found[1]} must be {allowed}, got {found[2]!r}.')


def _allowed(flag: flags.Flag) -> str:
  if flag.boolean:
    return 'true or false'
  choices = getattr(flag.parser, 'enum_values', None)
  if choices:
    return f'one of {", ".join(choices)}'
  return flag.parser.syntactic_help


def _is_bug(error: BaseException) -> bool:
  """Whether the error stems from JAX, not from what the user gave.

  Bad input is refused on the host. An error that JAX raised itself, or that
  passed through one of its transformations (JAX leaves a note then), is a
  fault of ours and deserves its traceback.
  """
  if any('JAX' in note for note in getattr(error, '__notes__', ())):
    return True
  frames = traceback.extract_tb(error.__traceback__)
  homes = [str(pathlib.Path(m.__file__).parent) for m in (jax, jaxlib)]
  return any(frames[-1].filename.startswith(home + os.sep) for home in homes)


def sentence(error: BaseException) -> str:
  """The error as one line that ends like a sentence.

  >>> sentence(ValueError('top_p must be > 0, got 0'))
  'top_p must be > 0, got 0.'
  >>> sentence(FileNotFoundError(2, 'No such file or directory', 'x.gguf'))
  "cannot open 'x.gguf': no such file or directory."
  """
  if isinstance(error, UnicodeDecodeError):
    byte = error.object[error.start]
    text = f'the input is not valid UTF-8: byte {byte:#04x} at {error.start}'
  elif isinstance(error, OSError) and error.strerror and error.filename:
    reason = error.strerror[0].lower() + error.strerror[1:]
    text = f'cannot open {os.fsdecode(error.filename)!r}: {reason}'
  else:
    text = ' '.join(str(error).split()) or type(error).__name__
  return text if text[-1] in '.?!' else text + '.'


def help_text(
  doc: str, values: flags.FlagValues, titles: dict[str, list[str]]
) -> str:
  """The module's docstring, then every flag with its default, by group."""
  parts = [doc.strip()]
  for title, names in titles.items():
    lines = [f'{title}:']
    for name in names:
      flag = values[name]
      left = f'--[no]{name}' if flag.boolean else f'--{name}{_kind(flag)}'
      text = ' '.join((flag.help or '').split())
      # absl adds the choices in front and a remark on lists behind.
      text = re.sub(r'^<[^>]*>: |; repeat this option.*$', '', text)
      if flag.default not in (None, '', []) and flag.default is not False:
        text += f' (default {flag.default_as_str.strip(chr(39))})'
      lines.append(f'  {left}')
      wrapped = textwrap.fill(text, 74, break_on_hyphens=False)
      lines.append(textwrap.indent(wrapped, ' ' * 6))
    parts.append('\n'.join(lines))
  return '\n\n'.join(parts)


def _kind(flag: flags.Flag) -> str:
  """What to write behind the flag's name."""
  choices = getattr(flag.parser, 'enum_values', None)
  if choices:
    return f'={"|".join(choices)}'
  kinds = {'int': '=N', 'float': '=X'}
  return kinds.get(flag.flag_type(), '=...')


def parse_ids(text: str, name: str) -> tuple[int, ...]:
  """Token ids from a comma-separated list; '' has none.

  Args:
    text: such as '1,2,3'.
    name: the flag, for the error.

  Raises:
    ValueError: an item is not an integer in 0..2**31 - 1.

  >>> parse_ids('3,1', '--banned_ids')
  (3, 1)
  """
  ids = [_natural(item) for item in _items(text)]
  if None in ids:
    raise ValueError(
      f'{name} must be token ids joined by commas, as in 1,2,3, got {text!r}.'
    )
  return tuple(ids)


def parse_logit_bias(text: str) -> tuple[tuple[int, float], ...]:
  """Pairs of token id and bias from 'ID:X,ID:X'; '' has none.

  Raises:
    ValueError: an item is not ID:X with a finite X, or an id comes twice.

  >>> parse_logit_bias('5:-1.5,7:2')
  ((5, -1.5), (7, 2.0))
  """
  bias = {}
  for item in _items(text):
    left, _, right = item.partition(':')
    try:
      token, value = _natural(left), float(right)
    except ValueError:
      token, value = None, math.nan
    if token is None or token in bias or not math.isfinite(value):
      raise ValueError(
        '--logit_bias must be ID:X,ID:X with different token ids and finite '
        f'numbers, got {item!r} in {text!r}.'
      )
    bias[token] = value
  return tuple(bias.items())


def _items(text: str) -> list[str]:
  return [item.strip() for item in text.split(',')] if text.strip() else []


def _natural(text: str) -> int | None:
  """The int32 >= 0 that the text spells in plain digits, or None."""
  is_plain = text.isascii() and text.isdigit() and len(text) <= 10
  return int(text) if is_plain and int(text) < 2**31 else None


def read_text(path: str) -> str:
  """A whole UTF-8 file.

  Raises:
    OSError: it cannot be opened.
    ValueError: it is not valid UTF-8; the sentence names file and byte.
  """
  data = pathlib.Path(path).read_bytes()
  try:
    return data.decode('utf-8')
  except UnicodeDecodeError as error:
    byte = data[error.start]
    raise ValueError(
      f'{path!r} is not valid UTF-8: byte {byte:#04x} at {error.start}.'
    ) from None


def environment() -> dict[str, Any]:
  """What a result depends on besides its configuration."""
  device = jax.devices()[0]
  revision, is_clean = _git()
  return {
    'specjax': specjax.__version__,
    'python': platform.python_version(),
    'jax': jax.__version__,
    'jaxlib': jaxlib.__version__,
    'flax': flax.__version__,
    'numpy': np.__version__,
    'platform': device.platform,
    'device_kind': device.device_kind,
    'device_count': jax.device_count(),
    'cpu_count': os.cpu_count(),
    'git_revision': revision,
    'git_clean': is_clean,
    'date': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
  }


def _git() -> tuple[str | None, bool | None]:
  """Revision and whether nothing is changed; (None, None) outside git."""

  def git(*command: str) -> str:
    return subprocess.run(
      ('git', '-C', str(ROOT), *command),
      capture_output=True,
      check=True,
      text=True,
      timeout=10,
    ).stdout.strip()

  try:
    # An unpacked archive inside another repository has no revision of its own.
    if pathlib.Path(git('rev-parse', '--show-toplevel')).resolve() != ROOT:
      return None, None
    return git('rev-parse', 'HEAD'), not git('status', '--porcelain')
  except (OSError, subprocess.SubprocessError):
    return None, None


def check_writable(path: str):
  """Raises unless `path` can be written later; creates and changes nothing.

  Raises:
    ValueError: the folder is missing or closed, or the path is a folder.
  """
  target = pathlib.Path(os.path.realpath(path))
  folder = target.parent
  if not path:
    reason = 'the path is empty'
  elif target.is_dir():
    reason = 'it is a folder'
  elif not folder.is_dir():
    reason = f'{str(folder)!r} is not an existing folder'
  elif target.exists() and not os.access(target, os.W_OK):
    reason = 'it is read-only'
  elif not _is_special(target) and not os.access(folder, os.W_OK | os.X_OK):
    reason = f'folder {str(folder)!r} is read-only'
  else:
    return
  raise ValueError(f'cannot write {path!r}: {reason}.')


def _is_special(target: pathlib.Path) -> bool:
  """A pipe or device: written to in place, for renaming would replace it."""
  return target.exists() and not target.is_file()


def _plain(value: Any) -> Any:
  """The value in JSON's types; NaN and infinities become None."""
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
  if isinstance(value, dict):
    return {str(key): _plain(item) for key, item in value.items()}
  if isinstance(value, (np.ndarray, np.generic, jax.Array)):
    value = np.asarray(value).tolist()
  if isinstance(value, (list, tuple)):
    return [_plain(item) for item in value]
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  if value is None or isinstance(value, (str, int)):
    return value
  raise TypeError(f'{type(value).__name__} cannot be written as JSON: {value}')


def write_json(path: str, obj: Any):
  """Writes all of `obj` or nothing.

  The text goes to a temporary name in the same folder, which then takes the
  file's name in one step; a failure leaves the old file as it was. Dataclasses,
  NumPy and JAX values are accepted; NaN and infinities become null.
  """
  write_text(path, json.dumps(_plain(obj), indent=2, allow_nan=False) + '\n')


def write_text(path: str, text: str):
  """All of the text or, if it fails, the old file; pipes are written to."""
  target = pathlib.Path(os.path.realpath(path))
  if _is_special(target):
    target.write_text(text, encoding='utf-8')
    return
  with atomic.replacing(target) as unfinished:
    unfinished.write_text(text, encoding='utf-8')


class Progress:
  """Says on stderr what is going on, and for how long.

  On a terminal, one line that is rewritten as time passes; elsewhere plain
  lines: nothing for work that takes less than a second, then a line when it
  starts to last, one every ten seconds, and one at the end.

  with Progress('loading target') as progress:
    progress.update('12 of 28 layers')

  Attributes:
    is_silent: of several processes, all but the first.
  """

  is_silent = False

  def __init__(self, what: str, stream: TextIO | None = None):
    self._what = what
    self._detail = ''
    self._stream = sys.stderr if stream is None else stream
    self._is_terminal = self._stream.isatty()
    self._width = 0
    self._has_spoken = False
    self._stop = threading.Event()
    # A thread, because loading and compiling hold the main one for seconds.
    self._thread = threading.Thread(target=self._tick, daemon=True)

  def update(self, detail: str):
    """Changes what stands behind the name, such as '3 of 12'."""
    self._detail = detail

  def __enter__(self) -> 'Progress':
    self._start = time.monotonic()
    if not self.is_silent:
      self._thread.start()
    return self

  def __exit__(self, *exc_info):
    if self.is_silent:
      return
    self._stop.set()
    self._thread.join()
    if self._is_terminal:
      self._show(end='\n')
    elif self._has_spoken:
      self._show()

  def _tick(self):
    pause = 0.2 if self._is_terminal else 1.0
    while not self._stop.wait(pause):
      self._has_spoken = True
      self._show()
      pause = 0.2 if self._is_terminal else 10.0

  def _show(self, end: str = ''):
    seconds = time.monotonic() - self._start
    text = f'{self._what} {self._detail}'.strip() + f' ... {seconds:.1f} s'
    if self._is_terminal:
      # Spaces wipe what a longer text before this one has left.
      self._stream.write('\r' + text.ljust(self._width) + end)
      self._width = len(text)
    else:
      self._stream.write(text + '\n')
    self._stream.flush()

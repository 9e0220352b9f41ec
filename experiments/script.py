"""A script's frame: flags, help, and bad input in one sentence.

A script defines its flags in groups, and `main` takes their parsed values:

  FLAG_GROUPS = (('Model', define_model_flags), ('Sampling', ...))

  def main(values):
    ...

  if __name__ == '__main__':
    sys.exit(script.run_main(main, FLAG_GROUPS))

Each run has flag values of its own: two scripts may define the same flag in
one process, and a test may call `run_main(main, FLAG_GROUPS, ['--seed=1'])`.
"""

import difflib
import os
import pathlib
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence

import jax
import jaxlib
from absl import flags, logging

from experiments import compilation_cache

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

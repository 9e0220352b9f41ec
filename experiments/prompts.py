"""What a generation is asked for: prompts from flags, text and JSONL files."""

import dataclasses
import json
import re
from typing import Any

from experiments import text_files
from specjax import noise, requests
from specjax.sampling import SamplingOptions

# What a row of a JSONL file may set for itself.
_OVERRIDES = (
  'temperature',
  'top_k',
  'top_p',
  'min_p',
  'repetition_penalty',
  'presence_penalty',
  'frequency_penalty',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
  """One row of input: its turns, and the settings it has of its own.

  Attributes:
    turns: user texts; each is a request, and sees the answers before it.
    options: sampling settings.
    seed: of the request.
    stop: texts that end an answer.
    max_new_tokens: per turn.
  """

  turns: tuple[str, ...]
  options: SamplingOptions
  seed: int
  stop: tuple[str, ...]
  max_new_tokens: int


def read(
  *,
  prompt: str | None,
  prompt_file: str | None,
  prompts_jsonl: str | None,
  limit: int | None,
  defaults: Conversation,
) -> list[Conversation]:
  """The rows of input; row i has the default seed plus i, unless it says so.

  Args:
    prompt: a text, or None.
    prompt_file: a UTF-8 file that is one prompt, or None.
    prompts_jsonl: a file with an object per line, or None.
    limit: at most so many rows; None: all.
    defaults: settings of rows without their own; its turns are not used.

  Raises:
    ValueError: not exactly one source, or a row that cannot be used.
    OSError: a file that cannot be opened.
  """
  sources = {
    '--prompt': prompt,
    '--prompt_file': prompt_file,
    '--prompts_jsonl': prompts_jsonl,
  }
  given = [name for name, value in sources.items() if value is not None]
  if len(given) != 1:
    raise ValueError(
      f'exactly one of {", ".join(sources)} must be given, got '
      f'{" and ".join(given) or "none"}.'
    )
  if limit is not None and limit < 1:
    raise ValueError(f'limit must be >= 1, got {limit}.')
  if limit is not None and prompts_jsonl is None:
    raise ValueError(f'--limit={limit} needs --prompts_jsonl.')
  if prompts_jsonl is not None:
    return _read_jsonl(prompts_jsonl, limit, defaults)
  text = prompt if prompt is not None else text_files.read_text(prompt_file)
  return [dataclasses.replace(defaults, turns=(text,))]


def _read_jsonl(
  path: str, limit: int | None, defaults: Conversation
) -> list[Conversation]:
  rows = []
  # Only '\n' ends a row: other separators may stand inside a JSON text.
  for number, line in enumerate(text_files.read_text(path).split('\n'), 1):
    if not line.strip():
      continue
    if len(rows) == limit:
      break
    try:
      rows.append(_row(line, len(rows), defaults))
    except ValueError as error:
      raise ValueError(f'line {number} of {path!r}: {error}') from None
  if not rows:
    raise ValueError(f'{path!r} has no rows.')
  return rows


def _row(line: str, index: int, defaults: Conversation) -> Conversation:
  try:
    row = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'not JSON: {error}.') from None
  if not isinstance(row, dict):
    raise ValueError(f'must be a JSON object, got {type(row).__name__}.')
  turns = _turns(row)
  own = {name: row[name] for name in _OVERRIDES if row.get(name) is not None}

  def setting(name: str, default: Any) -> Any:
    return default if row.get(name) is None else row[name]

  stop = setting('stop', list(defaults.stop))
  stop = [stop] if isinstance(stop, str) else stop
  is_list = isinstance(stop, list)
  if not is_list or not all(_is_text(text) and text for text in stop):
    raise ValueError(
      f'stop must be a text or a list of texts, none empty, got {stop!r:.60}.'
    )
  return Conversation(
    turns=turns,
    options=dataclasses.replace(defaults.options, **own),
    seed=noise.check_seed(setting('seed', defaults.seed + index)),
    stop=tuple(stop),
    max_new_tokens=requests.check_max_new_tokens(
      setting('max_new_tokens', defaults.max_new_tokens)
    ),
  )


def _turns(row: dict[str, Any]) -> tuple[str, ...]:
  names = [name for name in ('prompt', 'question', 'turns') if name in row]
  if len(names) != 1:
    raise ValueError(
      f'must have one of prompt, question, turns, got {names or "none"}.'
    )
  value = row[names[0]]
  turns = value if names[0] == 'turns' else [value]
  is_texts = isinstance(turns, list) and turns
  if not is_texts or not all(map(_is_text, turns)):
    raise ValueError(f'{names[0]} must be valid text, got {value!r:.60}.')
  return tuple(turns)


def _is_text(value: Any) -> bool:
  """Whether it is a str that UTF-8 can spell: JSON may hold half a pair."""
  return isinstance(value, str) and not re.search('[\ud800-\udfff]', value)

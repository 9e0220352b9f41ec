"""Tokenizers as files beside a model: written, and read again."""

import json
import os
import pathlib

from specjax.tokenizers import (
  ByteTokenizer,
  LibraryTokenizer,
  Tokenizer,
  from_tokenizer_json,
)

_SPACE = '\u2581'  # How SentencePiece spells a space.
_BYTES = 'specjax.ByteTokenizer'
_COMPARED = (
  'tokens',
  'added_ids',
  'special_ids',
  'is_byte_level',
  'has_space_prefix',
  'prefix_ids',
  'suffix_ids',
  'bos_id',
  'eos_id',
  'stop_ids',
  'chat_template',
)


def read_tokenizer(folder: str | os.PathLike) -> Tokenizer:
  """The tokenizer of a folder: from tokenizer.json, or bytes if it says so.

  Raises:
    ValueError: a file is missing or broken, or names another tokenizer.
  """
  config = pathlib.Path(folder) / 'tokenizer_config.json'
  if not (pathlib.Path(folder) / 'tokenizer.json').exists() and config.exists():
    try:
      stated = json.loads(config.read_text(encoding='utf-8'))
    except (ValueError, RecursionError) as error:
      raise ValueError(f'{config} must be JSON: {error}.') from None
    if isinstance(stated, dict) and stated.get('tokenizer_class') == _BYTES:
      return ByteTokenizer()
  return from_tokenizer_json(folder)


def save_tokenizer(folder: str | os.PathLike, tokenizer: Tokenizer):
  """Writes `tokenizer.json` and `tokenizer_config.json`.

  What was written is read back and compared, so a tokenizer that these files
  cannot hold is refused and not changed.

  Args:
    folder: exists; files of these names are replaced.
    tokenizer: a `LibraryTokenizer`, from a folder or from a GGUF file, or a
      `ByteTokenizer`, for which tokenizer_config.json alone is written.

  Raises:
    ValueError: another kind of tokenizer, or one that reads back differently:
      two ids with one spelling, for instance.
  """
  if isinstance(tokenizer, ByteTokenizer):
    text = json.dumps({'tokenizer_class': _BYTES}, indent=1) + '\n'
    path = pathlib.Path(folder) / 'tokenizer_config.json'
    path.write_text(text, encoding='utf-8')
    return
  if not isinstance(tokenizer, LibraryTokenizer):
    raise ValueError(
      f'{type(tokenizer).__name__} cannot be saved, only a tokenizer from '
      'files can.'
    )
  folder = pathlib.Path(folder)
  text = json.dumps(_whole(tokenizer), ensure_ascii=False)
  (folder / 'tokenizer.json').write_text(text, encoding='utf-8')
  spelled = lambda i: None if i is None else tokenizer.backend.id_to_token(i)
  config = {
    'bos_token': spelled(tokenizer.bos_id),
    'eos_token': spelled(tokenizer.eos_id),
    'chat_template': tokenizer.chat_template,
    'stop_ids': list(tokenizer.stop_ids),
  }
  text = json.dumps(config, ensure_ascii=False, indent=1)
  (folder / 'tokenizer_config.json').write_text(text + '\n', encoding='utf-8')
  again = from_tokenizer_json(folder)
  for name in _COMPARED:
    if getattr(again, name) != getattr(tokenizer, name):
      raise ValueError(
        f'this tokenizer cannot be saved: its {name} would be read back '
        'differently.'
      )


def _whole(tokenizer: LibraryTokenizer) -> dict:
  """The content of tokenizer.json, begin and end of a text included."""
  import tokenizers
  from tokenizers import decoders, processors

  # A copy: what is set below is not for the tokenizer at hand.
  backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
  if backend.decoder is None and tokenizer.is_byte_level:
    backend.decoder = decoders.ByteLevel()
  elif backend.decoder is None:
    steps = [
      decoders.Replace(_SPACE, ' '),
      decoders.ByteFallback(),
      decoders.Fuse(),
    ]
    if tokenizer.has_space_prefix:
      steps.append(decoders.Strip(' ', 1, 0))
    backend.decoder = decoders.Sequence(steps)
  if tokenizer.prefix_ids or tokenizer.suffix_ids:
    around = (*tokenizer.prefix_ids, *tokenizer.suffix_ids)
    names = [f'{i}' for i in range(len(around))]
    before = len(tokenizer.prefix_ids)
    backend.post_processor = processors.TemplateProcessing(
      single=[*names[:before], '$A', *names[before:]],
      special_tokens=[
        {'id': name, 'ids': [i], 'tokens': [backend.id_to_token(i)]}
        for name, i in zip(names, around)
      ],
    )
  whole = json.loads(backend.to_str())
  if not (tokenizer.prefix_ids or tokenizer.suffix_ids):
    whole['post_processor'] = None
  return whole

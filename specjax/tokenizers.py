"""Tokenizers: text to ids and back, byte for byte.

Decoding goes token by token through `token_bytes`, not through the library's
decoder: a stream can then withhold half a character, and what is streamed is
what is decoded at once.
"""

import dataclasses
import functools
import json
import os
import re
from typing import Any, Protocol, Sequence

import numpy as np

_SPACE = '\u2581'  # How SentencePiece spells a space.
_BYTE_SPACE = '\u0120'  # How byte-level BPE does.
_MAX_IDS = 1 << 22
_NO_TOKEN = '(no token)'


class Tokenizer(Protocol):
  """What decoding needs to know of a tokenizer.

  Attributes:
    vocab_size: number of true ids; a model may have more, padded rows.
    bos_id: begins a text, or None.
    eos_id: ends a text, or None.
    stop_ids: ids after which generation ends, `eos_id` among them.
    chat_template: Jinja source for `chat.render_chat`, or None.
  """

  vocab_size: int
  bos_id: int | None
  eos_id: int | None
  stop_ids: tuple[int, ...]
  chat_template: str | None

  def encode(self, text: str, *, add_special: bool) -> list[int]:
    """Ids of a text; `add_special` adds what begins and ends every text.

    Special tokens that are spelled out in the text become their ids.
    """
    ...

  def decode(
    self,
    ids: Sequence[int],
    *,
    skip_special: bool = False,
    is_start: bool = False,
  ) -> str:
    """Text of some ids; bytes that are not UTF-8 become U+FFFD.

    With `is_start` the ids begin a text, and the space that some tokenizers
    put before every text is taken off again. Generated ids do not.
    """
    ...

  def token_bytes(self, token_id: int) -> bytes:
    """The bytes that one id stands for, special tokens spelled out."""
    ...

  def id_to_token(self, token_id: int) -> str:
    """The vocabulary's own spelling of one id."""
    ...

  def is_special(self, token_id: int) -> bool:
    """Whether the id is a control token and no text."""
    ...

  def content(self) -> tuple[str | None, ...]:
    """Every true id's spelling, in order; None where an id is not used."""
    ...


def _join(
  tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool
) -> bytes:
  return b''.join(
    tokenizer.token_bytes(i)
    for i in ids
    if not (skip_special and tokenizer.is_special(i))
  )


def _check_text(text: str):
  try:
    text.encode('utf-8')
  except UnicodeEncodeError as error:
    raise ValueError(
      f'text must be valid Unicode, got {text[error.start]!r} at character '
      f'{error.start}.'
    ) from None


def _check_id(token_id: int, vocab_size: int):
  if not 0 <= token_id < vocab_size:
    raise ValueError(
      f'token id must be in 0..{vocab_size - 1}, got {token_id}.'
    )


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
  """UTF-8 bytes as ids 0..255, and 256 that begins and ends a text.

  >>> ByteTokenizer().encode('hi', add_special=True)
  [256, 104, 105]
  >>> ByteTokenizer().decode([104, 195, 164, 256], skip_special=True)
  'hä'
  """

  vocab_size: int = dataclasses.field(default=257, init=False)
  bos_id: int = dataclasses.field(default=256, init=False)
  eos_id: int = dataclasses.field(default=256, init=False)
  stop_ids: tuple[int, ...] = dataclasses.field(default=(256,), init=False)
  chat_template: None = dataclasses.field(default=None, init=False)

  def encode(self, text: str, *, add_special: bool) -> list[int]:
    """The bytes of a text; `add_special` puts 256 before them.

    Raises:
      ValueError: the text is not valid Unicode (a lone surrogate).
    """
    _check_text(text)
    return [self.bos_id] * add_special + list(text.encode('utf-8'))

  def decode(
    self,
    ids: Sequence[int],
    *,
    skip_special: bool = False,
    is_start: bool = False,
  ) -> str:
    """The text of some bytes; what is not UTF-8 becomes U+FFFD.

    Raises:
      ValueError: an id is not in 0..256.
    """
    del is_start  # Nothing is ever put before a text.
    return _join(self, ids, skip_special).decode('utf-8', errors='replace')

  def token_bytes(self, token_id: int) -> bytes:
    """The byte itself; 256 is spelled out.

    Raises:
      ValueError: the id is not in 0..256.
    """
    _check_id(token_id, self.vocab_size)
    return b'<|end|>' if token_id == self.eos_id else bytes([token_id])

  def id_to_token(self, token_id: int) -> str:
    """'<0x68>' for 104.

    Raises:
      ValueError: the id is not in 0..256.
    """
    _check_id(token_id, self.vocab_size)
    return '<|end|>' if token_id == self.eos_id else f'<0x{token_id:02X}>'

  def is_special(self, token_id: int) -> bool:
    """True of 256 alone."""
    return token_id == self.eos_id

  def content(self) -> tuple[str | None, ...]:
    """All 257 spellings, by which vocabularies are compared."""
    return tuple(self.id_to_token(i) for i in range(self.vocab_size))


@functools.cache
def _byte_of_char() -> dict[str, int]:
  """Byte-level BPE spells bytes as characters; this is the way back.

  Printable Latin-1 characters stand for themselves, the other bytes, in
  order, for the characters from U+0100 on (a space is U+0120).
  """
  kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in kept]
  table = {chr(byte): byte for byte in kept}
  return table | {chr(256 + i): byte for i, byte in enumerate(others)}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LibraryTokenizer:
  """A BPE tokenizer on the `tokenizers` library.

  Attributes:
    backend: a `tokenizers.Tokenizer`, used for encoding only.
    tokens: id to spelling, None where an id is not used.
    added_ids: tokens that are matched as they stand before any splitting.
    special_ids: control tokens among them.
    is_byte_level: whether spellings are GPT-2 byte characters, else
      SentencePiece with byte fallback.
    has_space_prefix: whether encoding puts a space before a text.
    prefix_ids: what begins every text.
    suffix_ids: what ends every text.
  """

  backend: Any
  tokens: tuple[str | None, ...]
  added_ids: frozenset[int]
  special_ids: frozenset[int]
  is_byte_level: bool
  has_space_prefix: bool = False
  prefix_ids: tuple[int, ...] = ()
  suffix_ids: tuple[int, ...] = ()
  bos_id: int | None = None
  eos_id: int | None = None
  stop_ids: tuple[int, ...] = ()
  chat_template: str | None = None

  @property
  def vocab_size(self) -> int:
    """The number of ids, unused ones among them."""
    return len(self.tokens)

  def encode(self, text: str, *, add_special: bool) -> list[int]:
    """Ids of a text; `add_special` adds prefix and suffix.

    Raises:
      ValueError: the text is not valid Unicode (a lone surrogate).
    """
    _check_text(text)
    ids = self.backend.encode(text, add_special_tokens=False).ids
    if not add_special:
      return ids
    return [*self.prefix_ids, *ids, *self.suffix_ids]

  def decode(
    self,
    ids: Sequence[int],
    *,
    skip_special: bool = False,
    is_start: bool = False,
  ) -> str:
    """Text of some ids; bytes that are not UTF-8 become U+FFFD.

    Raises:
      ValueError: an id is outside the vocabulary.
    """
    text = _join(self, ids, skip_special).decode('utf-8', errors='replace')
    if is_start and self.has_space_prefix:
      return text.removeprefix(' ')
    return text

  def token_bytes(self, token_id: int) -> bytes:
    """The bytes that one id stands for; none for an id that is not used.

    Raises:
      ValueError: the id is outside the vocabulary.
    """
    token = self.id_to_token(token_id)
    if not self.is_byte_level:
      byte = re.fullmatch('<0x([0-9A-F]{2})>', token)
      if byte:
        return bytes.fromhex(byte[1])
      return token.replace(_SPACE, ' ').encode('utf-8')
    table = _byte_of_char()
    if token_id in self.added_ids or not all(c in table for c in token):
      return token.encode('utf-8')
    return bytes(table[c] for c in token)

  def id_to_token(self, token_id: int) -> str:
    """The spelling of one id; '' where an id is not used.

    Raises:
      ValueError: the id is outside the vocabulary.
    """
    _check_id(token_id, self.vocab_size)
    return self.tokens[token_id] or ''

  def is_special(self, token_id: int) -> bool:
    """Whether the id is a control token and no text."""
    return token_id in self.special_ids

  def content(self) -> tuple[str | None, ...]:
    """Every id's spelling, by which vocabularies are compared."""
    return self.tokens


def _read_json(path: str) -> dict:
  try:
    with open(path, encoding='utf-8') as file:
      value = json.load(file)
  except OSError as error:
    raise ValueError(f'{path} cannot be read: {error.strerror}.') from None
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path} is not JSON: {error}.') from None
  if not isinstance(value, dict):
    raise ValueError(f'{path} must hold a JSON object.')
  return value


def _all_types(part: Any) -> set[str]:
  """The `type` of a tokenizer.json component and of all inside it."""
  if isinstance(part, list):
    return set().union(*(_all_types(item) for item in part))
  if not isinstance(part, dict):
    return set()
  own = {part['type']} if isinstance(part.get('type'), str) else set()
  return own.union(*(_all_types(value) for value in part.values()))


def _affixes(backend: Any) -> tuple[list[int], list[int]]:
  """What the post-processor puts before and after a text."""
  plain = backend.encode('a', add_special_tokens=False).ids
  whole = backend.encode('a', add_special_tokens=True).ids
  for start in range(len(whole) - len(plain) + 1):
    if whole[start : start + len(plain)] == plain:
      return whole[:start], whole[start + len(plain) :]
  return [], []


def _has_space_prefix(backend: Any) -> bool:
  tokens = backend.encode('a', add_special_tokens=False).tokens
  return bool(tokens) and tokens[0].startswith((_SPACE, _BYTE_SPACE))


def _spelled(token: str | None) -> str | None:
  """A run of spaces as SentencePiece spells it; some files have it bare."""
  return token if not token or token.strip(' ') else _SPACE * len(token)


def _stop_ids(
  config: dict, path: str, eos_id: int | None, num_ids: int
) -> tuple[int, ...]:
  """Those that `tokenizer_files.save_tokenizer` wrote, else the end alone."""
  stop_ids = config.get('stop_ids')
  if stop_ids is None:
    return () if eos_id is None else (eos_id,)
  is_list = isinstance(stop_ids, list)
  if not is_list or not all(i in range(num_ids) for i in stop_ids):
    raise ValueError(
      f'{path}: stop_ids must be a list of ids in 0..{num_ids - 1}, got '
      f'{stop_ids!r:.60}.'
    )
  return tuple(stop_ids)


def _chat_template(folder: str, config: dict) -> str | None:
  path = os.path.join(folder, 'chat_template.jinja')
  if os.path.exists(path):
    with open(path, encoding='utf-8') as file:
      return file.read()
  template = config.get('chat_template')
  if isinstance(template, list):  # Several, by name.
    named = {item.get('name'): item.get('template') for item in template}
    return named.get('default')
  return template


def from_tokenizer_json(path: str | os.PathLike) -> LibraryTokenizer:
  """The tokenizer of a Hugging Face folder.

  Args:
    path: a folder with `tokenizer.json`, or that file itself. Beside it,
      `tokenizer_config.json` (beginning and end of a text, chat template, and
      `stop_ids` if specjax wrote it) and `chat_template.jinja` are read if
      they are there.

  Raises:
    ValueError: if a file is missing or broken, or the tokenizer is neither
      byte-level nor SentencePiece-like BPE.
  """
  import tokenizers

  path = os.fspath(path)
  if os.path.isdir(path):
    path = os.path.join(path, 'tokenizer.json')
  folder = os.path.dirname(path)
  parsed = _read_json(path)
  config_path = os.path.join(folder, 'tokenizer_config.json')
  config = _read_json(config_path) if os.path.exists(config_path) else {}
  try:
    backend = tokenizers.Tokenizer.from_str(json.dumps(parsed))
  except Exception as error:  # The library raises nothing more precise.
    raise ValueError(f'{path} is not a tokenizer: {error}.') from None
  backend.no_padding()
  backend.no_truncation()
  types = _all_types([parsed.get('pre_tokenizer'), parsed.get('decoder')])
  is_byte_level = 'ByteLevel' in types
  is_spaced = _SPACE in json.dumps(parsed.get('decoder'), ensure_ascii=False)
  if parsed['model'].get('type') != 'BPE' or not (is_byte_level or is_spaced):
    raise ValueError(
      f'{path} holds model {parsed["model"].get("type")!r} with decoder parts '
      f'{sorted(types)}; allowed are BPE with ByteLevel, and BPE with '
      f'{_SPACE!r} for a space.'
    )
  vocab = backend.get_vocab(with_added_tokens=True)
  if max(vocab.values(), default=0) >= _MAX_IDS:
    raise ValueError(
      f'{path} has token id {max(vocab.values())}; ids must be below '
      f'{_MAX_IDS}.'
    )
  tokens = [None] * (max(vocab.values(), default=-1) + 1)
  for token, token_id in vocab.items():
    tokens[token_id] = token
  if not is_byte_level:
    tokens = [_spelled(token) for token in tokens]
  added = backend.get_added_tokens_decoder()

  def special_id(key: str) -> int | None:
    token = config.get(key)
    if isinstance(token, dict):
      token = token.get('content')
    if token is not None and token not in vocab:
      raise ValueError(f'{config_path}: {key} {token!r} is not a token.')
    return None if token is None else vocab[token]

  bos_id, eos_id = special_id('bos_token'), special_id('eos_token')
  prefix_ids, suffix_ids = _affixes(backend)
  # The flags, where they are given, overrule the post-processor.
  if config.get('add_bos_token') is not None:
    prefix_ids = [bos_id] if config['add_bos_token'] else []
  if config.get('add_eos_token') is not None:
    suffix_ids = [eos_id] if config['add_eos_token'] else []
  if None in (*prefix_ids, *suffix_ids):
    raise ValueError(
      f'{config_path}: add_bos_token and add_eos_token need bos_token and '
      'eos_token.'
    )
  return LibraryTokenizer(
    backend=backend,
    tokens=tuple(tokens),
    added_ids=frozenset(added),
    special_ids=frozenset(i for i, token in added.items() if token.special),
    is_byte_level=is_byte_level,
    has_space_prefix=_has_space_prefix(backend),
    prefix_ids=tuple(prefix_ids),
    suffix_ids=tuple(suffix_ids),
    bos_id=bos_id,
    eos_id=eos_id,
    stop_ids=_stop_ids(config, config_path, eos_id, len(tokens)),
    chat_template=_chat_template(folder, config),
  )


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer):
  """Raises unless every id means the same to both.

  Spellings are compared, not sizes: files of one tokenizer have differently
  padded widths, and two vocabularies of one size can be different.

  Raises:
    ValueError: naming the first id that differs and both spellings.
  """
  ours, theirs = target.content(), draft.content()
  for i in range(max(len(ours), len(theirs))):
    token, other = (
      tokens[i] if i < len(tokens) else None for tokens in (ours, theirs)
    )
    if token != other:
      token, other = (
        _NO_TOKEN if t is None else repr(t) for t in (token, other)
      )
      raise ValueError(
        'target and draft must have the same vocabulary, but id '
        f'{i} is {token} in the target and {other} in the draft '
        f'({len(ours)} and {len(theirs)} ids).'
      )


def pad_batch(
  prompts: Sequence[Sequence[int]], length: int
) -> tuple[np.ndarray, np.ndarray]:
  """Prompts of different lengths as one buffer.

  Args:
    prompts: B lists of ids, none empty.
    length: L, the buffer's width.

  Returns:
    tokens int32 [B, L], zeros behind each prompt, and lengths int32 [B].

  Raises:
    ValueError: no prompt, an empty prompt, or one longer than the buffer.

  >>> pad_batch([[5, 6], [7]], 3)
  (array([[5, 6, 0],
         [7, 0, 0]], dtype=int32), array([2, 1], dtype=int32))
  """
  if not prompts:
    raise ValueError('prompts must hold at least one prompt.')
  tokens_BL = np.zeros((len(prompts), length), np.int32)
  length_B = np.array([len(prompt) for prompt in prompts], np.int32)
  for row, prompt in enumerate(prompts):
    if not len(prompt):
      raise ValueError(f'prompt {row} is empty; it must have a token.')
    if len(prompt) > length:
      raise ValueError(
        f'prompt {row} has {len(prompt)} tokens, but the buffer holds {length}.'
      )
    tokens_BL[row, : len(prompt)] = prompt
  return tokens_BL, length_B

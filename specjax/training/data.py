"""Texts as packed batches, each a function of its number alone.

  documents   <s> d e f ...   <s> i m p o r t ...      one after the other
  windows     [ T tokens ][ T tokens ] ...             each begins with the last
                                                       token of the one before

Every epoch cuts the windows at another place and takes them in another order;
both follow from seed and epoch. A run that goes on at batch n needs no more
than n to see what it would have seen.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from specjax.shapes import Params
from specjax.tokenizers import Tokenizer


class Document(NamedTuple):
  """A text as it is trained on.

  Attributes:
    tokens: int32 [n].
    mask: bool [n], which of them are to be predicted.
  """

  tokens: np.ndarray
  mask: np.ndarray


class Source(Protocol):
  """Where batches come from; each a function of the arguments alone."""

  def batch(self, position: int, params: Params) -> dict[str, np.ndarray]:
    """The batch of a step, see `objective.Batch`.

    Args:
      position: the number of the step, from 0.
      params: what has been trained so far, in float32, for text written by it.
    """
    ...


def read_documents(
  paths: Iterable[str | os.PathLike], tokenizer: Tokenizer
) -> Iterator[Document]:
  """The documents of some files, in order.

  A .jsonl file has an object per line, with `text`, or with `prompt_tokens` and
  `tokens` as experiments/generate.py writes them; a .json file is a whole
  result of that script. Prompts are not predicted. Any other file is one UTF-8
  text.

  Raises:
    ValueError: a file holds something else, or ids that the tokenizer lacks.
    OSError: it cannot be opened.
  """
  for path in map(pathlib.Path, paths):
    data = path.read_bytes()
    try:
      text = data.decode('utf-8')
    except UnicodeDecodeError as error:
      raise ValueError(
        f'{path} must be UTF-8, byte {error.start} is not.'
      ) from None
    if path.suffix == '.jsonl':
      # Not splitlines(): texts may hold other characters that end a line.
      for number, line in enumerate(text.split('\n'), 1):
        if line.strip():
          where = f'{path}, line {number},'
          yield _from_row(_parse(line, where), tokenizer, where)
    elif path.suffix == '.json':
      result = _parse(text, f'{path}')
      rows = result.get('requests') if isinstance(result, dict) else None
      if not isinstance(rows, list):
        raise ValueError(f'{path} must be a result with a list of requests.')
      for row in rows:
        yield _from_row(row, tokenizer, f'{path}')
    else:
      yield from_text(text, tokenizer)


def from_text(text: str, tokenizer: Tokenizer) -> Document:
  """A whole text; all of it is to be predicted."""
  ids = tokenizer.encode(text, add_special=True)
  end = tokenizer.eos_id
  # Where one id begins and ends a text, the next text has it.
  if end is not None and end != tokenizer.bos_id and ids[-1:] != [end]:
    ids.append(end)
  return Document(np.asarray(ids, np.int32), np.ones(len(ids), bool))


def _parse(text: str, where: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{where} must be JSON: {error}.') from None


def _from_row(row: Any, tokenizer: Tokenizer, where: str) -> Document:
  if isinstance(row, dict) and isinstance(row.get('text'), str):
    if 'tokens' not in row:
      return from_text(row['text'], tokenizer)
  parts = []
  for name in ('prompt_tokens', 'tokens'):
    ids = row.get(name) if isinstance(row, dict) else None
    is_list = isinstance(ids, list) and all(type(i) is int for i in ids)
    if not is_list:
      raise ValueError(
        f'{where} must have a text, or lists prompt_tokens and tokens.'
      )
    wrong = [i for i in ids if not 0 <= i < tokenizer.vocab_size]
    if wrong:
      raise ValueError(
        f'{where} must have ids in 0..{tokenizer.vocab_size - 1}, got '
        f'{wrong[0]}.'
      )
    parts.append(np.asarray(ids, np.int32))
  mask = np.concatenate(
    [np.zeros(len(parts[0]), bool), np.ones(len(parts[1]), bool)]
  )
  return Document(np.concatenate(parts), mask)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
  """Batches over documents joined into one stream; a `Source`.

  Attributes:
    tokens_n: int32 [n], all documents.
    mask_n: bool [n].
    batch_size: B.
    length: T, tokens per row.
    seed: of cuts and order.
    recuts: every epoch cuts elsewhere; else all have the windows of the first.

  Raises:
    ValueError: a number is out of range, or the text is shorter than a row.
  """

  tokens_n: np.ndarray
  mask_n: np.ndarray
  batch_size: int
  length: int
  seed: int
  recuts: bool = True

  def __post_init__(self):
    if self.batch_size < 1:
      raise ValueError(f'batch_size must be >= 1, got {self.batch_size}.')
    if self.length < 2:
      raise ValueError(f'length must be >= 2, got {self.length}.')
    if len(self.tokens_n) < self.length:
      raise ValueError(
        f'the text must have at least {self.length} tokens, the length of a '
        f'row, got {len(self.tokens_n)}.'
      )

  @property
  def num_rows(self) -> int:
    """Rows of an epoch."""
    # One less than fit, so that the first may begin anywhere in its place.
    return max((len(self.tokens_n) - 1) // (self.length - 1) - 1, 1)

  def digest(self) -> str:
    """A hash of the text, which a run that goes on compares."""
    digest = hashlib.sha256(np.ascontiguousarray(self.tokens_n).tobytes())
    digest.update(np.packbits(self.mask_n).tobytes())
    return digest.hexdigest()

  def batch(self, position: int, params: Params = None) -> dict[str, Any]:
    """`Source.batch`: {'tokens_BT': int32, 'mask_BT': bool}, both [B, T].

    `params` are not looked at.
    """
    del params
    starts = [self._start(row) for row in self._rows(position)]
    index_BT = np.asarray(starts)[:, None] + np.arange(self.length)
    return {
      'tokens_BT': self.tokens_n[index_BT],
      'mask_BT': self.mask_n[index_BT],
    }

  def windows(self, position: int) -> list[int]:
    """The windows of a batch by number; of the text's, without `recuts`."""
    return [self._window(row)[1] for row in self._rows(position)]

  def _rows(self, position: int) -> range:
    first = position * self.batch_size
    return range(first, first + self.batch_size)

  def _start(self, row: int) -> int:
    offset, window = self._window(row)
    return offset + window * (self.length - 1)

  def _window(self, row: int) -> tuple[int, int]:
    """Where an epoch's first window begins, and which of them a row is."""
    epoch, index = divmod(row, self.num_rows)
    room = len(self.tokens_n) - self.num_rows * (self.length - 1)
    offset, order = _epoch(self.seed, epoch, self.num_rows, room)
    if not self.recuts:
      offset, _ = _epoch(self.seed, 0, self.num_rows, room)
    return offset, int(order[index])


def pack(
  documents: Iterable[Document],
  *,
  batch_size: int,
  length: int,
  seed: int,
  recuts: bool = True,
) -> Packed:
  """Joins documents into one stream.

  Raises:
    ValueError: there is no document, or `Packed` refuses what there is.
  """
  documents = list(documents)
  if not documents:
    raise ValueError('there must be at least one document, got none.')
  return Packed(
    tokens_n=np.concatenate([d.tokens for d in documents]),
    mask_n=np.concatenate([d.mask for d in documents]),
    batch_size=batch_size,
    length=length,
    seed=seed,
    recuts=recuts,
  )


@functools.lru_cache(maxsize=4)
def _epoch(
  seed: int, epoch: int, num_rows: int, room: int
) -> tuple[int, np.ndarray]:
  """Where the first window begins, and the windows' order."""
  rng = np.random.default_rng([seed, epoch])
  return int(rng.integers(room)), rng.permutation(num_rows)

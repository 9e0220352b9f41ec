"""Rebuilds the tokenizer that a GGUF file carries in its metadata."""

from typing import Any, Mapping

from specjax import tokenizers as specjax_tokenizers

_SPACE = '\u2581'  # How SentencePiece spells a space.
# Values of tokenizer.ggml.token_type.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_MODELS = ('gpt2', 'llama')
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = (
  rf'{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s'
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
# How text is split before merging. Llama 3 keeps three digits together, Qwen
# splits them all; None stands for GPT-2's own pattern, digits split first.
_PATTERNS = {
  'qwen2': _WORDS % '',
  'smollm': None,
  'llama-bpe': _WORDS % '{1,3}',
}
# Ends of a turn or a text. Files name one end token in their metadata, while
# the chat formats they carry end with another.
_END_TOKENS = (
  '<|endoftext|>',
  '<|im_end|>',
  '<|eot_id|>',
  '<|eom_id|>',
  '<|end_of_text|>',
  '<end_of_turn>',
  '</s>',
)


def _tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
  """Spellings and types of the true ids."""
  tokens = metadata.get('tokenizer.ggml.tokens')
  if not isinstance(tokens, list) or not tokens:
    raise ValueError('the GGUF file has no tokenizer.ggml.tokens.')
  types = metadata.get('tokenizer.ggml.token_type')
  types = [_NORMAL] * len(tokens) if types is None else list(map(int, types))
  if len(types) != len(tokens):
    raise ValueError(
      f'tokenizer.ggml.token_type must have {len(tokens)} entries, got '
      f'{len(types)}.'
    )
  # What only fills the embedding up to a round width is no token.
  size = len(tokens)
  while size and (
    types[size - 1] == _UNUSED or tokens[size - 1] == f'[PAD{size - 1}]'
  ):
    size -= 1
  return tokens[:size], types[:size]


def _token_id(
  metadata: Mapping[str, Any], name: str, num_tokens: int
) -> int | None:
  token_id = metadata.get(f'tokenizer.ggml.{name}')
  if token_id is None:
    return None
  if not isinstance(token_id, int) or not 0 <= token_id < num_tokens:
    raise ValueError(
      f'tokenizer.ggml.{name} must be in 0..{num_tokens - 1}, got {token_id}.'
    )
  return token_id


def stop_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
  """The ids that end a generation, ascending.

  Those that the metadata names (end of sequence, of turn, of message) and
  every control token with a well-known name for such an end.

  Args:
    metadata: the key-value part of a GGUF file.

  >>> stop_ids({'tokenizer.ggml.tokens': ['a', '<|im_end|>', '<|endoftext|>'],
  ...           'tokenizer.ggml.token_type': [1, 3, 3],
  ...           'tokenizer.ggml.eos_token_id': 1})
  (1, 2)
  """
  if 'tokenizer.ggml.tokens' not in metadata:
    return ()
  tokens, types = _tokens(metadata)
  named = (
    _token_id(metadata, f'{name}_token_id', len(tokens))
    for name in ('eos', 'eot', 'eom')
  )
  ends = {
    i
    for i, (token, kind) in enumerate(zip(tokens, types))
    if kind == _CONTROL and token in _END_TOKENS
  }
  return tuple(sorted(ends.union(i for i in named if i is not None)))


def _byte_level_backend(metadata: Mapping[str, Any], tokens: list[str]) -> Any:
  """GPT-2 style BPE: bytes spelled as characters, merges from the file."""
  import tokenizers
  from tokenizers import models, normalizers, pre_tokenizers

  pre = metadata.get('tokenizer.ggml.pre')
  if pre not in _PATTERNS:
    raise ValueError(
      f'tokenizer.ggml.pre {pre!r} is not supported; allowed are '
      f'{", ".join(_PATTERNS)}.'
    )
  merges = metadata.get('tokenizer.ggml.merges')
  if not isinstance(merges, list):
    raise ValueError('the GGUF file has no tokenizer.ggml.merges.')
  pairs = [tuple(merge.split(' ')) for merge in merges]
  wrong = next((pair for pair in pairs if len(pair) != 2), None)
  if wrong is not None:
    raise ValueError(
      'tokenizer.ggml.merges must hold two tokens each, got '
      f'{" ".join(wrong)!r}.'
    )
  try:
    model = models.BPE(
      vocab={token: i for i, token in enumerate(tokens)},
      merges=pairs,
      ignore_merges=pre == 'llama-bpe',
    )
  except Exception as error:  # The library raises nothing more precise.
    raise ValueError(
      f'tokenizer.ggml.merges do not fit the tokens: {error}.'
    ) from None
  backend = tokenizers.Tokenizer(model)
  if pre == 'qwen2':
    backend.normalizer = normalizers.NFC()
  if _PATTERNS[pre] is None:
    splits = pre_tokenizers.Digits(individual_digits=True)
  else:
    splits = pre_tokenizers.Split(
      tokenizers.Regex(_PATTERNS[pre]), behavior='isolated'
    )
  to_bytes = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=_PATTERNS[pre] is None
  )
  backend.pre_tokenizer = pre_tokenizers.Sequence([splits, to_bytes])
  return backend


def _merges_from_scores(
  tokens: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
  """SentencePiece merges the pair whose union scores best; BPE has ranks.

  Every way to cut a token into two tokens becomes a merge, ranked by the
  score of the whole.
  """
  normal = {
    token: score
    for token, kind, score in zip(tokens, types, scores)
    if kind == _NORMAL
  }
  merges = []
  for token, score in normal.items():
    for cut in range(1, len(token)):
      left, right = token[:cut], token[cut:]
      if left in normal and right in normal:
        merges.append((-score, -cut, left, right))
  merges.sort(key=lambda merge: merge[:2])
  return [(left, right) for _, _, left, right in merges]


def _sentencepiece_backend(
  metadata: Mapping[str, Any],
  tokens: list[str],
  types: list[int],
  has_space_prefix: bool,
) -> Any:
  """SentencePiece BPE: spaces spelled out, unknown characters as bytes."""
  import tokenizers
  from tokenizers import models, normalizers

  scores = metadata.get('tokenizer.ggml.scores')
  if scores is None or len(scores) < len(tokens):
    raise ValueError(
      f'tokenizer.ggml.scores must have {len(tokens)} entries, got '
      f'{0 if scores is None else len(scores)}.'
    )
  unknown_id = _token_id(metadata, 'unknown_token_id', len(tokens))
  backend = tokenizers.Tokenizer(
    models.BPE(
      vocab={token: i for i, token in enumerate(tokens)},
      merges=_merges_from_scores(tokens, types, list(map(float, scores))),
      unk_token=None if unknown_id is None else tokens[unknown_id],
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  steps = [normalizers.Prepend(_SPACE)] if has_space_prefix else []
  steps.append(normalizers.Replace(' ', _SPACE))
  backend.normalizer = normalizers.Sequence(steps)
  return backend


def from_gguf(
  metadata: Mapping[str, Any],
) -> specjax_tokenizers.LibraryTokenizer:
  """The tokenizer inside a GGUF file.

  Padding at the end of the vocabulary is left out, so that files of one
  tokenizer with different widths have equal content.

  Args:
    metadata: the key-value part, from `checkpoints.gguf.read_metadata`.

  Raises:
    ValueError: unknown kind of tokenizer or of splitting, missing or
      inconsistent entries.

  Source: llama.cpp's `llama-vocab.cpp` for the meaning of the entries; the
    splitting patterns are those of the models' published tokenizer.json.
  """
  import tokenizers

  kind = metadata.get('tokenizer.ggml.model')
  if kind not in _MODELS:
    raise ValueError(
      f'tokenizer.ggml.model {kind!r} is not supported; allowed are '
      f'{", ".join(_MODELS)}.'
    )
  tokens, types = _tokens(metadata)
  is_byte_level = kind == 'gpt2'
  has_space_prefix = not is_byte_level and metadata.get(
    'tokenizer.ggml.add_space_prefix', True
  )
  if is_byte_level:
    backend = _byte_level_backend(metadata, tokens)
  else:
    backend = _sentencepiece_backend(metadata, tokens, types, has_space_prefix)
  added = {
    i: token
    for i, (token, kind) in enumerate(zip(tokens, types))
    if kind in (_CONTROL, _USER_DEFINED) and token
  }
  special_ids = frozenset(i for i in added if types[i] == _CONTROL)
  backend.add_special_tokens(
    [
      tokenizers.AddedToken(added[i], normalized=False, special=True)
      for i in sorted(special_ids)
    ]
  )
  backend.add_tokens(
    [
      tokenizers.AddedToken(token, normalized=False, special=False)
      for i, token in added.items()
      if i not in special_ids
    ]
  )
  if not is_byte_level:
    # Converters write runs of spaces as such; the vocabulary spells them.
    tokens = [t if t.strip(' ') else _SPACE * len(t) for t in tokens]
  bos_id = _token_id(metadata, 'bos_token_id', len(tokens))
  eos_id = _token_id(metadata, 'eos_token_id', len(tokens))
  # Where a file does not say, these two kinds begin a text with a token.
  is_begun = not is_byte_level or metadata['tokenizer.ggml.pre'] == 'llama-bpe'
  add_bos = metadata.get('tokenizer.ggml.add_bos_token', is_begun)
  add_eos = metadata.get('tokenizer.ggml.add_eos_token', False)
  if (add_bos and bos_id is None) or (add_eos and eos_id is None):
    raise ValueError(
      'tokenizer.ggml.add_bos_token and add_eos_token need '
      'tokenizer.ggml.bos_token_id and eos_token_id.'
    )
  return specjax_tokenizers.LibraryTokenizer(
    backend=backend,
    tokens=tuple(tokens),
    added_ids=frozenset(added),
    special_ids=special_ids,
    is_byte_level=is_byte_level,
    has_space_prefix=has_space_prefix,
    prefix_ids=(bos_id,) if add_bos else (),
    suffix_ids=(eos_id,) if add_eos else (),
    bos_id=bos_id,
    eos_id=eos_id,
    stop_ids=stop_ids(metadata),
    chat_template=metadata.get('tokenizer.chat_template'),
  )

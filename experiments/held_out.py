"""Proposers measured by decoding: beginnings of a library's modules.

stdlib           Python's standard library
stdlib_held_out  its modules that are kept from training
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from experiments import stdlib_text
from specjax import generation, metrics
from specjax.decode import Decoder
from specjax.models.load import Loaded
from specjax.proposers.base import Proposer
from specjax.requests import Request
from specjax.sampling import SamplingOptions
from specjax.shapes import Params
from specjax.tokenizers import Tokenizer
from specjax.training import data
from specjax.verify import chain

NAMED = {
  'stdlib': stdlib_text.training_files,
  'stdlib_held_out': stdlib_text.held_out_files,
}


def read(names: Iterable[str], tokenizer: Tokenizer) -> list[data.Document]:
  """The documents of files and of texts with a name."""
  paths: list[Any] = []
  for name in names:
    paths += NAMED[name]() if name in NAMED else [name]
  return list(data.read_documents(paths, tokenizer))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
  """Where prompts come from and how they are continued.

  Attributes:
    names: files, or keys of `NAMED`.
    num_prompts: evenly spaced over all of the text.
    prompt_length: tokens of each.
    num_new_tokens: to generate behind each; nothing ends a row early.
  """

  names: tuple[str, ...]
  num_prompts: int
  prompt_length: int = 128
  num_new_tokens: int = 128

  def requests(self, tokenizer: Tokenizer, temperature: float) -> list[Request]:
    """One request per prompt; request i has seed i."""
    documents = read(self.names, tokenizer)
    stream_n = np.concatenate([d.tokens for d in documents])
    last = len(stream_n) - self.prompt_length
    if last < 0:
      raise ValueError(
        f'the texts must have at least {self.prompt_length} tokens, the length '
        f'of a prompt, got {len(stream_n)}.'
      )
    starts = np.linspace(0, last, self.num_prompts).astype(int)
    return [
      Request(
        prompt_tokens=tuple(stream_n[i : i + self.prompt_length].tolist()),
        options=SamplingOptions(temperature=temperature),
        seed=seed,
        max_new_tokens=self.num_new_tokens,
      )
      for seed, i in enumerate(starts)
    ]


def measure(
  target: Loaded,
  proposer: Proposer,
  proposer_params: Params,
  requests: Sequence[Request],
) -> dict[str, Any]:
  """Decodes every request by itself, at any temperature by one program.

  Returns:
    The metrics of a result file, with 'tokens_per_second' (decoding alone) and
    'tokens', a list per request.
  """
  decoder = Decoder(
    target=target.model,
    proposer=proposer,
    verify=chain.RULES['rejection'],
    max_length=max(len(r.prompt_tokens) + r.max_new_tokens for r in requests),
  )
  results = list(
    generation.generate(
      decoder,
      {'target': target.params, 'proposer': proposer_params},
      requests,
      target.tokenizer,
      batch_size=1,
    )
  )
  total = results[0].tally
  for result in results[1:]:
    total += result.tally
  seconds = sum(result.timing.decode for result in results)
  return {
    **metrics.summarise(total),
    'tokens_per_second': total.num_emitted / seconds,
    'tokens': [list(result.tokens) for result in results],
  }

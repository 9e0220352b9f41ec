"""What narrow weights and caches cost in quality: perplexity and acceptance.

  python experiments/precision.py --target=big.gguf --draft=small.gguf \
    --prompts_jsonl=prompts.jsonl --limit=20 --json_out=precision.json

Every model reads the prompts as they are, once with the weights of each scheme:
bfloat16, int8, and int8 with an int8 cache. Perplexity is exp of the mean
negative log-likelihood of a text's tokens but the first. Two schemes of one
model agree on a token if its best successor is the same. Acceptance is the mean
of sum min(p, q) over the same places at temperature 1: what Leviathan et al.,
arXiv:2211.17192, call beta, under the target's text instead of generated text.

All of it goes through the cache and the products that decoding uses, in passes
of 16 tokens. The table goes to stdout, everything to --json_out.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import (
  conversions,
  drafts,
  prompts,
  script,
  surroundings,
  text_files,
)
from experiments.progress import Progress
from specjax.models import load
from specjax.models.base import LanguageModel
from specjax.sampling import SamplingOptions
from specjax.shapes import Array, Params

_ROWS = 16  # Of a pass.


class Scheme(NamedTuple):
  """How a model is held: `quantize` and `cache_dtype` of `load_model`."""

  name: str
  quantize: str
  cache_dtype: str | None = None


SCHEMES = (
  Scheme('bfloat16', 'none'),
  Scheme('int8', 'int8'),
  Scheme('int8, int8 cache', 'int8', 'int8'),
)


def define_flags(values: flags.FlagValues):
  string = lambda name, text: flags.DEFINE_string(
    name, None, text, flag_values=values
  )
  string('target', 'A model, as for generate.py.')
  string('draft', 'A smaller one with the same vocabulary.')
  string('prompts_jsonl', 'Texts: an object with a prompt per line.')
  flags.DEFINE_integer('limit', 20, 'The first so many.', flag_values=values)
  flags.DEFINE_integer(
    'length', 256, 'Tokens of a text that are read.', flag_values=values
  )
  string('json_out', 'Write everything to this file.')


FLAG_GROUPS = (('Precision', define_flags),)


def load_all(who: str, name: str) -> Iterator[tuple[str, load.Loaded]]:
  """The model in every scheme; those of the same weights share them."""
  weights = {}
  for scheme in SCHEMES:
    if scheme.quantize not in weights:
      with Progress(f'loading {who} {name}, {scheme.name}'):
        weights[scheme.quantize] = conversions.load_model(
          name, 'bfloat16', scheme.quantize, None
        )
    loaded = weights[scheme.quantize]
    model = dataclasses.replace(loaded.model, cache_dtype=scheme.cache_dtype)
    yield scheme.name, dataclasses.replace(loaded, model=model)


@functools.partial(jax.jit, static_argnames='model')
def laws(model: LanguageModel, params: Params, tokens_L: Array) -> Array:
  """Log-probabilities after every token, float32 [L, V]; L in whole passes."""
  size = tokens_L.shape[0]
  cache = model.init_cache(1, size, max_rewind=0)

  def read(cache, tokens_T):
    hidden, cache = model.apply(params, tokens_T[None], cache)
    logits_TV = model.unembed(params, hidden.last_BTD)[0]
    return cache, jax.nn.log_softmax(logits_TV, axis=-1)

  _, log_p_PTV = jax.lax.scan(read, cache, tokens_L.reshape(-1, _ROWS))
  return log_p_PTV.reshape(size, -1)


@jax.jit
def compare(log_p_LV: Array, log_q_LV: Array, mask_L: Array) -> Array:
  """Sums over the mask: same best token, sum min(p, q); float32 [2]."""
  same_L = jnp.argmax(log_p_LV, axis=-1) == jnp.argmax(log_q_LV, axis=-1)
  both_L = jnp.sum(jnp.exp(jnp.minimum(log_p_LV, log_q_LV)), axis=-1)
  return jnp.sum(jnp.where(mask_L, jnp.stack([same_L, both_L]), 0.0), axis=1)


@jax.jit
def surprise(log_p_LV: Array, tokens_L: Array, mask_L: Array) -> Array:
  """Minus the log-likelihood of what follows each token of the mask, summed."""
  log_p_L = jnp.take_along_axis(log_p_LV[:-1], tokens_L[1:, None], axis=1)[:, 0]
  return -jnp.sum(jnp.where(mask_L[:-1], log_p_L, 0.0))


@dataclasses.dataclass(kw_only=True)
class Sums:
  """What is added up over the texts.

  Attributes:
    surprise: by (who, scheme).
    agreement: by two of those: [same best token, sum min(p, q)].
    num_tokens: predicted tokens.
  """

  surprise: dict[tuple, float] = dataclasses.field(default_factory=dict)
  agreement: dict[tuple, np.ndarray] = dataclasses.field(default_factory=dict)
  num_tokens: int = 0

  def add(self, log_p: dict[tuple, Array], tokens_L: Array, num: int):
    # The last token has a law but no successor.
    mask_L = jnp.arange(tokens_L.shape[0]) < num - 1
    self.num_tokens += num - 1
    for one, p_LV in log_p.items():
      found = float(surprise(p_LV, tokens_L, mask_L))
      self.surprise[one] = self.surprise.get(one, 0.0) + found
      for other, q_LV in log_p.items():
        if one[0] == 'target':
          both = np.asarray(compare(p_LV, q_LV, mask_L))
          self.agreement[one, other] = (
            self.agreement.get((one, other), 0) + both
          )


def measure(
  models: dict[tuple, load.Loaded], texts: list[list[int]], length: int
) -> Sums:
  """Reads every text with every model."""
  sums = Sums()
  size = -(-length // _ROWS) * _ROWS
  with Progress('reading') as progress:
    for i, ids in enumerate(texts):
      progress.update(f'text {i + 1} of {len(texts)}')
      tokens_L = jnp.zeros(size, jnp.int32).at[: len(ids)].set(jnp.array(ids))
      sums.add(
        {
          who: laws(loaded.model, loaded.params, tokens_L)
          for who, loaded in models.items()
        },
        tokens_L,
        len(ids),
      )
  return sums


def rows_of(sums: Sums) -> list[dict[str, Any]]:
  """A row for every model and scheme."""
  drafts = [who for who in sums.surprise if who[0] == 'draft']
  rows = []
  for who, total in sums.surprise.items():
    row = {
      'model': who[0],
      'scheme': who[1],
      'perplexity': float(np.exp(total / sums.num_tokens)),
    }
    if who[0] == 'target':
      first = ('target', SCHEMES[0].name)
      row['same_best'] = float(sums.agreement[first, who][0] / sums.num_tokens)
      row['acceptance'] = {
        draft[1]: float(sums.agreement[who, draft][1] / sums.num_tokens)
        for draft in drafts
      }
    rows.append(row)
  return rows


def markdown(rows: list[dict[str, Any]]) -> str:
  names = [scheme.name for scheme in SCHEMES]
  lines = [
    '| model | weights | perplexity | best token as in bfloat16 | '
    + ' | '.join(f'acceptance of a draft in {name}' for name in names)
    + ' |',
    '|---' * (4 + len(names)) + '|',
  ]
  for row in rows:
    cells = [row['model'], row['scheme'], f'{row["perplexity"]:.3f}']
    if row['model'] == 'target':
      cells.append(f'{100 * row["same_best"]:.1f} %')
      cells += [f'{row["acceptance"][name]:.4f}' for name in names]
    else:
      cells += [''] * (1 + len(names))
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def main(values: flags.FlagValues):
  for name in ('target', 'draft', 'prompts_jsonl'):
    if values[name].value is None:
      raise ValueError(f'--{name} must be given; --help says how.')
  if values.length < 2:
    raise ValueError(f'--length must be >= 2, got {values.length}.')
  if values.json_out is not None:
    text_files.check_writable(values.json_out)
  rows = prompts.read(
    prompt=None,
    prompt_file=None,
    prompts_jsonl=values.prompts_jsonl,
    limit=values.limit,
    defaults=prompts.Conversation(
      turns=(), options=SamplingOptions(), seed=0, stop=(), max_new_tokens=1
    ),
  )
  models = {
    (who, scheme): loaded
    for who in ('target', 'draft')
    for scheme, loaded in load_all(who, values[who].value)
  }
  first = SCHEMES[0].name
  tokenizer = models['target', first].tokenizer
  drafts.check_same_ids(models['target', first], models['draft', first])
  context = min(loaded.model.context_length for loaded in models.values())
  if values.length > context:
    raise ValueError(
      f'--length must be at most {context}, the shorter context of the models, '
      f'got {values.length}.'
    )
  texts = [
    tokenizer.encode(row.turns[0], add_special=True)[: values.length]
    for row in rows
  ]
  texts = [ids for ids in texts if len(ids) > 1]
  if not texts:
    raise ValueError('--prompts_jsonl must have a text of two tokens or more.')
  sums = measure(models, texts, values.length)
  found = rows_of(sums)
  print(f'{len(texts)} texts, {sums.num_tokens} tokens predicted.\n')
  print(markdown(found))
  if values.json_out is not None:
    report = {
      'config': values.flag_values_dict(),
      'environment': surroundings.environment(),
      'num_tokens': sums.num_tokens,
      'rows': found,
    }
    text_files.write_json(values.json_out, report)


if __name__ == '__main__':
  sys.exit(script.run_main(main, FLAG_GROUPS))

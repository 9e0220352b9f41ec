r"""The scribe's apprentice: two slates that show speculative decoding.

  python experiments/story.py

A grand scholar knows ten million volumes, but has to carry the heavy ones to
the desk for every word. A quick apprentice writes ahead on a slate; the scholar
glances over all of it at once, stamps what stands as the scholar would have
written it, strikes the first word that does not, erases what is behind it, and
writes the right one. The edict is the scholar's, word for word.

Target and draft are toys with the laws written below, but the loop is the real
one. A toy hashes all that its cache holds: after a rollback that left a single
struck word behind, it would be lost for words.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
from absl import flags

from experiments import script, trace
from specjax import generation
from specjax.decode import Decoder
from specjax.models import toy
from specjax.models.base import LanguageModel
from specjax.models.toy import ToyModel
from specjax.proposers.base import Nothing, Proposer
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.stopping import Confidence
from specjax.requests import Request, Result
from specjax.sampling import SamplingOptions
from specjax.shapes import Params
from specjax.state import StepInfo
from specjax.verify import chain

# Every piece of the edict, and what it means.
GLOSSES = {
  '勅令：': 'edict:',
  '帝国は': 'the empire',
  '北方に': 'on the north',
  '課税': 'a tax',
  'する': 'lay',
  'であろう': 'shall',
  '。': '.',
  '税率は': 'the rate',
  '年に': 'a year',
  '五十': 'fifty',
  '百': 'a hundred',
  '千': 'a thousand',
  '枚の': 'pieces of',
  '金貨': 'gold',
  'とする': 'is to be',
}
PROMPT = ('勅令：',)
EDICT = (
  *('帝国は', '北方に', '課税', 'する', 'であろう', '。'),
  *('税率は', '年に', '百', '枚の', '金貨', 'とする', '。'),
)
# Where apprentice and scholar differ: in the rate, and the apprentice is never
# sure how a sentence ends, and waits there. (Laws of target and draft.)
RATE = EDICT[: EDICT.index('百')]
RATE_LAWS = (
  {'百': 0.7, '五十': 0.2, '千': 0.1},
  {'五十': 0.6, '百': 0.3, '千': 0.1},
)
UNSURE = (
  {'であろう': 0.4, 'とする': 0.3, '。': 0.3},
  {'とする': 0.4, 'であろう': 0.3, '。': 0.3},
)
NUM_DRAFT_TOKENS = 6


@dataclasses.dataclass(frozen=True)
class Pieces:
  """A tokenizer whose tokens are the pieces of the story."""

  pieces: tuple[str, ...] = tuple(GLOSSES)
  bos_id = eos_id = chat_template = None
  stop_ids = ()

  @property
  def vocab_size(self) -> int:
    return len(self.pieces)

  def ids(self, pieces: Sequence[str]) -> tuple[int, ...]:
    return tuple(map(self.pieces.index, pieces))

  def decode(self, ids, *, skip_special=False, is_start=False) -> str:
    del skip_special, is_start  # Every token is text.
    return ''.join(self.pieces[i] for i in ids)

  def token_bytes(self, token_id: int) -> bytes:
    return self.pieces[token_id].encode('utf-8')

  def id_to_token(self, token_id: int) -> str:
    return self.pieces[token_id]

  def is_special(self, token_id: int) -> bool:
    del token_id
    return False

  def content(self) -> tuple[str, ...]:
    return self.pieces


TOKENIZER = Pieces()
MODEL = ToyModel(vocab_size=TOKENIZER.vocab_size)


def written(laws: Mapping[tuple[str, ...], Mapping[str, float]]) -> Params:
  """Parameters of a toy with these laws behind these texts.

  Behind any other text all pieces are alike, and the first is the likeliest.

  Args:
    laws: by what has been written; what a law does not name has 1e-9.

  Raises:
    ValueError: two texts have the same hash.
  """
  table = jnp.zeros((MODEL.table_size, MODEL.vocab_size))
  rows = set()
  for text, law in laws.items():
    ids = jnp.asarray(TOKENIZER.ids((*PROMPT, *text)), jnp.int32)
    hashes = toy.hash_pair(ids, jnp.arange(len(ids)))
    row = int(jnp.sum(hashes, dtype=jnp.uint32) % MODEL.table_size)
    if row in rows:
      raise ValueError(f'the hash of {text} is that of another text.')
    rows.add(row)
    probs = [law.get(piece, 1e-9) for piece in TOKENIZER.pieces]
    table = table.at[row].set(jnp.log(jnp.asarray(probs)))
  return {'table': table}


def pair() -> dict[str, Params]:
  """Parameters of the scholar ('target') and of the apprentice ('proposer')."""
  sure = lambda piece: {piece: 1.0}
  texts = {EDICT[:i]: sure(piece) for i, piece in enumerate(EDICT)}
  # Behind the apprentice's own rate both would go on in the same way.
  for rate in ('五十', '千'):
    rest = EDICT[len(RATE) + 1 :]
    texts |= {(*RATE, rate, *rest[:i]): sure(x) for i, x in enumerate(rest)}
  unsure = {
    text: law
    for text, certain in texts.items()
    for law in UNSURE
    if certain == sure(max(law, key=law.get))
  }
  target_law, draft_law = RATE_LAWS
  return {
    'target': written(texts | {RATE: target_law}),
    'proposer': written(texts | unsure | {RATE: draft_law}),
  }


def apprentice() -> DraftModel:
  """Drafts up to six pieces, and none behind one it is not half sure of."""
  return DraftModel(
    model=MODEL,
    num_draft_tokens=NUM_DRAFT_TOKENS,
    stop=Confidence(least=0.5),
  )


def tell(
  on_step: Callable[[StepInfo], None] | None = None,
  *,
  proposer: Proposer | None = None,
  target: LanguageModel = MODEL,
  rule: chain.Rule = chain.Greedy(),
  options: SamplingOptions = SamplingOptions(),
  seeds: Sequence[int] = (0,),
) -> list[Result]:
  """Writes the edict, once for every seed.

  Args:
    on_step: sees every step, as of `generation.generate`.
    proposer: drafts with the apprentice's parameters; None: the apprentice, and
      `Nothing()` is the scholar alone.
    target: with the scholar's parameters; for whoever wants to break it.
    rule: decides on drafts.
    options: sampling settings.
    seeds: decoded side by side.
  """
  proposer = apprentice() if proposer is None else proposer
  decoder = Decoder(
    target=target, proposer=proposer, verify=rule, max_length=24
  )
  params = pair()
  if isinstance(proposer, Nothing):
    params['proposer'] = ()
  requests = [
    Request(
      prompt_tokens=TOKENIZER.ids(PROMPT),
      options=options,
      seed=seed,
      max_new_tokens=len(EDICT),
    )
    for seed in seeds
  ]
  return list(
    generation.generate(
      decoder,
      params,
      requests,
      TOKENIZER,
      batch_size=len(requests),
      on_step=on_step,
    )
  )


def main(values: flags.FlagValues):
  del values  # There is nothing to choose.
  shown = trace.Trace(TOKENIZER, sys.stdout, sys.stdout.isatty(), num_rows=1)
  print(f'each line is a step: {shown.legend()}')
  (result,) = tell(shown)
  print(result.text)


if __name__ == '__main__':
  sys.exit(script.run_main(main, ()))

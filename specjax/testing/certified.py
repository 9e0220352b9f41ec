"""The loops that the certificate runs: which parts, and on which rows."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decode import Decoder
from specjax.models.heads.toy import ToyHead, ToyHeads
from specjax.models.toy import ToyModel
from specjax.models.translated import Translated
from specjax.proposers.base import Nothing, Proposer
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.feature_fed import FeatureFed
from specjax.proposers.medusa import Medusa
from specjax.proposers.ngram import NGram
from specjax.proposers.stopping import Acceptance, Confidence, Cost
from specjax.sampling import SamplingOptions
from specjax.shapes import Params
from specjax.testing import loops, mutants
from specjax.verify import chain

VOCAB_SIZE = 4
NUM_TOKENS = 7
MAX_LENGTH = NUM_TOKENS + 4  # The longest prompt below has four tokens.
ROWS = 4096


def _group(transform, prompt, *, stop_ids=(), num_tokens=NUM_TOKENS, **options):
  return loops.Group(
    transform=transform,
    options=SamplingOptions(**options),
    prompt=prompt,
    stop_ids=stop_ids,
    num_tokens=num_tokens,
  )


GROUPS = (
  _group('none', (1,), temperature=0.0),
  _group('none', (2, 0), temperature=0.5),
  _group('none', (3, 1, 2, 1), temperature=1.0),
  _group('none', (0, 0, 0), temperature=1.7),
  _group('top_k', (2,), temperature=1.0, top_k=2),
  _group('top_p', (1, 3), temperature=1.0, top_p=0.8),
  _group('min_p', (2, 2, 1), temperature=1.7, min_p=0.4),
  _group('repetition', (0, 1), temperature=1.0, repetition_penalty=1.8),
  _group(
    'presence+frequency',
    (3, 2, 1, 0),
    temperature=0.5,
    presence_penalty=0.4,
    frequency_penalty=0.3,
  ),
  _group('bias', (3,), temperature=0.5, logit_bias=((0, 0.8), (2, -0.6))),
  _group('banned', (3, 3), temperature=1.7, banned_ids=(3,)),
  _group('allowed', (1, 2, 3), temperature=1.0, allowed_ids=(0, 2)),
  _group(
    'bias+penalties+top_k+top_p+min_p',
    (0, 3, 0),
    temperature=1.7,
    top_k=3,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.3,
    presence_penalty=0.2,
    frequency_penalty=-0.2,
    logit_bias=((1, 0.5),),
  ),
  _group(
    'bias+penalties+banned',
    (1, 1),
    temperature=0.0,
    repetition_penalty=1.5,
    frequency_penalty=0.7,
    logit_bias=((2, 1.0),),
    banned_ids=(0,),
  ),
  _group('stop', (2, 1), temperature=1.0, stop_ids=(2,)),
  _group('stop+top_p', (0,), temperature=1.7, top_p=0.7, stop_ids=(1, 3)),
  _group('limit', (1, 0, 2), temperature=1.0, num_tokens=4),
)


# Rules that end drafts: a name, the rule, and a verification. The laws of the
# toy cross the threshold, and the costs let 0, 1 and 2 drafts be best at times.
STOPS = (
  ('draft, confidence', Confidence(least=0.45), chain.Block()),
  ('draft, cost', Cost(step_costs=(1.0, 1.5, 2.0)), chain.Rejection()),
)
MORE_STOPS = (
  ('draft, acceptance', Acceptance(least=0.6), chain.Block()),
  ('ngram, acceptance', Acceptance(least=0.6), chain.Rejection()),
)
# Heads: a name, and the rules they are verified with; then all of them. A
# feature-fed head is MTP or EAGLE; one has an id less than the target.
HEADS = (
  ('eagle', ('coupled',)),
  ('eagle, reduced vocabulary', ('block',)),
  ('medusa', ('rejection',)),
)
REDUCED_IDS = (0, 1, 3)
# The groups they run on: each temperature, penalties, a filter, a stop id.
# (Coupled text is compared with that of plain decoding, so it runs on all.)
STOPPED_GROUPS = tuple(GROUPS[i] for i in (1, 3, 5, 8, 14, 16))


# Fewer tokens of a larger vocabulary: two steps at least.
FOREIGN_TOKENS = 5
FOREIGN_GROUPS = tuple(
  dataclasses.replace(GROUPS[i], num_tokens=FOREIGN_TOKENS)
  for i in (1, 3, 5, 8, 14)
)
FOREIGN_RULES = (chain.Rejection(), chain.Coupled(), chain.Block())


def foreign_draft() -> tuple[Translated, Params]:
  """A toy that drafts in a vocabulary that is not its own.

  It has two ids that the target lacks, and lacks two of the target's, which are
  spelled by two and by three of its own.
  """
  target, draft = jax.random.split(jax.random.key(5))
  own = ToyModel(vocab_size=5)
  model = Translated(model=own, vocab_size=VOCAB_SIZE + 1, max_ids=3)
  tables = {
    'to_draft': [3, -1, 0, 2, -1],
    'spelled': [[3, 0, 0], [1, 2, 0], [0, 0, 0], [2, 0, 0], [4, 3, 1]],
    'num_ids': [1, 2, 1, 1, 3],
  }
  table = ToyModel(vocab_size=model.vocab_size).init(target)
  return model, {
    'target': table,
    'proposer': {
      'model': own.init(draft),
      **{name: jnp.asarray(x, jnp.int32) for name, x in tables.items()},
    },
  }


def foreign_programs(rules, rounds: int) -> list[loops.Program]:
  """The loops in which it drafts; plain decoding first, for `Coupled`."""
  model, params = foreign_draft()
  proposers = [('none', Nothing(), chain.Coupled())]
  drafting = DraftModel(model=model, num_draft_tokens=2)
  proposers += [('draft, other ids', drafting, rule) for rule in rules]
  return [
    loops.Program(
      proposer=name,
      decoder=Decoder(
        target=ToyModel(vocab_size=model.vocab_size),
        proposer=proposer,
        verify=rule,
        max_length=FOREIGN_TOKENS + 4,
        prefill_chunk=2,
      ),
      params=params,
      groups=FOREIGN_GROUPS,
      rows=ROWS,
      rounds=rounds,
    )
    for name, proposer, rule in proposers
  ]


def _greedy(groups):
  return tuple(
    dataclasses.replace(
      g, options=dataclasses.replace(g.options, temperature=0.0)
    )
    for g in groups
  )


def head_of(name: str, model: ToyModel, num_draft_tokens: int) -> Proposer:
  """The toy proposer with one of the names of `HEADS`."""
  if name == 'medusa':
    heads = ToyHeads(target=model, num_heads=num_draft_tokens)
    return Medusa(heads=heads, num_draft_tokens=num_draft_tokens)
  num_ids = len(REDUCED_IDS) if 'reduced' in name else None
  head = ToyHead(target=model, num_ids=num_ids)
  return FeatureFed(head=head, num_draft_tokens=num_draft_tokens)


def head_programs(*, quick: bool) -> list[loops.Program]:
  """Every head; with every rule if not `quick`."""
  model, params = loops.toy_pair(jax.random.key(1), VOCAB_SIZE)
  found = []
  for name, rules in HEADS:
    for rule in rules if quick else chain.RULES:
      groups = GROUPS if rule == 'coupled' or not quick else STOPPED_GROUPS
      is_greedy = rule == 'greedy'
      ids = REDUCED_IDS if 'reduced' in name else None
      found.append(
        loops.Program(
          proposer=name,
          decoder=Decoder(
            target=model,
            proposer=head_of(name, model, 2),
            verify=chain.RULES[rule],
            max_length=MAX_LENGTH,
            prefill_chunk=2,
          ),
          params=loops.toy_head_params(params, ids),
          groups=_greedy(groups) if is_greedy else groups,
          rows=64 if is_greedy else ROWS,
          rounds=1 if quick or is_greedy else 8,
        )
      )
  return found


def programs(*, quick: bool) -> list[loops.Program]:
  """The loops of the certificate.

  quick: every proposer x rule with two drafts, rules that end drafts, at
  several widths, and heads with a rule each. Otherwise eight times the rows,
  one and four drafts as well, and models with a window.
  """
  rounds = 1 if quick else 8
  lengths = (2,) if quick else (2, 1, 4)
  found = []
  for window in (None,) if quick else (None, 3):
    model, params = loops.toy_pair(jax.random.key(1), VOCAB_SIZE, window)
    groups = GROUPS
    if window is not None:
      groups = [
        dataclasses.replace(g, transform=f'{g.transform}, window {window}')
        for g in GROUPS
      ]
    for k in lengths if window is None else (2,):
      proposers = {
        'none': Nothing(),
        'draft': DraftModel(model=model, num_draft_tokens=k),
        'ngram': NGram(num_draft_tokens=k, max_ngram=2),
      }
      if k != lengths[0]:
        del proposers['none']
      for name, proposer in proposers.items():
        for rule in chain.RULES.values():
          is_greedy = isinstance(rule, chain.Greedy)
          found.append(
            loops.Program(
              proposer=name,
              decoder=Decoder(
                target=model,
                proposer=proposer,
                verify=rule,
                max_length=MAX_LENGTH,
                prefill_chunk=2,
              ),
              params=params,
              groups=_greedy(groups) if is_greedy else groups,
              rows=64 if is_greedy else ROWS,
              rounds=1 if is_greedy else rounds,
            )
          )
  model, params = loops.toy_pair(jax.random.key(1), VOCAB_SIZE)
  for name, stop, rule in STOPS if quick else (*STOPS, *MORE_STOPS):
    parts = {'num_draft_tokens': 2, 'stop': stop}
    proposer = DraftModel(model=model, **parts)
    if name.startswith('ngram'):
      proposer = NGram(max_ngram=2, **parts)
    found.append(
      loops.Program(
        proposer=name,
        decoder=Decoder(
          target=model,
          proposer=proposer,
          verify=rule,
          max_length=MAX_LENGTH,
          widths=(1, 2, 3),
          prefill_chunk=2,
        ),
        params=params,
        groups=STOPPED_GROUPS,
        rows=ROWS,
        rounds=rounds,
      )
    )
  found += head_programs(quick=quick)
  found += foreign_programs(FOREIGN_RULES[: 2 if quick else None], rounds)
  found.append(
    mutants.pair_program('V4b', chain.Rejection(), 1, 4 * ROWS, rounds=rounds)
  )
  found.append(
    mutants.pair_program(
      'BV', chain.Block(), 2, 4 * ROWS, num_tokens=7, rounds=rounds
    )
  )
  return found

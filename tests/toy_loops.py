"""Decoders on the toy that many tests share, so that each compiles once.

Everything that a test varies is traced: parameters, prompts, limits, stop ids,
settings, and which draft of a step is spoiled.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, testing
from specjax import noise as noise_lib
from specjax import state as states
from specjax.models.toy import ToyModel
from specjax.proposers.base import Nothing, Proposer
from specjax.proposers.draft_model import DraftModel
from specjax.sampling import SamplingOptions, stack_options
from specjax.verify import chain

B, L, V, J = 16, 40, 16, 3
GREEDY = SamplingOptions()
WARM = SamplingOptions(temperature=1.0)
TOY = ToyModel(vocab_size=V, context_length=64)
PROMPTS = ((7,), (3, 1), (5, 5, 5, 5, 5), tuple(range(9)))
ALL = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Unanimous:
  """Rejection, coupled and block at once: the fewest accepted drafts.

  Where the draft is the target, each of them must accept all.
  """

  name = 'unanimous'
  draft_purpose = noise_lib.TOKEN

  def __call__(self, *args) -> chain.Verdict:
    rules = (chain.Coupled(), chain.Rejection(), chain.Block())
    verdicts = [rule(*args) for rule in rules]
    accepted = jnp.stack([verdict.num_accepted for verdict in verdicts])
    return verdicts[0]._replace(num_accepted=jnp.min(accepted))


@dataclasses.dataclass(frozen=True)
class Scripted:
  """Spoils one draft of a step: `params['script'][b, length]`, or none at -1.

  At temperature 0, with draft == target, exactly so many are accepted.
  """

  proposer: Proposer

  def __getattr__(self, name: str) -> Any:
    return getattr(self.proposer, name)

  def propose(self, params, keys_BK, state, target, tokens_BL, length_B, *rest):
    proposal, state = self.proposer.propose(
      params, keys_BK, state, target, tokens_BL, length_B, *rest
    )
    spoiled_B1 = jnp.take_along_axis(
      params['script'], length_B[:, None], axis=1
    )
    is_spoiled_BK = jnp.arange(keys_BK.shape[1])[None, :] == spoiled_B1
    draft_BK = (proposal.draft_BK + is_spoiled_BK) % V
    return proposal._replace(draft_BK=draft_BK), state


def draft_decoder(k: int, model: ToyModel = TOY) -> decode.Decoder:
  """The decoder for K drafts that most tests share."""
  return decode.Decoder(
    target=model,
    proposer=Scripted(DraftModel(model=model, num_draft_tokens=k)),
    verify=Unanimous(),
    max_length=L,
    prefill_chunk=4,
  )


def plain_decoder(rule: chain.Rule, width: int | None) -> decode.Decoder:
  return decode.Decoder(
    target=TOY,
    proposer=Nothing(),
    verify=rule,
    max_length=L,
    width=width,
    prefill_chunk=4,
  )


def make_params(*, twins: bool, seed: int = 0, script=-1) -> dict[str, Any]:
  """Parameters; `twins`: draft == target."""
  target_key, draft_key = jax.random.split(jax.random.key(seed))
  target = TOY.init(target_key)
  return {
    'target': target,
    'proposer': target if twins else TOY.init(draft_key),
    'script': jnp.broadcast_to(jnp.asarray(script, jnp.int32), (B, L)),
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One request."""

  prompt: Sequence[int] = (1, 2, 3)
  max_new: int = 20
  seed: int = 0
  stop: Sequence[int] = ()
  options: SamplingOptions = GREEDY


# Fills a batch up: a row that is done before it begins.
FILLER = Row(prompt=(0,), max_new=0)


@dataclasses.dataclass(frozen=True)
class Run:
  """A decoder and the state of its batch, on the host where it is looked at."""

  decoder: decode.Decoder
  params: Any
  rows: Sequence[Row]
  sampling: Any
  state: states.DecodeState

  def go_on(self, max_steps: int) -> 'Run':
    state = decode.run(
      self.decoder,
      self.params,
      self.state,
      self.sampling,
      jnp.int32(max_steps),
    )
    return dataclasses.replace(self, state=state)

  def tokens(self, b: int) -> list[int]:
    """What row b emitted."""
    start, end = len(self.rows[b].prompt), int(self.state.length_B[b])
    return np.asarray(self.state.tokens_BL[b, start:end]).tolist()

  def emitted(self, b: int, name: str) -> np.ndarray:
    """A record of the emitted tokens of row b, such as 'source_BL'."""
    start, end = len(self.rows[b].prompt), int(self.state.length_B[b])
    return np.asarray(getattr(self.state, name)[b, start:end])

  def reason(self, b: int) -> str:
    return states.FINISH_REASONS[int(self.state.finish_reason_B[b])]


def begin(
  decoder: decode.Decoder,
  params: Any,
  rows: Sequence[Row],
  *,
  size: int = B,
  junk: int | np.ndarray = 0,
  full: bool = False,
) -> Run:
  """Prefills a batch.

  Args:
    decoder: any.
    params: of target and proposer.
    rows: at most `size`; the rest is filled up.
    size: B.
    junk: what stands behind the prompts and in unused places.
    full: with the optional parts of the sampling settings, used or not.
  """
  rows = [*rows, *[FILLER] * (size - len(rows))]
  tokens_BL = np.broadcast_to(np.asarray(junk, np.int32), (size, L)).copy()
  stop_BJ = np.full((size, J), -1, np.int32)
  for b, row in enumerate(rows):
    tokens_BL[b, : len(row.prompt)] = row.prompt
    stop_BJ[b, : len(row.stop)] = row.stop
  options = [row.options for row in rows]
  if full:
    other = SamplingOptions(presence_penalty=1.0, banned_ids=(0,))
    options.append(other)
  sampling = stack_options(options, V)
  sampling = jax.tree.map(lambda x: x[:size], sampling)
  requests = states.Requests(
    tokens_BL=jnp.asarray(tokens_BL),
    prompt_length_B=jnp.asarray([len(row.prompt) for row in rows], jnp.int32),
    max_new_tokens_B=jnp.asarray([row.max_new for row in rows], jnp.int32),
    seed_B=jnp.asarray([row.seed for row in rows], jnp.uint32),
    stop_ids_BJ=jnp.asarray(stop_BJ),
  )
  state = decode.init(decoder, params, requests)
  return Run(decoder, params, rows, sampling, state)


def generate(decoder, params, rows, **options) -> Run:
  """Decodes a batch to its end."""
  return begin(decoder, params, rows, **options).go_on(ALL)


def plain_greedy(
  params: Any, row: Row, model: ToyModel = TOY
) -> tuple[list[int], str]:
  """An independent loop in NumPy: what a row must emit, and why it ends."""
  logits = testing.toy_logits(model, params['target'])
  room = L - len(row.prompt)
  emitted = []
  while len(emitted) < min(row.max_new, room):
    text = np.asarray([[*row.prompt, *emitted]])
    law = testing.reference_law(
      logits(text), row.options, row.prompt, np.asarray([emitted], np.int64)
    )
    emitted.append(int(np.argmax(law)))
    if emitted[-1] in row.stop:
      return emitted, 'stop'
  return emitted, 'length' if row.max_new <= room else 'context'


def poisoned(table, text, bad):
  """The table with one bad entry in the row that the text leads to."""
  table = np.array(table)
  marked = np.tile(np.arange(len(table))[:, None], (1, table.shape[1]))
  row = testing.toy_logits(TOY, {'table': marked})(np.asarray([text]))
  table[int(row[0, 0]), -1] = bad
  return jnp.asarray(table)

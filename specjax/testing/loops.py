"""Runs thousands of rows of small models through one compiled loop."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax import state as states
from specjax.models.toy import ToyModel
from specjax.sampling import SamplingOptions, stack_options
from specjax.shapes import Key, Params

_UNBOUNDED = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """Rows of a batch that share everything but their seed.

  Attributes:
    transform: what its settings are called.
    options: the settings.
    prompt: its tokens.
    stop_ids: ids that end a row.
    num_tokens: tokens to emit, unless stopped.
  """

  transform: str
  options: SamplingOptions
  prompt: tuple[int, ...]
  stop_ids: tuple[int, ...] = ()
  num_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Program:
  """One compiled loop and the batch that it runs.

  Attributes:
    proposer: the name of the proposer.
    decoder: a `Decoder`, or a mutant that has its methods.
    params: {'target': ..., 'proposer': ...}.
    groups: the rows of its batch.
    rows: rows per group and round.
    rounds: how often the batch runs, each time with seeds of its own.
  """

  proposer: str
  decoder: Any
  params: Params
  groups: Sequence[Group]
  rows: int
  rounds: int = 1


def table_model(probs: Sequence[float]) -> tuple[ToyModel, Params]:
  """A context-free model: the same law everywhere."""
  model = ToyModel(vocab_size=len(probs), table_size=1)
  return model, {'table': jnp.log(jnp.asarray([probs], jnp.float32))}


def toy_pair(
  key: Key, vocab_size: int, window: int | None = None
) -> tuple[ToyModel, Params]:
  """A toy model, and parameters of a target and of a distorted draft."""
  target_key, draft_key = jax.random.split(key)
  model = ToyModel(vocab_size=vocab_size, window=window)
  target = model.init(target_key)['table']
  other = model.init(draft_key)['table']
  draft = 0.6 * target + 0.8 * other
  return model, {'target': {'table': target}, 'proposer': {'table': draft}}


def toy_head_params(params: Params, ids: Sequence[int] | None = None) -> Params:
  """A toy pair's parameters with the draft's table in a head's hands.

  Args:
    params: of `toy_pair`.
    ids: of a reduced vocabulary; None: all.
  """
  if ids is None:
    return params
  ids_R = jnp.asarray(ids, jnp.int32)
  table = params['proposer']['table'][:, ids_R]
  return {**params, 'proposer': {'table': table, 'ids': ids_R}}


def make_requests(
  groups: Sequence[Group], rows: int, max_length: int, first_seed: int = 0
) -> states.Requests:
  """`rows` requests per group, group after group, seeds counted up."""
  num_stop = max(1, max(len(g.stop_ids) for g in groups))
  tokens_GL = np.zeros((len(groups), max_length), np.int32)
  stop_GJ = np.full((len(groups), num_stop), -1, np.int32)
  for g, group in enumerate(groups):
    tokens_GL[g, : len(group.prompt)] = group.prompt
    stop_GJ[g, : len(group.stop_ids)] = group.stop_ids
  each = lambda values_G: jnp.asarray(
    np.repeat(np.asarray(values_G, np.int32), rows, axis=0)
  )
  seed_B = first_seed + np.arange(len(groups) * rows, dtype=np.uint32)
  return states.Requests(
    tokens_BL=each(tokens_GL),
    prompt_length_B=each([len(g.prompt) for g in groups]),
    max_new_tokens_B=each([g.num_tokens for g in groups]),
    seed_B=jnp.asarray(seed_B, jnp.uint32),
    stop_ids_BJ=each(stop_GJ),
  )


def run_states(program: Program) -> list[states.DecodeState]:
  """The last state of every round."""
  decoder, groups, rows = program.decoder, program.groups, program.rows
  options = [g.options for g in groups for _ in range(rows)]
  sampling = stack_options(options, decoder.target.vocab_size)
  states = []
  for i in range(program.rounds):
    first_seed = i * len(options)
    requests = make_requests(groups, rows, decoder.max_length, first_seed)
    state = decode.init(decoder, program.params, requests)
    state = decode.run(
      decoder, program.params, state, sampling, jnp.int32(_UNBOUNDED)
    )
    states.append(state)
  return states


def observe(program: Program) -> list[np.ndarray]:
  """Runs the batch; per group its outcomes, int [rows * rounds, num_tokens].

  Behind a row's end stands -1. The seeds are those of any other program with
  as many groups and rows. A row that went on past its limit, or that changed
  its prompt, counts as an outcome of its own, which no law has.
  """
  found = [[] for _ in program.groups]
  for state in run_states(program):
    tokens_BL, length_B = (
      np.asarray(state.tokens_BL),
      np.asarray(state.length_B),
    )
    index_1L = np.arange(tokens_BL.shape[1])[None, :]
    tokens_BL = np.where(index_1L < length_B[:, None], tokens_BL, -1)
    for g, group in enumerate(program.groups):
      block = tokens_BL[g * program.rows : (g + 1) * program.rows]
      start = len(group.prompt)
      end = start + group.num_tokens
      is_bad = np.any(block[:, :start] != np.asarray(group.prompt), axis=1)
      is_bad |= np.any(block[:, end:] >= 0, axis=1)
      block = np.where(is_bad[:, None], 2**10, block)
      found[g].append(block[:, start:end])
  return [np.concatenate(blocks) for blocks in found]


def count_drafts(program: Program) -> tuple[int, int]:
  """How many drafts were verified, and how many of them were accepted."""
  num_drafted = num_accepted = 0
  for state in run_states(program):
    num_drafted += int(np.sum(np.asarray(state.num_draft_BL, np.int64)))
    is_accepted_BL = np.asarray(state.source_BL) == states.ACCEPTED
    num_accepted += int(np.sum(is_accepted_BL))
  return num_drafted, num_accepted

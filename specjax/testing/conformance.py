"""The laws that every part must obey; yours too.

Each function takes a part and raises AssertionError with a sentence that says
which law it breaks. They are slow, clear and made for tests.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax import noise as noise_lib
from specjax import state as states
from specjax.models.base import LanguageModel
from specjax.proposers.base import Proposer, TargetView
from specjax.sampling import Sampling, SamplingOptions, stack_options
from specjax.shapes import Array, Key, Params
from specjax.testing import exact, loops
from specjax.verify import chain

# A right part fails a test of fixed seeds with this chance at most.
ALPHA = 1e-4


def check_static(part: Any):
  """A part is static: hashable, and equal to itself when built again."""
  again = dataclasses.replace(part)
  _require(
    hash(again) == hash(part) and again == part,
    f'{part} must be equal to itself when built again, or each building '
    'compiles the loop anew',
  )


def check_rule(
  rule: chain.Rule, key: Key, *, is_sampled: bool = True, rows: int = 1 << 14
):
  """Checks a verification rule that claims to be lossless.

  One-hot target laws are followed exactly; nothing at or beyond `num_draft`
  is read; and, with `is_sampled`, the joint law of K + 1 tokens is the
  target's, for drawn and for certain drafts, for K drafts and for fewer.

  Args:
    rule: the rule.
    key: consumed.
    is_sampled: False for rules of temperature 0 alone.
    rows: verifications per test.

  Raises:
    AssertionError: naming the law that does not hold.
  """
  check_static(rule)
  k, v = 2, 3
  p_key, q_key, seed_key = jax.random.split(key, 3)
  draw_tables = lambda key: [
    jax.random.normal(jax.random.fold_in(key, depth), (v,) * (depth + 1))
    for depth in range(k + 1)
  ]
  p_tables, q_tables = draw_tables(p_key), draw_tables(q_key)
  seed_B = jax.random.bits(seed_key, (rows,), jnp.uint32)
  noise = _make_noise(seed_B, rule.draft_purpose, k, v)
  for is_one_hot in (True, False) if is_sampled else (True,):
    tables = p_tables
    if is_one_hot:
      tables = [_one_hot_logits(table) for table in p_tables]
    law = _joint_law(tables)
    for is_drawn in (True, False):
      for num_draft in range(k + 1):
        count = _count_outcomes(
          rule, tables, q_tables, noise, num_draft, is_drawn
        )
        result = exact.chi_square(count.ravel(), law.ravel())
        _require(
          result.p_value >= ALPHA,
          f'{rule} must emit the law of the target: {num_draft} of {k} '
          f'drafts, {"drawn" if is_drawn else "certain"}, '
          f'{"one-hot" if is_one_hot else "random"} target: {result}',
        )


def _one_hot_logits(table: Array) -> Array:
  best = jax.nn.one_hot(jnp.argmax(table, axis=-1), table.shape[-1])
  return jnp.where(best > 0, 0.0, -jnp.inf)


def _joint_law(tables: list[Array]) -> np.ndarray:
  law = np.ones(())
  for table in tables:
    rows = np.asarray(jax.nn.softmax(table, axis=-1), np.float64)
    law = law[..., None] * rows / rows.sum(axis=-1, keepdims=True)
  return law


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _make_noise(
  seed_B: Array, draft_purpose: int, k: int, v: int
) -> tuple[chain.Noise, Array, Array]:
  """A verification's noise, that of the drafts, and that of what follows."""
  length, other_purpose = jnp.int32(5), 17
  gumbel = jax.vmap(lambda key: noise_lib.gumbel(key, v))

  def make(seed: Array):
    noise = chain.make_noise(seed, length, k)
    noise = noise._replace(
      token_N=gumbel(noise.token_N), residual_N=gumbel(noise.residual_N)
    )
    draft_K = noise_lib.draw_keys(seed, draft_purpose, length, k)
    fresh_N = noise_lib.draw_keys(seed, other_purpose, length, k + 1)
    return noise, gumbel(draft_K), gumbel(fresh_N)

  return jax.vmap(make)(seed_B)


@functools.partial(jax.jit, static_argnames=('rule', 'is_drawn'))
def _verify_paths(
  rule: chain.Rule,
  is_drawn: bool,
  p_tables: list[Array],
  q_tables: list[Array],
  noise: tuple[chain.Noise, Array, Array],
  num_draft: Array,
) -> tuple[Array, Array]:
  """K + 1 tokens of every row, and how many drafts it accepted.

  What the rule does not emit is sampled from the target.
  """
  k = len(p_tables) - 1

  def verify(rule_noise, draft_noise_KV, fresh_noise_NV):
    draft, rows = (), []
    for i in range(k):
      log_weights_V = q_tables[i][draft]
      draft += (jnp.argmax(log_weights_V + draft_noise_KV[i] * is_drawn),)
      # What lies at and beyond num_draft must not be looked at.
      rows.append(jnp.where(i < num_draft, log_weights_V, jnp.nan))
    verdict = rule(
      rule_noise,
      jnp.stack(draft).astype(jnp.int32),
      jnp.stack(rows) if is_drawn else None,
      num_draft,
      jnp.stack([p_tables[i][draft[:i]] for i in range(k + 1)]),
    )
    path = ()
    for i in range(k + 1):
      own = jnp.argmax(p_tables[i][path] + fresh_noise_NV[i])
      own = jnp.where(i == verdict.num_accepted, verdict.next_token, own)
      kept = draft[i] if i < k else own
      path += (jnp.where(i < verdict.num_accepted, kept, own),)
    return jnp.stack(path), verdict.num_accepted

  return jax.vmap(verify)(*noise)


def _count_outcomes(
  rule: chain.Rule,
  p_tables: list[Array],
  q_tables: list[Array],
  noise: tuple[chain.Noise, Array, Array],
  num_draft: int,
  is_drawn: bool,
) -> np.ndarray:
  path_BN, accepted_B = _verify_paths(
    rule, is_drawn, p_tables, q_tables, noise, jnp.int32(num_draft)
  )
  _require(
    int(accepted_B.min()) >= 0 and int(accepted_B.max()) <= num_draft,
    f'{rule} must accept 0..{num_draft} drafts, got '
    f'{int(accepted_B.min())}..{int(accepted_B.max())}',
  )
  count = np.zeros((p_tables[0].shape[-1],) * len(p_tables), np.int64)
  np.add.at(count, tuple(np.asarray(path_BN).T), 1)
  return count


def check_proposer(
  proposer: Proposer,
  target: LanguageModel,
  params: Params,
  key: Key,
  *,
  rows: int = 1 << 12,
):
  """Checks a proposer.

  State keeps structure, shapes and dtypes; proposals are ids of the
  vocabulary, 0..K of them; nothing at or beyond a row's length is read; a row
  does not depend on the others; and drafts follow the laws that are reported.

  Args:
    proposer: the proposer; a vocabulary of at most eight ids is best.
    target: the model it drafts for.
    params: {'target': ..., 'proposer': ...}.
    key: consumed.
    rows: rows for the test of the laws.

  Raises:
    AssertionError: naming the law that does not hold.
  """
  check_static(proposer)
  k, v, size = proposer.num_draft_tokens, target.vocab_size, 24
  decoder = decode.Decoder(
    target=target,
    proposer=proposer,
    verify=chain.Rejection(),
    max_length=size,
    prefill_chunk=8,
  )
  token_key, junk_key, draw_key = jax.random.split(key, 3)
  length_B = jnp.asarray([1, 2, 9, 17], jnp.int32)
  tokens_BL = jax.random.randint(token_key, (4, size), 0, v, jnp.int32)
  sampling = lambda b: stack_options([SamplingOptions(temperature=1.0)] * b, v)
  requests = states.Requests(
    tokens_BL=tokens_BL,
    prompt_length_B=length_B,
    max_new_tokens_B=jnp.full(4, 5, jnp.int32),
    seed_B=jnp.arange(4, dtype=jnp.uint32),
    stop_ids_BJ=jnp.full((4, 1), -1, jnp.int32),
  )
  state = decode.init(decoder, params, requests)
  after, _ = jax.eval_shape(
    lambda state: decoder.step(params, state, sampling(4)), state
  )
  describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  _require(
    describe(after.proposer_state) == describe(state.proposer_state),
    f'{proposer} must keep the structure, shapes and dtypes of its state',
  )

  @jax.jit
  def propose(requests: states.Requests, keys_BK: Key, sampling: Sampling):
    state = decoder.init(params, requests)
    room_B = jnp.full_like(state.length_B, k)
    view = TargetView(state.target_cache, state.prompt_length_B, room_B)
    proposal, _ = proposer.propose(
      params,
      keys_BK,
      state.proposer_state,
      view,
      requests.tokens_BL,
      requests.prompt_length_B,
      sampling,
    )
    return proposal

  def visible(proposal) -> list[np.ndarray]:
    num_draft_B = np.asarray(proposal.num_draft_B)
    is_there_BK = np.arange(k)[None, :] < num_draft_B[:, None]
    found = [num_draft_B, np.where(is_there_BK, proposal.draft_BK, -1)]
    if proposal.log_weights_BKV is not None:
      there_BK1 = is_there_BK[:, :, None]
      found.append(np.where(there_BK1, proposal.log_weights_BKV, 0))
    return found

  keys_BK = jax.random.split(draw_key, (4, k))
  first = visible(propose(requests, keys_BK, sampling(4)))
  _require(
    np.all((first[0] >= 0) & (first[0] <= k)),
    f'{proposer} must propose 0..{k} drafts, got {first[0]}',
  )
  _require(
    np.all((first[1] >= -1) & (first[1] < v)),
    f'{proposer} must propose ids below {v}, got {first[1].tolist()}',
  )
  is_junk_BL = jnp.arange(size)[None, :] >= length_B[:, None]
  junk_BL = jax.random.bits(junk_key, (4, size)).astype(jnp.int32)
  poisoned = requests.replace(
    tokens_BL=jnp.where(is_junk_BL, junk_BL, tokens_BL)
  )
  _require(
    _equal(first, visible(propose(poisoned, keys_BK, sampling(4)))),
    f'{proposer} must not read at or beyond the length of a row',
  )
  order = jnp.asarray([2, 0, 3, 1])
  permuted = jax.tree.map(lambda x: x[order], requests)
  permuted = visible(propose(permuted, keys_BK[order], sampling(4)))
  _require(
    _equal([x[np.asarray(order)] for x in first], permuted),
    f'{proposer} must treat each row by itself',
  )
  last = jax.tree.map(lambda x: jnp.repeat(x[3:], rows, axis=0), requests)
  many = propose(last, jax.random.split(draw_key, (rows, k)), sampling(rows))
  if many.log_weights_BKV is not None:
    _check_drawn(proposer, many)


def _check_drawn(proposer: Proposer, proposal):
  """Rows with one history: the drafts follow the reported laws.

  Whether a draft is made must be decided before it is drawn: rows with the same
  drafts before it make it, or none does.
  """
  draft_BK = np.asarray(proposal.draft_BK)
  num_draft_B = np.asarray(proposal.num_draft_B)
  q_BKV = np.asarray(
    jax.nn.softmax(proposal.log_weights_BKV, axis=-1), np.float64
  )
  for i in range(draft_BK.shape[1]):
    is_there_B = num_draft_B >= i
    prefixes, group_B = np.unique(
      draft_BK[is_there_B, :i], axis=0, return_inverse=True
    )
    for g in range(len(prefixes)):
      is_in_B = np.flatnonzero(is_there_B)[group_B.ravel() == g]
      num_made = int(np.sum(num_draft_B[is_in_B] > i))
      _require(
        num_made in (0, len(is_in_B)),
        f'{proposer} must decide on a draft before it is drawn, draft {i} '
        f'after {prefixes[g].tolist()} is made in {num_made} of '
        f'{len(is_in_B)} rows',
      )
      if not num_made:
        continue
      q_V = q_BKV[is_in_B, i].mean(axis=0)
      _require(
        np.allclose(q_BKV[is_in_B, i], q_V[None], atol=1e-6),
        f'{proposer} must report a law that depends on the drafts before it '
        f'alone, draft {i} does not',
      )
      count_V = np.bincount(draft_BK[is_in_B, i], minlength=len(q_V))
      result = exact.chi_square(count_V, q_V / q_V.sum())
      # Up to hundreds of prefixes: each at a share of the level.
      _require(
        result.p_value >= ALPHA / 100,
        f'{proposer} must draw from the law it reports, draft {i} after '
        f'{prefixes[g].tolist()} does not: {result}',
      )


def check_model(
  model: LanguageModel, params: Params, key: Key, *, atol: float = 1e-5
):
  """Checks a language model with at least 24 positions.

  Args:
    model: the model.
    params: its parameters.
    key: consumed.
    atol: how far logits may differ where shapes do, by rounding alone.

  Raises:
    AssertionError: naming the law that does not hold.
  """
  check_static(model)
  v, b, t = model.vocab_size, 3, 12
  tokens_BT = jax.random.randint(key, (b, t), 0, v, jnp.int32)

  @jax.jit
  def feed(cache, tokens_BT, num_tokens_B):
    hidden, cache = model.apply(
      params, tokens_BT, cache, num_tokens_B=num_tokens_B
    )
    return model.unembed(params, hidden.last_BTD), cache

  def run(tokens_BT, num_slots=24, cache=None, num_B=None):
    if cache is None:
      cache = model.init_cache(tokens_BT.shape[0], num_slots, max_rewind=8)
    if num_B is None:
      num_B = jnp.full(tokens_BT.shape[0], tokens_BT.shape[1], jnp.int32)
    logits_BTV, cache = feed(cache, tokens_BT, num_B)
    return np.asarray(logits_BTV), cache

  logits_BTV, _ = run(tokens_BT)
  _require(
    logits_BTV.shape == (b, t, v) and logits_BTV.dtype == np.float32,
    f'{model} must unembed to float32 logits of shape {(b, t, v)}, got '
    f'{logits_BTV.dtype} {logits_BTV.shape}',
  )

  def same(found, wanted, law: str):
    gap = float(np.max(np.abs(found - wanted)))
    _require(gap <= atol, f'{model}: {law}; the logits differ by {gap}')

  cache, chunks = None, []
  for start in range(0, t, 4):
    chunk, cache = run(tokens_BT[:, start : start + 4], cache=cache)
    chunks.append(chunk)
  chunks = np.concatenate(chunks, axis=1)
  same(chunks, logits_BTV, 'chunks must equal the whole')

  start_B = jnp.full(b, 4, jnp.int32)
  zero_B = jnp.zeros(b, jnp.int32)
  _, cache = run(tokens_BT[:, :4])
  _, cache = run((tokens_BT[:, 4:8] + 1) % v, cache=cache)
  cache = model.keep(cache, start_B, None, zero_B)
  again, cache = run(tokens_BT[:, 4:8], cache=cache)
  same(again, logits_BTV[:, 4:8], 'forgotten tokens must leave no trace')
  again, _ = run(tokens_BT[:, 8:], cache=cache)
  same(again, logits_BTV[:, 8:], 'forgotten tokens must leave no trace')

  order = np.asarray([2, 0, 1])
  again, _ = run(tokens_BT[order])
  same(again, logits_BTV[order], 'rows must not see each other')

  changed_BT = tokens_BT.at[:, -1].set((tokens_BT[:, -1] + 1) % v)
  again, _ = run(changed_BT)
  same(again[:, :-1], logits_BTV[:, :-1], 'no token may see a later one')

  ragged_B = jnp.asarray([1, 3, 2], jnp.int32)
  _, cache = run(tokens_BT[:, :4], num_B=ragged_B)
  index_B4 = ragged_B[:, None] + jnp.arange(4)[None, :]
  rest_B4 = jnp.take_along_axis(tokens_BT, index_B4, axis=1)
  again, _ = run(rest_B4, cache=cache)
  wanted = np.take_along_axis(
    logits_BTV, np.asarray(index_B4)[:, :, None], axis=1
  )
  same(again, wanted, 'every row must append at its own length')

  _, cache = run(tokens_BT[:, :8], num_slots=10)
  again, cache = run(tokens_BT[:, 8:12], cache=cache)
  same(again[:, :2], logits_BTV[:, 8:10], 'writes past the end must be dropped')
  cache = model.keep(cache, 2 * start_B, None, zero_B)
  again, _ = run(tokens_BT[:, 8:10], cache=cache)
  same(again, logits_BTV[:, 8:10], 'writes past the end must be dropped')


def check_lossless(
  decoder: decode.Decoder,
  params: Params,
  group: loops.Group,
  *,
  rows: int = 1 << 13,
):
  """Checks a whole decoder on a target that can be enumerated.

  Args:
    decoder: of a target with few ids; `vocab_size ** num_tokens` outcomes are
      listed.
    params: {'target': ..., 'proposer': ...}.
    group: settings, prompt, stop ids and number of tokens.
    rows: decoded rows.
  """
  program = loops.Program(
    proposer='', decoder=decoder, params=params, groups=(group,), rows=rows
  )
  law = exact.enumerate_exact(
    exact.model_logits(decoder.target, params['target']),
    group.prompt,
    group.num_tokens,
    group.options,
    group.stop_ids,
  )
  counts = law.count(loops.observe(program)[0])
  result = exact.chi_square(counts, np.append(law.probs_M, 0.0))
  _require(
    result.p_value >= ALPHA,
    f'{decoder.proposer} with {decoder.verify} must emit the law of the '
    f'target: {result}',
  )


def _equal(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
  return len(first) == len(second) and all(map(np.array_equal, first, second))


def _require(holds: bool, sentence: str):
  if not holds:
    raise AssertionError(f'{sentence}.')

"""Deliberate bugs, each of which the certificate must catch.

A mutant is a wrapper that replaces one part of a decoder; nothing of the
decoder itself is patched. Most of them have been somebody's real bug.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax import commit, decode
from specjax import noise as noise_lib
from specjax import state as states
from specjax.models import base as models
from specjax.models import translated
from specjax.models.heads.toy import ToyHead
from specjax.proposers import base as proposers
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.feature_fed import FeatureFed
from specjax.sampling import Sampling, SamplingOptions
from specjax.shapes import Array, Key, Params
from specjax.testing import loops
from specjax.verify import chain


@dataclasses.dataclass(frozen=True, kw_only=True)
class BrokenRejection:
  """`Rejection` with one mistake.

  Attributes:
    mistake: 'residual_from_p' or 'residual_from_q' draws the correction from
      the law itself; 'accept_with_q_over_p' inverts the ratio;
      'filter_residual_only' applies the target's top-2 to the correction, and
      neither to the ratio nor to the bonus.
  """

  mistake: str
  draft_purpose = noise_lib.DRAFT

  @property
  def name(self) -> str:
    """The mistake."""
    return self.mistake

  def __call__(
    self,
    noise: chain.Noise,
    draft_K: Array,
    draft_log_weights_KV: Array | None,
    num_draft: Array,
    target_log_weights_NV: Array,
  ) -> chain.Verdict:
    """`Rule.__call__` with the mistake in it."""
    p_NV = jax.nn.softmax(target_log_weights_NV, axis=-1)
    q_KV = chain.draft_probs(draft_K, draft_log_weights_KV, p_NV.shape[-1])
    index_K = jnp.arange(draft_K.shape[0])
    ratio = p_NV[index_K, draft_K], q_KV[index_K, draft_K]
    if self.mistake == 'accept_with_q_over_p':
      ratio = ratio[::-1]
    is_accepted_K = noise.accept_K < chain.accept_prob(*ratio)
    is_accepted_K &= index_K < num_draft
    num_accepted = jnp.sum(jnp.cumprod(is_accepted_K), dtype=jnp.int32)
    p_V = p_NV[num_accepted]
    q_V = jnp.pad(q_KV, ((0, 1), (0, 0)))[num_accepted]
    weights_V = {
      'residual_from_p': lambda: p_V,
      'residual_from_q': lambda: q_V,
      'accept_with_q_over_p': lambda: chain.residual(p_V, q_V),
      'filter_residual_only': lambda: chain.residual(
        jnp.where(p_V >= jax.lax.top_k(p_V, 2)[0][1], p_V, 0), q_V
      ),
    }[self.mistake]()
    is_bonus = num_accepted == num_draft
    next_token = jnp.where(
      is_bonus,
      chain.draw_token(jnp.log(p_V), noise.token_N, num_accepted),
      chain.draw_token(jnp.log(weights_V), noise.residual_N, num_accepted),
    )
    return chain.Verdict(num_accepted, next_token)


@dataclasses.dataclass(frozen=True)
class SharedResidualNoise:
  """The draft is drawn with the noise that will draw the correction."""

  rule: chain.Rule
  draft_purpose = noise_lib.RESIDUAL

  @property
  def name(self) -> str:
    """The rule's, and what is wrong."""
    return f'{self.rule.name}_shared_residual_noise'

  def __call__(self, *args) -> chain.Verdict:
    """The rule as it is: the mistake is `draft_purpose`."""
    return self.rule(*args)


@dataclasses.dataclass(frozen=True)
class PositionNoise:
  """All noise is keyed by absolute position, none by the step.

  A position that is drafted again after a rejection sees the same noise. Only
  a rule that looks past the first rejection is biased by it, and only the
  joint law over several steps shows that.
  """

  rule: chain.Rule
  draft_purpose = noise_lib.TOKEN

  @property
  def name(self) -> str:
    """The rule's, and what is wrong."""
    return f'{self.rule.name}_position_noise'

  def __call__(self, noise: chain.Noise, *args) -> chain.Verdict:
    """The rule, with other uniforms and residual noise."""
    # token_N is keyed by seed and position: so is all that is derived from it.
    derive = lambda purpose: jax.vmap(jax.random.fold_in, in_axes=(0, None))(
      noise.token_N, purpose
    )
    k = noise.accept_K.shape[0]
    accept_K = jax.vmap(jax.random.uniform)(derive(1)[:k])
    return self.rule(
      noise._replace(accept_K=accept_K, residual_N=derive(2)), *args
    )


@dataclasses.dataclass(frozen=True)
class FalseReport:
  """A proposer whose reported laws are not those it drew from.

  Attributes:
    proposer: the honest one.
    mistake: 'greedy' proposes the arg-max of the law it reports (one draft);
      'temperature' draws at half the temperature of the law it reports;
      'full' draws from a few ids and reports a law over all;
      'absent' reports ids that a translated draft lacks as its likeliest.
  """

  proposer: proposers.Proposer
  mistake: str

  def __getattr__(self, name: str) -> Any:
    return getattr(self.proposer, name)

  def propose(
    self,
    params: Params,
    keys_BK: Key,
    state: Any,
    target: proposers.TargetView,
    tokens_BL: Array,
    length_B: Array,
    sampling: Sampling,
  ) -> tuple[proposers.Proposal, Any]:
    """The honest proposal with the mistake in it, see `Proposer.propose`."""
    if self.mistake == 'temperature':
      sampling = sampling.replace(temperature_B=0.5 * sampling.temperature_B)
    proposal, state = self.proposer.propose(
      params, keys_BK, state, target, tokens_BL, length_B, sampling
    )
    log_weights_BKV = proposal.log_weights_BKV
    if self.mistake == 'greedy':
      best_BK = jnp.argmax(log_weights_BKV, axis=-1).astype(jnp.int32)
      return proposal._replace(draft_BK=best_BK), state
    if self.mistake == 'full':
      # As if an id that the head does not have had been as good as the best.
      log_weights_BKV = jnp.maximum(
        log_weights_BKV, jnp.where(jnp.isneginf(log_weights_BKV), 0, -jnp.inf)
      )
      return proposal._replace(log_weights_BKV=log_weights_BKV), state
    if self.mistake == 'absent':
      is_absent_BKV = log_weights_BKV < 0.5 * translated.ABSENT
      log_weights_BKV = jnp.where(is_absent_BKV, 0.0, log_weights_BKV)
      return proposal._replace(log_weights_BKV=log_weights_BKV), state
    return proposal._replace(log_weights_BKV=0.5 * log_weights_BKV), state


@dataclasses.dataclass(frozen=True)
class StopsAtItsToken:
  """A proposer that drops a draft whose own probability is low, once drawn.

  Attributes:
    proposer: the honest one.
    least: the probability that a draft must have.
  """

  proposer: proposers.Proposer
  least: float

  def __getattr__(self, name: str) -> Any:
    return getattr(self.proposer, name)

  def propose(self, *args) -> tuple[proposers.Proposal, Any]:
    """The honest proposal up to the first unlikely draft."""
    proposal, state = self.proposer.propose(*args)
    q_BKV = jax.nn.softmax(proposal.log_weights_BKV, axis=-1)
    q_BK1 = jnp.take_along_axis(q_BKV, proposal.draft_BK[:, :, None], axis=-1)
    num_likely_B = commit.num_leading(q_BK1[:, :, 0] >= self.least)
    num_draft_B = jnp.minimum(proposal.num_draft_B, num_likely_B)
    return proposal._replace(num_draft_B=num_draft_B), state


@dataclasses.dataclass(frozen=True)
class RewindOffByOne:
  """A model whose `keep` keeps one entry too many."""

  model: models.LanguageModel

  def __getattr__(self, name: str) -> Any:
    return getattr(self.model, name)

  def keep(
    self,
    cache: models.Cache,
    start_B: Array,
    path_BM: Array | None,
    num_B: Array,
  ) -> models.Cache:
    """`LanguageModel.keep` of one more than it is told to."""
    return self.model.keep(cache, start_B, path_BM, num_B + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MisfedHead:
  """A feature-fed proposer that joins the wrong features and tokens.

  Attributes:
    proposer: the right one.
    mistake: 'stale' makes entries of the features of one row before; 'token'
      joins the feature of token t with token t.
  """

  proposer: FeatureFed
  mistake: str

  def __getattr__(self, name: str) -> Any:
    return getattr(self.proposer, name)

  def _texts(self, tokens_BL: Array) -> Array:
    shift = 1 if self.mistake == 'token' else 0
    return jnp.roll(tokens_BL, shift, axis=1)

  def read_prompt(self, params, state, chunk, tokens_BL, length_B) -> Any:
    """`FeatureProposer.read_prompt`, with the tokens shifted for 'token'."""
    return self.proposer.read_prompt(
      params, state, chunk, self._texts(tokens_BL), length_B
    )

  def propose(self, params, keys_BK, state, target, tokens_BL, *rest):
    """`Proposer.propose`, with the tokens shifted for 'token'."""
    return self.proposer.propose(
      params, keys_BK, state, target, self._texts(tokens_BL), *rest
    )

  def observe(self, params, state, outcome) -> Any:
    """`Proposer.observe`, with the features shifted for 'stale'."""
    state = self.proposer.observe(params, state, outcome)
    if self.mistake != 'stale':
      return state
    return state.replace(feature_BND=jnp.roll(state.feature_BND, 1, axis=1))


@dataclasses.dataclass(frozen=True)
class StopAtBlockEnd:
  """A decoder that looks for stop ids at the last token of a block only."""

  decoder: decode.Decoder

  def __getattr__(self, name: str) -> Any:
    return getattr(self.decoder, name)

  def step(
    self, params: Params, state: states.DecodeState, sampling: Sampling
  ) -> tuple[states.DecodeState, states.StepInfo]:
    """`Decoder.step` without stop ids, and then a look at the last token."""
    stop_ids_BJ = state.stop_ids_BJ
    state, info = self.decoder.step(
      params,
      state.replace(stop_ids_BJ=jnp.full_like(stop_ids_BJ, -1)),
      sampling,
    )
    last_B1 = jnp.maximum(info.num_emitted_B - 1, 0)[:, None]
    last_B1 = jnp.take_along_axis(info.tokens_BN, last_B1, axis=1)
    is_stop_B = jnp.any(last_B1 == stop_ids_BJ, axis=1)
    is_stop_B &= info.num_emitted_B > 0
    reason_B = jnp.where(is_stop_B, states.STOP, state.finish_reason_B)
    state = state.replace(
      stop_ids_BJ=stop_ids_BJ,
      done_B=state.done_B | is_stop_B,
      finish_reason_B=reason_B,
    )
    return state, info


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Mutant:
  """A deliberate bug, and the test that must fail on it.

  Attributes:
    name: what is wrong.
    program: the loop with the bug; one group.
    expected: the group whose law the output must not have.
    caught_by: 'joint law', or 'acceptance' for bugs that cost drafts alone:
      the draft is the target there, and every draft must be accepted.
  """

  name: str
  program: loops.Program
  expected: loops.Group
  caught_by: str = 'joint law'


# Papers' pairs: where a mutant's law is known by hand.
PAIRS = {
  'V4b': ((0.4, 0.35, 0.15, 0.1), (0.1, 0.2, 0.3, 0.4)),
  'BV': ((1 / 3, 2 / 3), (2 / 3, 1 / 3)),
}


def pair_program(
  name: str,
  rule: chain.Rule,
  num_draft_tokens: int,
  rows: int,
  num_tokens: int = 5,
  rounds: int = 1,
) -> loops.Program:
  """A context-free pair, draft and target, at temperature 1."""
  p, q = PAIRS[name]
  model, target_params = loops.table_model(p)
  _, draft_params = loops.table_model(q)
  group = loops.Group(
    transform=f'pair {name}',
    options=SamplingOptions(temperature=1.0),
    prompt=(0, 1),
    num_tokens=num_tokens,
  )
  return loops.Program(
    proposer='draft',
    decoder=decode.Decoder(
      target=model,
      proposer=DraftModel(model=model, num_draft_tokens=num_draft_tokens),
      verify=rule,
      max_length=2 + num_tokens,
    ),
    params={'target': target_params, 'proposer': draft_params},
    groups=(group,),
    rows=rows,
    rounds=rounds,
  )


def all_mutants(rows: int) -> list[Mutant]:
  """Every mutant, with `rows` rows to catch it by."""
  found = []

  def add(name: str, program: loops.Program, **fields):
    fields = {'expected': program.groups[0], **fields}
    found.append(Mutant(name=name, program=program, **fields))

  def replaced(program: loops.Program, **parts) -> loops.Program:
    decoder = dataclasses.replace(program.decoder, **parts)
    return dataclasses.replace(program, decoder=decoder)

  v4b = pair_program('V4b', chain.Rejection(), 1, rows)
  for mistake in ('residual_from_p', 'residual_from_q', 'accept_with_q_over_p'):
    add(mistake, replaced(v4b, verify=BrokenRejection(mistake=mistake)))
  top_2 = dataclasses.replace(
    v4b.groups[0], options=SamplingOptions(temperature=1.0, top_k=2)
  )
  add(
    'target_filter_on_residual_only',
    replaced(v4b, verify=BrokenRejection(mistake='filter_residual_only')),
    expected=top_2,
  )
  proposer = v4b.decoder.proposer
  add(
    'greedy_draft_reported_as_sampled',
    replaced(v4b, proposer=FalseReport(proposer, 'greedy')),
  )
  add(
    'draft_law_at_another_temperature',
    replaced(v4b, proposer=FalseReport(proposer, 'temperature')),
  )
  add(
    'draft_stopped_by_its_own_token',
    replaced(v4b, proposer=StopsAtItsToken(proposer, 0.25)),
  )
  add(
    'residual_drawn_with_draft_noise',
    replaced(v4b, verify=SharedResidualNoise(chain.Rejection())),
  )
  add(
    'block_noise_keyed_by_position',
    pair_program('BV', PositionNoise(chain.Block()), 2, rows, num_tokens=7),
  )

  # The draft has two of the target's four ids, and one that the target lacks.
  own, own_params = loops.table_model((0.1, 0.2, 0.7))
  foreign = translated.Translated(model=own, vocab_size=4, max_ids=1)
  tables = foreign.init(jax.random.key(0))
  tables['to_draft'] = jnp.array([0, 1, -1, -1])
  honest = DraftModel(model=foreign, num_draft_tokens=1)
  add(
    'ids_the_draft_lacks_reported_as_drawable',
    dataclasses.replace(
      replaced(v4b, proposer=FalseReport(honest, 'absent')),
      params={**v4b.params, 'proposer': {**tables, 'model': own_params}},
    ),
  )

  model, params = loops.toy_pair(jax.random.key(7), vocab_size=3)
  toy = loops.Program(
    proposer='draft',
    decoder=decode.Decoder(
      target=model,
      proposer=DraftModel(model=model, num_draft_tokens=2),
      verify=chain.Rejection(),
      max_length=9,
    ),
    params=params,
    groups=(
      loops.Group(
        transform='none',
        options=SamplingOptions(temperature=1.0),
        prompt=(0, 1),
        num_tokens=7,
      ),
    ),
    rows=rows,
  )
  add('target_rewind_off_by_one', replaced(toy, target=RewindOffByOne(model)))
  twins = dataclasses.replace(
    toy, params={'target': params['target'], 'proposer': params['target']}
  )
  off_by_one = DraftModel(model=RewindOffByOne(model), num_draft_tokens=2)
  add(
    'draft_rewind_off_by_one',
    replaced(twins, proposer=off_by_one),
    caught_by='acceptance',
  )
  head_of = lambda **settings: FeatureFed(
    head=ToyHead(**settings), num_draft_tokens=2
  )
  fed_wrong = lambda mistake: MisfedHead(
    proposer=head_of(target=model), mistake=mistake
  )
  # A tenth of the drafts and more is rejected: few rows show it.
  few_twins = dataclasses.replace(twins, rows=max(rows // 16, 64))
  for name, proposer in (
    ('head_rewind_off_by_one', head_of(target=RewindOffByOne(model))),
    ('head_fed_wrong_stale', fed_wrong('stale')),
    ('head_fed_wrong_token', fed_wrong('token')),
  ):
    add(name, replaced(few_twins, proposer=proposer), caught_by='acceptance')
  reduced = dataclasses.replace(
    toy, params=loops.toy_head_params(params, ids=(0, 2))
  )
  few = head_of(target=model, num_ids=2)
  add(
    'reduced_vocabulary_reported_as_full',
    replaced(reduced, proposer=FalseReport(few, 'full')),
  )
  stopped = dataclasses.replace(toy.groups[0], stop_ids=(1,))
  add(
    'stop_id_ignored_inside_draft',
    dataclasses.replace(
      toy, decoder=StopAtBlockEnd(toy.decoder), groups=(stopped,)
    ),
  )
  return found

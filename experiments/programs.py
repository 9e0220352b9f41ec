"""The programs of a decoder, made from shapes alone, and their compilation.

  draft    one draft step: the draft model's pass, its law and a draw
  verify   one verification: the target's pass, the rule, what is committed
  loop     `decode.run`, the whole generate loop: K drafts and a verification
           per turn

Nothing is allocated: parameters and state are `jax.ShapeDtypeStruct`s that
carry their sharding, and devices may be fake ones, or descriptions of TPUs.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from experiments import hlo
from specjax import decode, noise, sharding
from specjax.models.transformer import Transformer
from specjax.proposers import base as proposers
from specjax.proposers.draft_model import DraftModel
from specjax.sampling import Sampling
from specjax.state import DecodeState, Requests
from specjax.verify import chain

NUM_STOP_IDS = 4
PROGRAMS = ('draft', 'verify', 'loop')


@dataclasses.dataclass(frozen=True)
class Given:
  """Proposes what its state holds, so that a step is a verification alone.

  The state is (drafts, their log-weights, how many), as in `Proposal`.
  """

  num_draft_tokens: int
  target_features = ()

  def propose(
    self, params, keys_BK, state, target, tokens_BL, length_B, sampling
  ):
    del params, keys_BK, target, tokens_BL, length_B, sampling
    return proposers.Proposal(*state), state

  def observe(self, params, state, outcome):
    del params, outcome
    return state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
  """A target and a draft, placed, and the sizes of a batch.

  Attributes:
    target: with its placement.
    draft: with its own, on the same mesh.
    batch_size: B.
    context: L, tokens per row at most.
    num_draft_tokens: K.
  """

  target: Transformer
  draft: Transformer
  batch_size: int
  context: int
  num_draft_tokens: int

  def decoder(self) -> decode.Decoder:
    return decode.Decoder(
      target=self.target,
      proposer=DraftModel(
        model=self.draft, num_draft_tokens=self.num_draft_tokens
      ),
      verify=chain.Rejection(),
      max_length=self.context,
    )

  def params(self) -> dict[str, Any]:
    """{'target', 'proposer'}, abstract."""
    models = {'target': self.target, 'proposer': self.draft}
    return {
      name: sharding.abstract_params(model.param_specs(), model.placement)
      for name, model in models.items()
    }

  def state(self) -> DecodeState:
    """What the loop carries, abstract: rows and key-value heads split."""
    return _state(self)

  def sampling(self) -> Sampling:
    """Settings of a batch without penalties, abstract."""
    row = lambda dtype: jax.ShapeDtypeStruct((self.batch_size,), dtype)
    settings = Sampling(
      temperature_B=row(jnp.float32),
      top_k_B=row(jnp.int32),
      top_p_B=row(jnp.float32),
      min_p_B=row(jnp.float32),
    )
    return _place(settings, self.target.placement)


# Tracing a deep pair takes seconds, and every program asks for its state.
@functools.lru_cache(maxsize=1)
def _state(pair: Pair) -> DecodeState:
  row = lambda dtype, *size: jax.ShapeDtypeStruct(
    (pair.batch_size, *size), dtype
  )
  requests = Requests(
    tokens_BL=row(jnp.int32, pair.context),
    prompt_length_B=row(jnp.int32),
    max_new_tokens_B=row(jnp.int32),
    seed_B=row(jnp.uint32),
    stop_ids_BJ=row(jnp.int32, NUM_STOP_IDS),
  )
  state = jax.eval_shape(pair.decoder().init, pair.params(), requests)
  rows = pair.target.placement
  rest = _place(state.replace(target_cache=None, proposer_state=None), rows)
  return rest.replace(
    target_cache=_place(state.target_cache, rows),
    proposer_state=_place(state.proposer_state, pair.draft.placement),
  )


def cut(model: Transformer, num_layers: int) -> Transformer:
  """The model's first layers, between its own embedding and head."""
  return dataclasses.replace(
    model, windows=model.windows[:num_layers], ropes=model.ropes[:num_layers]
  )


def _place(tree: Any, placement: sharding.Placement) -> Any:
  """The tree with shardings: caches [B, G, S, C] and arrays by row."""

  def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    axes = ('batch', 'kv_heads') if x.ndim == 4 else ('batch',)[: x.ndim]
    return jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=placement.sharding(*axes)
    )

  return jax.tree.map(place, tree)


@functools.partial(jax.jit, static_argnames='model', donate_argnames='cache')
def _draft_step(model, params, cache, state, sampling):
  """One draft, as `Decoder` asks for it; two rows, the first of a step."""
  key_B1 = jax.vmap(
    lambda seed, length: noise.draw_keys(seed, noise.DRAFT, length, 1)
  )(state.seed_B, state.length_B)
  return DraftModel(model=model, num_draft_tokens=1).propose(
    params,
    key_B1,
    cache,
    proposers.TargetView(
      None, state.prompt_length_B, state.limit_B - state.length_B - 1
    ),
    state.tokens_BL,
    state.length_B,
    sampling,
  )


def call(name: str, pair: Pair) -> tuple[Any, tuple[Any, ...]]:
  """A jitted function and abstract arguments: one of PROGRAMS."""
  decoder, params, state = pair.decoder(), pair.params(), pair.state()
  sampling = pair.sampling()
  rows = pair.target.placement
  if name == 'draft':
    cache = state.proposer_state
    state = state.replace(target_cache=None, proposer_state=None)
    params = {'proposer': params['proposer']}
    return _draft_step, (pair.draft, params, cache, state, sampling)
  if name == 'verify':
    b, k = pair.batch_size, pair.num_draft_tokens
    law = pair.draft.placement.sharding('batch', None, 'vocab')
    given = (
      jax.ShapeDtypeStruct((b, k), jnp.int32, sharding=rows.sharding('batch')),
      jax.ShapeDtypeStruct(
        (b, k, pair.target.vocab_size), jnp.float32, sharding=law
      ),
      jax.ShapeDtypeStruct((b,), jnp.int32, sharding=rows.sharding('batch')),
    )
    decoder = dataclasses.replace(decoder, proposer=Given(k))
    state = state.replace(proposer_state=given)
    return decode.step, (
      decoder,
      {'target': params['target']},
      state,
      sampling,
    )
  max_steps = jax.ShapeDtypeStruct((), jnp.int32, sharding=rows.sharding())
  return decode.run, (decoder, params, state, sampling, max_steps)


def lower_only(name: str, pair: Pair, platform: str) -> int:
  """Lowers a program for a platform that need not be here.

  Returns:
    The size of the portable program (StableHLO), bytes.
  """
  function, arguments = call(name, pair)
  exported = jax.export.export(function, platforms=[platform])(*arguments)
  return len(exported.mlir_module_serialized)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """What the compiler says of a program, per device.

  Attributes:
    numbers: bytes of 'arguments', 'outputs', 'aliases', 'temporaries' and
      'code'; 'flops' and 'bytes_accessed' of one run, in any memory of the
      chip, with the body of every loop counted once; 'seconds', XLA's own
      estimate, where it has one.
    collectives: all of them.
  """

  numbers: dict[str, float]
  collectives: list[hlo.Collective]


def compile_program(name: str, pair: Pair, platform: str) -> Compiled:
  """Compiles one of PROGRAMS for the devices its shardings name.

  Raises:
    jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED where it does not fit.
  """
  function, arguments = call(name, pair)
  traced = function.trace(*arguments)
  compiled = traced.lower(lowering_platforms=(platform,)).compile()
  memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
  numbers = {
    'arguments': memory.argument_size_in_bytes,
    'outputs': memory.output_size_in_bytes,
    'aliases': memory.alias_size_in_bytes,
    'temporaries': memory.temp_size_in_bytes,
    'code': memory.generated_code_size_in_bytes,
    'flops': cost['flops'],
    'bytes_accessed': cost['bytes accessed'],
  }
  if 'optimal_seconds' in cost:
    # XLA counts -1 for an operation it has no estimate of (reinterpreting
    # bits, mostly), so whole seconds mean nothing.
    numbers['seconds'] = cost['optimal_seconds'] % 1
  return Compiled(
    numbers=numbers, collectives=hlo.collectives(compiled.as_text())
  )


def device_bytes(tree: Any) -> int:
  """Bytes of the tree's arrays that lie on each device, without padding."""
  return sum(
    int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


def matrix_elements(params: Any) -> int:
  """Elements per device of the matrices that a pass multiplies by."""
  return sum(
    int(np.prod(x.sharding.shard_shape(x.shape)))
    for x in jax.tree.leaves(params)
    if x.ndim == 2
  )

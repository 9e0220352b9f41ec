"""A target and a draft with random weights, for checks that need no files.

The draft is the first quarter of the target's layers, and what the target's
other layers add is damped: the draft is often right and costs less, as in real
pairs, and the costs are those of the published shapes.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax import state as states
from specjax.models import config as model_config
from specjax.models import presets
from specjax.models.transformer import Transformer
from specjax.shapes import Key, Params

TINY = {
  'model_type': 'llama',
  'vocab_size': 1024,
  'hidden_size': 128,
  'intermediate_size': 384,
  'num_hidden_layers': 4,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'max_position_embeddings': 512,
  'hidden_act': 'silu',
  'rms_norm_eps': 1e-5,
  'rope_theta': 10000.0,
  'tie_word_embeddings': True,
}
DAMPING = 0.1  # Of what the layers behind the draft's add.


def make_target(name: str, dtype: str) -> Transformer:
  if name == 'tiny':
    return model_config.config_from_hf(TINY, dtype=dtype)
  if name not in presets.PRESETS:
    raise ValueError(
      f'target must be tiny or one of {", ".join(presets.PRESETS)}, got '
      f'{name!r}.'
    )
  return presets.preset(name, dtype)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
  """A target and the draft inside it."""

  target: Transformer
  draft: Transformer
  params: Params

  def of(self, name: str) -> tuple[Transformer, Params]:
    part = {'target': 'target', 'draft': 'proposer'}[name]
    return getattr(self, name), self.params[part]


def make_pair(target: Transformer, key: Key) -> Pair:
  """Random parameters; the draft is the first quarter of the layers."""
  num_layers = max(target.num_layers // 4, 1)
  params = target.init(key)
  first, rest = params['layers'][:num_layers], params['layers'][num_layers:]
  damped = tuple(
    {**layer, 'o': layer['o'] * DAMPING, 'down': layer['down'] * DAMPING}
    for layer in rest
  )
  return Pair(
    target=target,
    draft=first_layers(target, num_layers),
    params={
      'target': {**params, 'layers': (*first, *damped)},
      'proposer': {**params, 'layers': first},
    },
  )


def first_layers(model: Transformer, num_layers: int) -> Transformer:
  return dataclasses.replace(
    model, windows=model.windows[:num_layers], ropes=model.ropes[:num_layers]
  )


def make_requests(
  model: Transformer, length_B: np.ndarray, num_new: int, max_length: int
) -> states.Requests:
  """Random prompts of the given lengths."""
  shape = len(length_B), max_length
  tokens_BL = np.random.default_rng(0).integers(model.vocab_size, size=shape)
  return states.Requests(
    tokens_BL=jnp.asarray(tokens_BL, jnp.int32),
    prompt_length_B=jnp.asarray(length_B, jnp.int32),
    max_new_tokens_B=jnp.full(len(length_B), num_new, jnp.int32),
    seed_B=jnp.arange(len(length_B), dtype=jnp.uint32),
    stop_ids_BJ=jnp.full((len(length_B), 1), -1, jnp.int32),
  )


def counts(state: states.DecodeState) -> dict[str, int]:
  source_BL = np.asarray(state.source_BL)
  length_B, start_B = (
    np.asarray(x, np.int64) for x in (state.length_B, state.prompt_length_B)
  )
  return {
    'num_steps': int(np.sum(np.asarray(state.num_steps_B))),
    'num_emitted': int(np.sum(length_B - start_B)),
    'num_accepted': int(np.sum(source_BL == states.ACCEPTED)),
  }

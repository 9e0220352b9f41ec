"""What heads say of given drafts, all of it redone from the text alone.

No cache is kept, nothing is rolled back, and no position is special.
"""

from typing import Any

import jax.numpy as jnp

from specjax.models.heads.base import FeatureHead, IndependentHeads
from specjax.shapes import Array


def _features(heads: Any, params: Any, tokens_BL: Array) -> Array:
  target, (b, size) = heads.target, tokens_BL.shape
  hidden, _ = target.apply(
    params['target'],
    tokens_BL,
    target.init_cache(b, size, 0),
    capture=heads.target_features,
  )
  return hidden.features_BTE


def chained_logits(
  head: FeatureHead,
  params: Any,
  tokens_BL: Array,
  length_B: Array,
  draft_BK: Array,
) -> Array:
  """Raw logits behind which each draft is drawn, float32 [B, K, V].

  Args:
    head: goes on from its own output.
    params: {'target', 'proposer'}.
    tokens_BL: int32 [B, L], the text below `length_B`; any int32 behind it.
    length_B: int32 [B], at least 2.
    draft_BK: int32 [B, K].
  """
  b, size = tokens_BL.shape
  tokens_BL = jnp.clip(tokens_BL, 0, head.vocab_size - 1)
  feature_BLD = head.fuse(params, _features(head, params, tokens_BL))
  index_1L = jnp.arange(size)[None, :]
  found = []
  for i in range(draft_BK.shape[1]):
    # Entries up to length - 2 rest on the target, the i behind on the head.
    next_BLD, _ = head.apply(
      params,
      feature_BLD,
      jnp.roll(tokens_BL, -1, axis=1),
      head.block.init_cache(b, size, 0),
    )
    at_B1 = (length_B - 2 + i)[:, None]
    last_B1D = jnp.take_along_axis(next_BLD, at_B1[..., None], axis=1)
    logits_B1V = head.unembed(params, last_B1D)
    if head.num_ids is not None:
      wide_B1V = jnp.full((b, 1, head.vocab_size), -jnp.inf)
      ids_R = params['proposer']['ids']
      logits_B1V = wide_B1V.at[:, :, ids_R].set(logits_B1V)
    found.append(logits_B1V)
    is_next_BL = index_1L == at_B1 + 1
    feature_BLD = jnp.where(is_next_BL[..., None], last_B1D, feature_BLD)
    tokens_BL = jnp.where(
      index_1L == at_B1 + 2, draft_BK[:, i : i + 1], tokens_BL
    )
  return jnp.concatenate(found, axis=1)


def independent_logits(
  heads: IndependentHeads,
  params: Any,
  tokens_BL: Array,
  length_B: Array,
  draft_BK: Array,
) -> Array:
  """`chained_logits` of heads that see no draft: of the last true feature."""
  tokens_BL = jnp.clip(tokens_BL, 0, heads.vocab_size - 1)
  features_BLE = _features(heads, params, tokens_BL)
  at_B11 = (length_B - 2)[:, None, None]
  last_B1E = jnp.take_along_axis(features_BLE, at_B11, axis=1)
  logits = heads.logits(params, last_B1E, draft_BK.shape[1])
  return jnp.concatenate(logits, axis=1)

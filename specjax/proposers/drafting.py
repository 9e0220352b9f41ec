"""Drafting token by token, whatever network it is done with."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax import sampling as sampling_lib
from specjax.models.base import LanguageModel
from specjax.proposers.base import Proposal
from specjax.sampling import Counts, Sampling
from specjax.shapes import Array, Key, Params
from specjax.sharding import constrain

# A token and what was fed before it, to the token's hidden and the same grown.
Feed = Callable[[Array, Any], tuple[Array, Any]]


def draw_chain(
  model: LanguageModel,
  params: Params,
  keys_BK: Key,
  feed: Feed,
  memory: Any,
  last_B1D: Array,
  counts: Counts | None,
  sampling: Sampling,
) -> tuple[Proposal, Any]:
  """Draws K drafts, each from the law behind the one before it.

  A chain that meets a law which is not finite ends before it.

  Args:
    model: unembeds hiddens and says where laws lie.
    params: its parameters.
    keys_BK: typed keys [B, K]; consumed.
    feed: `(draft_B1, memory)` to `(last_B1D, memory)`; called K - 1 times, for
      no draft is drawn behind the last.
    memory: what `feed` carries; it has absorbed the pending token.
    last_B1D: the pending token's hiddens.
    counts: of the committed text, [B, 1, V]; None without penalties.
    sampling: the rows' settings.

  Returns:
    The proposal and the memory, which has absorbed all drafts but the last.
  """

  def draw(last_B1D, counts, key_B):
    logits_B1V, is_finite_B1 = sampling_lib.blank_broken(
      model.unembed(params, last_B1D)
    )
    # Pinned, or the target's split of the laws would enter the draft loop.
    log_weights_B1V = constrain(
      sampling_lib.transform(sampling, logits_B1V, counts),
      model.placement,
      'batch',
      None,
      'vocab',
    )
    draft_B = sampling_lib.draw(log_weights_B1V[:, 0], key_B, sampling)
    draft_B = constrain(draft_B, model.placement, 'batch')
    return draft_B, log_weights_B1V[:, 0], is_finite_B1[:, 0]

  def extend(carry, key_B):
    draft_B, counts, memory = carry
    last_B1D, memory = feed(draft_B[:, None], memory)
    if counts is not None:
      counts = jax.tree.map(
        lambda counts_B2V: counts_B2V[:, 1:],
        sampling_lib.count_drafts(counts, draft_B[:, None]),
      )
    drawn = draw(last_B1D, counts, key_B)
    return (drawn[0], counts, memory), drawn

  first = draw(last_B1D, counts, keys_BK[:, 0])
  (_, _, memory), rest = jax.lax.scan(
    extend, (first[0], counts, memory), keys_BK[:, 1:].T
  )
  draft_KB, log_weights_KBV, is_finite_KB = jax.tree.map(
    lambda head, tail: jnp.concatenate([head[None], tail]), first, rest
  )
  num_finite_B = jnp.sum(
    jnp.cumprod(is_finite_KB.astype(jnp.int32), axis=0), axis=0
  )
  proposal = Proposal(
    draft_BK=draft_KB.T,
    log_weights_BKV=jnp.swapaxes(log_weights_KBV, 0, 1),
    num_draft_B=num_finite_B.astype(jnp.int32),
  )
  return proposal, memory

"""A model of your own: any causal flax module, called on all of the text."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp

from specjax.models import base, slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
  """A module from ids [B, S] to float32 logits [B, S, V]; it needs no cache."""

  module: nn.Module
  vocab_size: int
  context_length: int = 1024
  placement = None
  has_independent_rows = False

  def init_cache(self, batch_size, num_slots, max_rewind):
    text_B1S1 = jnp.zeros((batch_size, 1, num_slots, 1), jnp.int32)
    return base.KVCache((text_B1S1,), (), jnp.zeros(batch_size, jnp.int32))

  def apply(self, params, tokens_BT, cache, *, num_tokens_B=None, capture=()):
    slot_BT = base.append_slots(cache, tokens_BT.shape[1], num_tokens_B)
    text_B1S1 = slots.write(cache.k[0], tokens_BT[:, None, :, None], slot_BT)
    logits_BSV = self.module.apply(params, text_B1S1[:, 0, :, 0])
    index_BT1 = jnp.minimum(slot_BT, cache.num_slots - 1)[:, :, None]
    logits_BTV = jnp.take_along_axis(logits_BSV, index_BT1, axis=1)
    length_B = base.advance(cache, tokens_BT.shape[1], num_tokens_B)
    cache = cache.replace(k=(text_B1S1,), length_B=length_B)
    return base.Hidden(logits_BTV), cache

  def unembed(self, params, last_BTD):
    return last_BTD  # They are logits.

  def keep(self, cache, start_B, path_BM, num_B):
    return base.keep_kv(cache, start_B, path_BM, num_B)

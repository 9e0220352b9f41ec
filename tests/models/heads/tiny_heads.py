"""Tiny heads, one of each kind, for the tiny transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sharding
from specjax.models.heads.eagle import Eagle
from specjax.models.heads.eagle3 import Eagle3, default_layers
from specjax.models.heads.medusa import MedusaHeads
from specjax.models.heads.mtp import MTP
from specjax.models.transformer import Transformer
from specjax.shapes import Params
from tests.models import tiny


def target_of(family: str = 'llama', vocab_size: int = 16) -> Transformer:
  return tiny.model(family, vocab_size=vocab_size)


def block_of(target: Transformer, **changes) -> Transformer:
  """A layer of the target's widths."""
  return dataclasses.replace(
    target, windows=(None,), ropes=target.ropes[-1:], tied=False, **changes
  )


def head_of(kind: str, target: Transformer):
  num_ids = None
  if kind.endswith('_reduced'):
    num_ids = (target.vocab_size + 1) // 2
  if kind.startswith('mtp'):
    return MTP(target=target, block=block_of(target), num_ids=num_ids)
  if kind == 'eagle':
    return Eagle(target=target, block=block_of(target, input_norm=False))
  if kind == 'medusa':
    return MedusaHeads(target=target, num_heads=3, dtype=target.dtype)
  if kind == 'medusa_own':
    return MedusaHeads(
      target=target, num_heads=3, num_layers=2, own_heads=True, dtype='float32'
    )
  return Eagle3(
    target=target,
    block=block_of(target, side_dim=target.embed_dim),
    target_features=default_layers(target.num_layers),
    num_ids=num_ids,
  )


def params_of(head, seed: int = 1) -> Params:
  """Random parameters in which norms and biases are random as well.

  A reduced vocabulary has every second id.
  """
  rng = np.random.default_rng(seed)

  def make(spec: sharding.ParamSpec) -> jax.Array:
    if spec.dtype == 'int32':
      return 2 * jnp.arange(spec.shape[0], dtype=jnp.int32)
    value = rng.normal(0, 0.3, spec.shape) + (spec.init == 'ones')
    return jnp.asarray(value, spec.dtype)

  return jax.tree.map(make, head.param_specs(), is_leaf=sharding.is_spec)

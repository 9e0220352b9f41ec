"""Medusa: residual blocks on the target's last hidden, one chain per token."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax import sharding
from specjax.models import layers
from specjax.models.heads import base
from specjax.models.transformer import Transformer
from specjax.shapes import Array, Key, Params
from specjax.sharding import ParamSpec, Placement


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaHeads:
  """Heads of residual blocks; implements `IndependentHeads`.

    x <- x + SiLU(W x + b)     one or more times, from the target's hidden
    law = softmax(head x)      behind its final norm

  With W = 0 and b = 0, as they begin, every head is the target's own. The
  output head is the target's for all of them, or one for each, which begins as
  a copy of it (`begin`).

  Source: Cai et al., Medusa, arXiv:2401.10774, section 2.1.1.

  Attributes:
    target: the model they draft for.
    num_heads: K at most.
    num_layers: residual blocks of a head.
    own_heads: each has an output head of its own, as published ones have.
    dtype: of its weights.
    placement: where they lie; None is one device.

  Raises:
    ValueError: the target is no transformer, a number is not above 0, or own
      heads would have to cap their logits.
  """

  target: Transformer
  num_heads: int
  num_layers: int = 1
  own_heads: bool = False
  dtype: str = 'bfloat16'
  placement: Placement | None = None

  def __post_init__(self):
    base.check_target(self.target)
    if self.own_heads and self.target.logit_softcap is not None:
      raise ValueError(
        'own_heads must be False for a target that caps its logits.'
      )
    for name in ('num_heads', 'num_layers'):
      if not getattr(self, name) > 0:
        raise ValueError(f'{name} must be > 0, got {getattr(self, name)}.')

  @property
  def target_features(self) -> tuple[int, ...]:
    """The stream behind the target's last block, before its final norm."""
    return (self.target.num_layers,)

  @property
  def feature_dim(self) -> int:
    """D of the target."""
    return self.target.embed_dim

  @property
  def feature_dtype(self) -> str:
    """That of the target's stream."""
    return self.target.dtype

  @property
  def vocab_size(self) -> int:
    """V, the target's."""
    return self.target.vocab_size

  def param_specs(self) -> Params:
    """One dict per head: {'blocks': one dict {'w', 'b'} per block, 'head'?}."""
    d = self.target.embed_dim

    def spec(axes: tuple[str | None, ...], *shape: int) -> ParamSpec:
      return ParamSpec(
        shape=shape, dtype=self.dtype, logical_axes=axes, init='zeros'
      )

    block = {'w': spec(('embed', None), d, d), 'b': spec(('embed',), d)}
    head = {'blocks': (block,) * self.num_layers}
    if self.own_heads:
      head['head'] = spec(('vocab', 'embed'), self.vocab_size, d)
    return (head,) * self.num_heads

  def init(self, key: Key) -> Params:
    """Blocks that do nothing; output heads, if any, are for `begin`."""
    return sharding.init_params(self.param_specs(), key, self.placement)

  def begin(self, params: Params, target_params: Params) -> Params:
    """With the target's output head in each of them."""
    if not self.own_heads:
      return params
    head_VD = base.output_head(self.target, target_params).astype(self.dtype)
    return tuple({**p, 'head': head_VD + 0} for p in params)

  def logits(
    self, params: Params, features_BTE: Array, num_heads: int
  ) -> tuple[Array, ...]:
    """`IndependentHeads.logits`; the target's final norm comes first."""
    x_BTD = self.target.final_norm(params['target'], features_BTE)
    return tuple(
      self._logits(params['target'], head, x_BTD.astype(self.dtype))
      for head in params['proposer'][:num_heads]
    )

  def _logits(self, target_params: Params, head: Params, x_BTD: Array) -> Array:
    is_local = self.placement is None
    for block in head['blocks']:
      y_BTD = layers.dense(
        x_BTD, block['w'], block['b'], dtype=jnp.float32, is_local=is_local
      )
      x_BTD = x_BTD + jax.nn.silu(y_BTD).astype(x_BTD.dtype)
    if not self.own_heads:
      x_BTD = x_BTD.astype(self.target.dtype)
      return self.target.logits(target_params, x_BTD)
    return layers.dense(
      x_BTD, head['head'], dtype=jnp.float32, is_local=is_local
    )

"""EAGLE-3: several layers of the target fused, and laws of its own."""

import dataclasses

import jax.numpy as jnp

from specjax.models import block as blocks
from specjax.models.base import KVCache
from specjax.models.heads import base
from specjax.models.transformer import Transformer
from specjax.shapes import Array, Key, Params


def default_layers(num_layers: int) -> tuple[int, int, int]:
  """A low, a middle and a high layer, as the authors choose them.

  >>> default_layers(32), default_layers(6)
  ((2, 16, 29), (1, 3, 5))
  """
  if num_layers < 8:
    return min(1, num_layers), num_layers // 2, max(num_layers - 1, 0)
  return 2, num_layers // 2, num_layers - 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3:
  """One decoder layer that reads embeddings beside it; a `FeatureHead`.

    g(t) = fc [low(t); middle(t); high(t)]
    a(t+1) = layer(g(t)), its attention reads [norm(embed(x(t+1))); norm(g(t))]
    law of x(t+2) = softmax(head norm(a(t+1)))

  For the token after next a takes the place of g. Layers are counted as in
  `Hidden`: i is the stream behind block i, before any norm. The output head is
  its own, over all of the target's ids or over some of them.

  Source: Li et al., EAGLE-3, arXiv:2503.01840, section 3.

  Attributes:
    target: the model it drafts for.
    block: its layer, with a `side_dim` of D.
    target_features: the three layers.
    num_ids: R, ids of its own vocabulary; None: all of the target's.
    own_embed: it has an embedding of its own; else it takes the target's.

  Raises:
    ValueError: the block does not fit the target, a layer is not one of its, or
      R is not in 1..V.
  """

  target: Transformer
  block: Transformer
  target_features: tuple[int, ...]
  num_ids: int | None = None
  own_embed: bool = False

  def __post_init__(self):
    base.check_block(
      self.target, self.block, input_norm=True, side_dim=self.block.embed_dim
    )
    base.check_num_ids(self.num_ids, self.vocab_size)
    for layer in self.target_features:
      if not 0 <= layer <= self.target.num_layers:
        raise ValueError(
          f'target_features must name layers 0..{self.target.num_layers}, got '
          f'{layer}.'
        )

  @property
  def vocab_size(self) -> int:
    """V, the target's."""
    return self.target.vocab_size

  @property
  def feature_dim(self) -> int:
    """D, which is the target's too."""
    return self.block.embed_dim

  @property
  def feature_dtype(self) -> str:
    """That of the layer."""
    return self.block.dtype

  def param_specs(self) -> Params:
    """{'fc', 'embed_norm', 'layers', 'norm', 'head', 'ids'?, 'embed'?}."""
    d, num = self.block.embed_dim, len(self.target_features)
    specs = {
      'fc': base.weight_spec(self.block, ('embed', None), d, num * d),
      'embed_norm': base.norm_spec(self.block),
      'layers': self.block.param_specs()['layers'],
      'norm': base.norm_spec(self.block),
      'head': base.weight_spec(
        self.block, ('vocab', 'embed'), self.num_ids or self.vocab_size, d
      ),
    }
    if self.num_ids is not None:
      specs['ids'] = base.ids_spec(self.num_ids)
    if self.own_embed:
      specs['embed'] = base.embed_spec(self.target, self.block)
    return specs

  def init(self, key: Key) -> Params:
    """Random parameters; a reduced vocabulary has the first R ids."""
    return base.init_params(self, key)

  def begin(self, params: Params, target_params: Params) -> Params:
    """As the target behind the highest of the layers that are captured.

    `fc` takes this layer alone, and the block is the target's last one; final
    norm and the rows of the output head are the target's.
    """
    d, num = self.block.embed_dim, len(self.target_features)
    (layer,) = params['layers']
    return {
      **params,
      'fc': jnp.eye(d, num * d, (num - 1) * d, dtype=self.block.dtype),
      'layers': (
        base.last_layer(self.target, target_params, self.block, layer),
      ),
      'norm': target_params['final_norm'],
      'head': base.reduced_output_head(
        self.target, target_params, params.get('ids'), self.block.dtype
      ),
    }

  def fuse(self, params: Params, features_BTE: Array) -> Array:
    """What g is, [B, T, D], from the captured streams side by side."""
    features_BTE = features_BTE.astype(self.block.dtype)
    return blocks.dense(self.block, params['proposer'], 'fc', features_BTE)

  def apply(
    self,
    params: Params,
    feature_BTD: Array,
    tokens_BT: Array,
    cache: KVCache,
    **places: Array | None,
  ) -> tuple[Array, KVCache]:
    """`FeatureHead.apply`: one row of a per token, [B, T, D]."""
    own = params['proposer']
    embed_BTD = base.embed(self.target, self.block, params, tokens_BT)
    side_BTD = blocks.norm(self.block, own, 'embed_norm', embed_BTD)
    return self.block.run_layers(
      own, feature_BTD, cache, side_BTX=side_BTD, **places
    )

  def unembed(self, params: Params, feature_BTD: Array) -> Array:
    """float32 [B, T, R], or [B, T, V] without a reduced vocabulary."""
    own = params['proposer']
    x_BTD = blocks.norm(self.block, own, 'norm', feature_BTD)
    return blocks.dense(self.block, own, 'head', x_BTD, dtype=jnp.float32)

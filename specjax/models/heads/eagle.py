"""EAGLE, the first form: the next feature from this one and the next token."""

import dataclasses

import jax.numpy as jnp

from specjax.models import block as blocks
from specjax.models.base import KVCache
from specjax.models.heads import base
from specjax.models.transformer import Transformer
from specjax.shapes import Array, Key, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle:
  """A linear map and one decoder layer; implements `FeatureHead`.

    f'(t+1) = layer(fc [embed(x(t+1)); f(t)])
    law of x(t+2) = softmax(target's output head f'(t+1))

  f is the target's hidden *behind* its final norm, and so is f', which goes to
  the target's output head as it is. The layer has no norm before attention.
  Entry t stands at position t.

  Source: Li et al., EAGLE, arXiv:2401.15077, section 3.1; embedding before
    feature, bias and missing norm as in the authors' published heads.

  Attributes:
    target: the model it drafts for.
    block: its layer, with `input_norm` False.
    fc_bias: the linear map has a bias.
    own_embed: it has an embedding of its own; else it takes the target's.

  Raises:
    ValueError: the block does not fit the target.
  """

  target: Transformer
  block: Transformer
  fc_bias: bool = True
  own_embed: bool = False
  num_ids = None

  def __post_init__(self):
    base.check_block(self.target, self.block, input_norm=False, side_dim=0)

  @property
  def target_features(self) -> tuple[int, ...]:
    """The stream behind the target's last block, before its final norm."""
    return (self.target.num_layers,)

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
    """{'fc', 'fc_bias'?, 'layers', 'embed'?}."""
    d = self.block.embed_dim
    specs = {
      'fc': base.weight_spec(self.block, ('embed', None), d, 2 * d),
      'layers': self.block.param_specs()['layers'],
    }
    if self.fc_bias:
      specs['fc_bias'] = dataclasses.replace(
        base.weight_spec(self.block, ('embed',), d), init='zeros'
      )
    if self.own_embed:
      specs['embed'] = base.embed_spec(self.target, self.block)
    return specs

  def init(self, key: Key) -> Params:
    """Random parameters, float in the layer's dtype; `key` is consumed."""
    return base.init_params(self, key)

  def begin(self, params: Params, target_params: Params) -> Params:
    """As they are: the output head is the target's anyway."""
    del target_params
    return params

  def fuse(self, params: Params, features_BTE: Array) -> Array:
    """What f is, [B, T, D]: the target's stream behind its final norm."""
    return base.behind_norm(self.target, self.block, params, features_BTE)

  def apply(
    self,
    params: Params,
    feature_BTD: Array,
    tokens_BT: Array,
    cache: KVCache,
    **places: Array | None,
  ) -> tuple[Array, KVCache]:
    """`FeatureHead.apply`: one row of f' per token, [B, T, D]."""
    own = params['proposer']
    embed_BTD = base.embed(self.target, self.block, params, tokens_BT)
    both_BTX = jnp.concatenate([embed_BTD, feature_BTD], axis=-1)
    x_BTD = blocks.dense(self.block, own, 'fc', both_BTX)
    return self.block.run_layers(own, x_BTD, cache, **places)

  def unembed(self, params: Params, feature_BTD: Array) -> Array:
    """float32 [B, T, V], by the target's output head, without another norm."""
    return base.target_logits(self.target, params, feature_BTD)

"""Multi-token prediction: one more block behind the target's last."""

import dataclasses

import jax.numpy as jnp

from specjax.models import block as blocks
from specjax.models.base import KVCache
from specjax.models.heads import base
from specjax.models.transformer import Transformer
from specjax.shapes import Array, Key, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTP:
  """One transformer block, chained for more tokens; a `FeatureHead`.

    h'(t+1) = norm(block(M [norm(embed(x(t+1))); norm(h(t))]))
    law of x(t+2) = softmax(target's output head h'(t+1))

  h is the target's hidden behind its final norm; for the token after next h'
  takes its place. Embedding and output head are the target's. Entry t stands at
  position t.

  Source: DeepSeek-V3, arXiv:2412.19437, section 2.2. Deviations: the block is
    dense; one module serves every depth, where the paper trains one for each
    (published models have one); the embedding comes first in M's input, as in
    the published weights; over some of the target's ids, as EAGLE-3 has them,
    the output head is its own.

  Attributes:
    target: the model it drafts for.
    block: its layer.
    num_ids: R, ids of its own vocabulary; None: all of the target's.

  Raises:
    ValueError: the block does not fit the target, or R is not in 1..V.
  """

  target: Transformer
  block: Transformer
  num_ids: int | None = None

  def __post_init__(self):
    base.check_block(self.target, self.block, input_norm=True, side_dim=0)
    base.check_num_ids(self.num_ids, self.vocab_size)

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
    """That of the block."""
    return self.block.dtype

  def param_specs(self) -> Params:
    """{'embed_norm', 'hidden_norm', 'proj', 'layers', 'norm', 'head'?, 'ids'?}.

    The last two with a reduced vocabulary.
    """
    d = self.block.embed_dim
    specs = {
      'embed_norm': base.norm_spec(self.block),
      'hidden_norm': base.norm_spec(self.block),
      'proj': base.weight_spec(self.block, ('embed', None), d, 2 * d),
      'layers': self.block.param_specs()['layers'],
      'norm': base.norm_spec(self.block),
    }
    if self.num_ids is not None:
      specs['head'] = base.weight_spec(
        self.block, ('vocab', 'embed'), self.num_ids, d
      )
      specs['ids'] = base.ids_spec(self.num_ids)
    return specs

  def init(self, key: Key) -> Params:
    """Random parameters; a reduced vocabulary has the first R ids."""
    return base.init_params(self, key)

  def begin(self, params: Params, target_params: Params) -> Params:
    """With the target's final norm before its output head."""
    begun = {**params, 'norm': target_params['final_norm']}
    if self.num_ids is not None:
      begun['head'] = base.reduced_output_head(
        self.target, target_params, params['ids'], self.block.dtype
      )
    return begun

  def fuse(self, params: Params, features_BTE: Array) -> Array:
    """What h is, [B, T, D]: the target's stream behind its final norm."""
    return base.behind_norm(self.target, self.block, params, features_BTE)

  def apply(
    self,
    params: Params,
    feature_BTD: Array,
    tokens_BT: Array,
    cache: KVCache,
    **places: Array | None,
  ) -> tuple[Array, KVCache]:
    """`FeatureHead.apply`: one row of h' per token, [B, T, D]."""
    own = params['proposer']
    embed_BTD = base.embed(self.target, self.block, params, tokens_BT)
    both_BTX = jnp.concatenate(
      [
        blocks.norm(self.block, own, 'embed_norm', embed_BTD),
        blocks.norm(self.block, own, 'hidden_norm', feature_BTD),
      ],
      axis=-1,
    )
    x_BTD = blocks.dense(self.block, own, 'proj', both_BTX)
    x_BTD, cache = self.block.run_layers(own, x_BTD, cache, **places)
    return blocks.norm(self.block, own, 'norm', x_BTD), cache

  def unembed(self, params: Params, feature_BTD: Array) -> Array:
    """float32 [B, T, V] by the target's output head, or [B, T, R]."""
    if self.num_ids is not None:
      own = params['proposer']
      return blocks.dense(
        self.block, own, 'head', feature_BTD, dtype=jnp.float32
      )
    return base.target_logits(self.target, params, feature_BTD)

"""Draft heads: small networks that read the hiddens of a frozen target.

A head is no language model of its own: it holds the static target it was made
for and looks into its parameters, so `params` is {'target', 'proposer'} here as
it is for proposers. What is captured of the target is a *feature*; entry t of a
feature-fed head joins the feature of token t with token t + 1:

  text       x0   x1   x2   x3           x3 pending, in no cache yet
  feature    f0   f1   f2                of the target's pass over x0 x1 x2
  entry      f0x1 f1x2 f2x3              the law behind the last is that of x4
"""

from typing import Any, Protocol

import jax.numpy as jnp

from specjax import sharding
from specjax.models import layers, quantize
from specjax.models.base import Cache, LanguageModel
from specjax.models.transformer import Transformer
from specjax.shapes import Array, Key, Params
from specjax.sharding import ParamSpec, Placement


class Block(Protocol):
  """What keeps the entries of a head, as a `LanguageModel` keeps tokens.

  Attributes:
    context_length: how many entries it was made for.
    placement: where its arrays lie; None is one device.
  """

  context_length: int
  placement: Placement | None

  def init_cache(
    self, batch_size: int, num_slots: int, max_rewind: int
  ) -> Cache:
    """See `LanguageModel.init_cache`."""
    ...

  def keep(
    self, cache: Cache, start_B: Array, path_BM: Array | None, num_B: Array
  ) -> Cache:
    """See `LanguageModel.keep`."""
    ...


class FeatureHead(Protocol):
  """A head that goes on from its own output, in place of the next feature.

  Attributes:
    target: the model it drafts for.
    block: keeps its entries.
    target_features: layers of the target that are captured for it.
    feature_dim: D, the width of what an entry reads.
    feature_dtype: its dtype.
    vocab_size: V, the target's.
    num_ids: R, the size of its own vocabulary, the target's ids in
      `params['proposer']['ids']`; None: all of the target's.
  """

  target: LanguageModel
  block: Block
  target_features: tuple[int, ...]
  feature_dim: int
  feature_dtype: str
  vocab_size: int
  num_ids: int | None

  def param_specs(self) -> Params:
    """A tree of `ParamSpec`."""
    ...

  def init(self, key: Key) -> Params:
    """Random parameters of the head."""
    ...

  def begin(self, params: Params, target_params: Params) -> Params:
    """The head's parameters, those of the target in place of its equals."""
    ...

  def fuse(self, params: Params, features_BTE: Array) -> Array:
    """The captured layers as what an entry reads, [B, T, D]."""
    ...

  def apply(
    self,
    params: Params,
    feature_BTD: Array,
    tokens_BT: Array,
    cache: Cache,
    *,
    num_tokens_B: Array | None = None,
    positions_BT: Array | None = None,
    visible_BTS: Array | None = None,
  ) -> tuple[Array, Cache]:
    """Appends entries.

    Args:
      params: {'target', 'proposer'}.
      feature_BTD: of tokens t: from `fuse`, or what `apply` gave for t - 1.
      tokens_BT: int32 [B, T], tokens t + 1.
      cache: of the entries before.
      num_tokens_B: int32 [B], how many of the T are real; None: all.
      positions_BT: int32 [B, T]; None: length + 0..T-1.
      visible_BTS: bool [B, T, S], which slots are seen; None: causal.

    Returns:
      What stands for the features of tokens t + 1, [B, T, D], and the cache.
    """
    ...

  def unembed(self, params: Params, feature_BTD: Array) -> Array:
    """float32 logits of tokens t + 2 over the head's ids, [B, T, R]."""
    ...


class IndependentHeads(Protocol):
  """Heads that all read one feature, each for a token of its own.

  Attributes:
    target: the model they draft for.
    target_features: layers of the target that are captured for them.
    feature_dim: E, the width of what is captured.
    feature_dtype: its dtype.
    vocab_size: V, the target's.
    placement: where their arrays lie; None is one device.
    num_heads: K at most. Head i = 0, 1, ... is for the token i + 2 behind the
      feature's own.
  """

  target: LanguageModel
  target_features: tuple[int, ...]
  feature_dim: int
  feature_dtype: str
  vocab_size: int
  placement: Placement | None
  num_heads: int

  def param_specs(self) -> Params:
    """A tree of `ParamSpec`."""
    ...

  def init(self, key: Key) -> Params:
    """Random parameters of the heads."""
    ...

  def begin(self, params: Params, target_params: Params) -> Params:
    """The heads' parameters, those of the target in place of its equals."""
    ...

  def logits(
    self, params: Params, features_BTE: Array, num_heads: int
  ) -> tuple[Array, ...]:
    """float32 logits of the first heads, each [B, T, V]."""
    ...


def check_target(target: Any):
  """Raises ValueError unless the target has hiddens of the known kind."""
  if not isinstance(target, Transformer):
    raise ValueError(
      'a head needs a transformer for a target, whose hiddens it reads, got a '
      f'{type(target).__name__}.'
    )


def check_block(target: Any, block: Transformer, **wanted: Any):
  """Raises ValueError unless the block fits the target and has the settings."""
  check_target(target)
  wanted = {'embed_dim': target.embed_dim, 'num_layers': 1, **wanted}
  for name, value in wanted.items():
    if getattr(block, name) != value:
      raise ValueError(
        f'{name} of the head must be {value}, got {getattr(block, name)}.'
      )


def check_num_ids(num_ids: int | None, vocab_size: int):
  """Raises ValueError unless a reduced vocabulary is a part of the target's."""
  if num_ids is not None and not 1 <= num_ids <= vocab_size:
    raise ValueError(
      f'num_ids must be in 1..{vocab_size}, the ids of the target, got '
      f'{num_ids}.'
    )


def weight_spec(
  block: Transformer, axes: tuple[str | None, ...], *shape: int
) -> ParamSpec:
  """Of a weight in the block's dtype; matrices are [out, in]."""
  return ParamSpec(shape=shape, dtype=block.dtype, logical_axes=axes)


def norm_spec(block: Transformer) -> ParamSpec:
  """Of a norm's scale, float32 [D], which begins as ones."""
  return ParamSpec(
    shape=(block.embed_dim,),
    dtype='float32',
    logical_axes=('norm',),
    init='ones',
  )


def embed_spec(target: Transformer, block: Transformer) -> ParamSpec:
  """Of an embedding that is the head's own."""
  shape = target.padded_vocab_size, block.embed_dim
  return weight_spec(block, ('vocab', 'embed'), *shape)


def ids_spec(num_ids: int) -> ParamSpec:
  """Of the target's ids that a reduced vocabulary has, ascending."""
  return ParamSpec(
    shape=(num_ids,), dtype='int32', logical_axes=(None,), init='zeros'
  )


def init_params(head: FeatureHead, key: Key) -> Params:
  """Random parameters; a reduced vocabulary has the first ids."""
  params = sharding.init_params(head.param_specs(), key, head.block.placement)
  if head.num_ids is not None:
    params['ids'] = jnp.arange(head.num_ids, dtype=jnp.int32)
  return params


def output_head(target: Transformer, target_params: Params) -> Array:
  """The matrix that makes the target's logits, float32 [V, D]."""
  weight = target_params['embed' if target.tied else 'head']
  if isinstance(weight, quantize.Int8Weight):
    wide_OI = weight.int8_OI.astype(jnp.float32) * weight.scale_O[:, None]
  else:
    wide_OI = weight.astype(jnp.float32)
  return wide_OI[: target.vocab_size]


def reduced_output_head(
  target: Transformer, target_params: Params, ids_R: Array | None, dtype: str
) -> Array:
  """Its rows of a reduced vocabulary, or all of them for None, [R, D]."""
  head_VD = output_head(target, target_params)
  rows = head_VD if ids_R is None else head_VD[ids_R]
  return rows.astype(dtype)


def last_layer(
  target: Transformer, target_params: Params, block: Transformer, own: Params
) -> Params:
  """A block's layer that begins as the target's last one.

  It reads the stream as the target does; what it reads beside it counts for
  nothing yet. What has no equal of its shape stays as it is, and all of it
  where the target's matrices are fused or int8.

  Args:
    target, target_params: the model.
    block: of the head.
    own: the parameters of the block's layer.
  """
  if target.is_fused or target.quantize != 'none':
    return own
  last = target_params['layers'][-1]
  begun = {}
  for name, x in own.items():
    wanted = last.get(name, x)
    if wanted.shape != x.shape and name in ('q', 'k', 'v'):
      nothing_OX = jnp.zeros((wanted.shape[0], block.side_dim), wanted.dtype)
      wanted = jnp.concatenate([nothing_OX, wanted], axis=1)
    begun[name] = wanted.astype(x.dtype) if wanted.shape == x.shape else x
  return begun


def embed(
  target: Transformer, block: Transformer, params: Params, tokens_BT: Array
) -> Array:
  """The head's own embedding if it has one, else the target's, [B, T, D]."""
  own = params['proposer'].get('embed')
  if own is not None:
    return layers.lookup(
      own, tokens_BT, block.dtype, is_local=block.placement is None
    )
  return target.embed(params['target'], tokens_BT).astype(block.dtype)


def behind_norm(
  target: Transformer, block: Transformer, params: Params, features_BTE: Array
) -> Array:
  """`FeatureHead.fuse` of heads that read the target behind its final norm.

  Args:
    target: the model, whose last layer alone is captured (E is D).
    block: gives the dtype.
    params: {'target', 'proposer'}.
    features_BTE: [B, T, E], the stream behind the last block.

  Returns:
    [B, T, D], the block's dtype.
  """
  feature_BTD = target.final_norm(params['target'], features_BTE)
  return feature_BTD.astype(block.dtype)


def target_logits(
  target: Transformer, params: Params, feature_BTD: Array
) -> Array:
  """`FeatureHead.unembed` of heads that end in the target's output head.

  Args:
    target: the model.
    params: {'target', 'proposer'}.
    feature_BTD: [B, T, D], normed: it goes to the output head as it is.

  Returns:
    float32 [B, T, V].
  """
  return target.logits(params['target'], feature_BTD.astype(target.dtype))


def widen(logits_BTR: Array, ids_R: Array, vocab_size: int) -> Array:
  """Puts the logits of a few ids where the ids are, -inf elsewhere.

  >>> widen(jnp.array([[[1.0, 2.0]]]), jnp.array([0, 2]), 4)
  Array([[[  1., -inf,   2., -inf]]], dtype=float32)
  """
  shape = (*logits_BTR.shape[:2], vocab_size)
  wide_BTV = jnp.full(shape, -jnp.inf, logits_BTR.dtype)
  return wide_BTV.at[:, :, ids_R].set(
    logits_BTR, mode='drop', unique_indices=True
  )

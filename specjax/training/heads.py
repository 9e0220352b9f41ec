"""Objectives for heads on a frozen target: Medusa, MTP, EAGLE and EAGLE-3.

The target reads the text in the step, under no gradient; a head is taught on
its hiddens what the target's law is there, or what the text says. What a
feature-fed head sees when it drafts is not what it saw in training: behind its
first entry there are features of its own. Training-time test makes those
entries in training as well, `depth` of them in a row.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.mesh import MeshShape, View, place, refine
from specjax.models.base import Hidden
from specjax.models.heads import base, build
from specjax.models.heads.build import Head
from specjax.models.transformer import Transformer
from specjax.shapes import Array, Key, Params
from specjax.training import losses
from specjax.training.objective import Batch, Metrics, trainable, whole


def trainable_head(head: Head, view: View | None = None) -> Head:
  """The head in a form that has derivatives, see `objective.trainable`.

  Args:
    head: of `heads.build`, with a target of float weights that is not fused.
    view: of the mesh; None is one of one device.
  """
  if view is None:
    view, _ = refine(MeshShape())
  target = trainable(head.target, view)
  head = build.placed(head, place(head.param_specs(), view))
  return dataclasses.replace(head, target=target)


def split(params: Params) -> tuple[Params, Params]:
  """A head's parameters as those that are trained and those that are not.

  The ids of a reduced vocabulary are whole numbers; they and the target's
  parameters are frozen: {'target', 'ids'?}, the first without its target yet.
  """
  if not isinstance(params, dict) or 'ids' not in params:
    return params, {}
  trained = {name: x for name, x in params.items() if name != 'ids'}
  return trained, {'ids': params['ids']}


def join(params: Params, frozen_params: Params) -> Params:
  """{'target', 'proposer'} from trained and frozen parameters."""
  own = params
  if 'ids' in frozen_params:
    own = {**params, 'ids': frozen_params['ids']}
  frozen = jax.lax.stop_gradient(frozen_params['target'])
  return {'target': frozen, 'proposer': own}


def _taught(
  divergence: str | None, p_BTR: Array, q_BTR: Array, token_BT: Array
) -> Array:
  """The loss per token: of the target's law, or of the text's token."""
  if divergence is None:
    return losses.cross_entropy(q_BTR, token_BT)
  return losses.divergence(divergence, p_BTR, q_BTR)


def _check(divergence: str | None, decay: float):
  if divergence is not None:
    losses.check_divergence(divergence)
  if not 0 < decay <= 1:
    raise ValueError(f'decay must be above 0 and at most 1, got {decay}.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaLoss:
  """Independent heads: sum over k of decay ** k times the loss of head k.

  Source: Cai et al., Medusa, arXiv:2401.10774, equation 1; the target stays as
    it is (Medusa-1).

  Attributes:
    heads: from `trainable_head`.
    divergence: from the target's law, a key of `losses.DIVERGENCES`; None:
      cross-entropy of the text, as in the paper.
    decay: of the weights, above 0 and at most 1.

  Raises:
    ValueError: the divergence is unknown, or `decay` is out of range.
  """

  heads: base.IndependentHeads
  divergence: str | None = None
  decay: float = 0.8

  def __post_init__(self):
    _check(self.divergence, self.decay)

  def init(self, key: Key) -> Params:
    """The heads' own parameters."""
    return self.heads.init(key)

  def loss(
    self, params: Params, frozen_params: Params, batch: Batch, key: Key
  ) -> tuple[Array, Metrics]:
    """`Objective.loss`; figures are numbered by head, from 0.

    Args:
      params: the heads'.
      frozen_params: {'target'}.
      batch: rows of two tokens more than there are heads, at least.
      key: not used.

    Returns:
      float32 [], and 'loss_i' and 'overlap_i' (the mean of sum min(p, q)).

    Raises:
      ValueError: at trace time, if rows are too short.
    """
    del key
    heads, target = self.heads, self.heads.target
    both = join(params, frozen_params)
    tokens_BT, mask_BT = batch['tokens_BT'], batch['mask_BT']
    hidden = whole(
      target, both['target'], tokens_BT[:, :-1], heads.target_features
    )
    hidden = jax.lax.stop_gradient(hidden)
    num = tokens_BT.shape[1] - 1
    total, figures = 0.0, {}
    for i in range(heads.num_heads):
      # Hidden t is for token t + 2 + i, whose law is that behind t + 1 + i.
      length = num - 1 - i
      if length < 1:
        raise ValueError(
          f'rows must have at least {i + 3} tokens for {heads.num_heads} '
          f'heads, got {num + 1}.'
        )

      def per_token(features_BTE, last_BTD, token_BT, i=i) -> Metrics:
        q_BTV = heads.logits(both, features_BTE, i + 1)[i]
        p_BTV = target.unembed(both['target'], last_BTD)
        return {
          'loss': _taught(self.divergence, p_BTV, q_BTV, token_BT),
          'overlap': jax.lax.stop_gradient(losses.overlap(p_BTV, q_BTV)),
        }

      found = losses.chunked(
        per_token,
        (
          hidden.features_BTE[:, :length],
          hidden.last_BTD[:, i + 1 : i + 1 + length],
          tokens_BT[:, i + 2 :],
        ),
        mask_BT[:, i + 2 :],
        heads.vocab_size,
      )
      total += self.decay ** (i + 1) * found['loss']
      figures |= {f'{name}_{i}': x for name, x in found.items()}
    return total, figures


class Law(NamedTuple):
  """What the target says of a head's ids.

  Attributes:
    logits_BTR: float32.
    log_norm_BT: logsumexp over all of the target's ids.
    is_best_BT: its likeliest id is among the head's.
  """

  logits_BTR: Array
  log_norm_BT: Array
  is_best_BT: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureLoss:
  """A feature-fed head, unrolled on its own output.

    sum over s < depth of
      decay ** s * (token_weight * tokens + feature_weight * features)

  with a divergence or cross-entropy for tokens and a smooth L1 for features.

  At depth s index t stands for entry t + s: it has the output of depth s - 1
  for a feature and the text's token t + s + 1, and predicts token t + s + 2. It
  sees what it would see in drafting: true entries up to t, and its own line.

    depth 0     e0 e1 e2 e3        e2 sees e0 e1 e2
    depth 1     .  f1 f2 f3 f4     f3 = (output of e2, token 4) sees e0 e1 e2 f3

  In a reduced vocabulary laws are renormalised over its ids, and places are
  left out where the target's likeliest id (without a divergence: the text's
  token) is not among them.

  Source: EAGLE (arXiv:2401.15077, section 3.2): depth 1, token_weight 0.1,
    feature_weight 1, noise 0.1. EAGLE-3 (arXiv:2503.01840, section 3.2):
    features are not compared; weights as in the authors' code. MTP
    (DeepSeek-V3, arXiv:2412.19437, equations 24 and 25): the text's tokens,
    depth D with one module for all. `RECIPES` has the three.

  Attributes:
    head: from `trainable_head`.
    depth: entries in a row, at least 1; more is training-time test.
    divergence: from the target's law, a key of `losses.DIVERGENCES`; None:
      cross-entropy of the text.
    decay: of the depths' weights, above 0 and at most 1.
    token_weight: of the tokens' loss.
    feature_weight: of the features'; 0 does not compare them.
    noise: true features are moved by at most so much, uniformly.
    reader: the target in the form in which it reads the text and says its law,
      with parameters 'reader' among the frozen ones. It needs no derivatives:
      int8 and fused as it decodes it is faster, and the features are those of
      decoding. None: the head's target.

  Raises:
    ValueError: naming the setting, the rule and the value.
  """

  head: base.FeatureHead
  depth: int = 1
  divergence: str | None = 'forward_kl'
  decay: float = 0.8
  token_weight: float = 1.0
  feature_weight: float = 0.0
  noise: float = 0.0
  reader: Transformer | None = None

  def __post_init__(self):
    _check(self.divergence, self.decay)
    if self.depth < 1:
      raise ValueError(f'depth must be >= 1, got {self.depth}.')
    for name in ('token_weight', 'feature_weight', 'noise'):
      if not getattr(self, name) >= 0:
        raise ValueError(f'{name} must be >= 0, got {getattr(self, name)}.')

  def init(self, key: Key) -> Params:
    """The head's parameters that are trained: without the ids, see `split`."""
    return split(self.head.init(key))[0]

  def loss(
    self, params: Params, frozen_params: Params, batch: Batch, key: Key
  ) -> tuple[Array, Metrics]:
    """`Objective.loss`; figures are numbered by depth, from 0.

    Args:
      params: the head's, without ids.
      frozen_params: {'target', 'ids'?}.
      batch: rows of at least `depth` + 2 tokens.
      key: of the noise on features.

    Returns:
      float32 [], and 'loss_s', 'overlap_s' (the mean of sum min(p, q)) and
      'features_s', if these are compared.

    Raises:
      ValueError: at trace time, if rows are too short.
    """
    head = self.head
    both = join(params, frozen_params)
    tokens_BT, mask_BT = batch['tokens_BT'], batch['mask_BT']
    b, num = tokens_BT.shape[0], tokens_BT.shape[1] - 2
    if num < self.depth:
      raise ValueError(
        f'rows must have at least {self.depth + 2} tokens for a depth of '
        f'{self.depth}, got {num + 2}.'
      )
    reader, reader_params = self.reading(frozen_params)
    if 'last_BTD' in batch:
      hidden = Hidden(batch['last_BTD'], batch['features_BTE'])
    else:
      hidden = whole(
        reader, reader_params, tokens_BT[:, :-1], head.target_features
      )
    hidden = jax.lax.stop_gradient(hidden)
    law = hidden.last_BTD
    if head.num_ids is not None:
      # Small enough to be kept: it is made once for all depths.
      law = losses.stretched(
        lambda last_BTD: self._law(frozen_params, last_BTD),
        hidden.last_BTD,
        head.vocab_size,
      )
    true_BTD = head.fuse(both, hidden.features_BTE)
    feature_BTD = true_BTD[:, :num]
    if self.noise:
      feature_BTD += jax.random.uniform(
        key, feature_BTD.shape, feature_BTD.dtype, -self.noise, self.noise
      )
    cache = head.block.init_cache(b, num, max_rewind=0)
    index_T = jnp.arange(num, dtype=jnp.int32)
    total, figures = 0.0, {}
    for s in range(self.depth):
      shifted = lambda tree, offset: jax.tree.map(
        lambda x_BT: _shift(x_BT, offset, num), tree
      )
      if s:
        more = head.block.init_cache(b, num, max_rewind=0)
        cache = jax.tree.map(_behind, cache, more)
      feature_BTD, cache = head.apply(
        both,
        feature_BTD,
        shifted(tokens_BT, s + 1),
        cache,
        positions_BT=jnp.broadcast_to(index_T + s, (b, num)),
        visible_BTS=jnp.broadcast_to(
          _visible(num, s)[None], (b, num, (s + 1) * num)
        ),
      )
      found = losses.chunked(
        lambda *inputs: self._per_token(params, frozen_params, *inputs),
        (
          feature_BTD,
          shifted(true_BTD, s + 1),
          shifted(law, s + 1),
          shifted(tokens_BT, s + 2),
        ),
        shifted(mask_BT, s + 2) & (index_T + s < num)[None],
        head.num_ids or head.vocab_size,
      )
      # Of all places, those that are taught: the mean over these.
      found['loss'] /= jnp.maximum(found.pop('is_taught'), 1e-6)
      loss = self.token_weight * found['loss']
      if self.feature_weight:
        loss += self.feature_weight * found['features']
      total += self.decay**s * loss
      figures |= {f'{name}_{s}': x for name, x in found.items()}
    return total, figures

  def reading(self, frozen_params: Params) -> tuple[Transformer, Params]:
    """The target as it reads the text, and its parameters."""
    if self.reader is None:
      return self.head.target, frozen_params['target']
    return self.reader, frozen_params['reader']

  def _law(self, frozen_params: Params, last_BTD: Array) -> Law:
    """What the target says, of the head's ids."""
    reader, reader_params = self.reading(frozen_params)
    logits_BTV = jax.lax.stop_gradient(reader.unembed(reader_params, last_BTD))
    log_norm_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    if self.head.num_ids is None:
      return Law(logits_BTV, log_norm_BT, jnp.ones(log_norm_BT.shape, bool))
    ids_R = frozen_params['ids']
    logits_BTR = logits_BTV[:, :, ids_R]
    is_best_BT = jnp.max(logits_BTR, axis=-1) == jnp.max(logits_BTV, axis=-1)
    return Law(logits_BTR, log_norm_BT, is_best_BT)

  def _per_token(
    self,
    params: Params,
    frozen_params: Params,
    feature_BTD: Array,
    true_BTD: Array,
    law: Any,
    token_BT: Array,
  ) -> Metrics:
    """The figures of predicted tokens; `law` may be what it is made of."""
    head = self.head
    q_BTR = head.unembed(join(params, frozen_params), feature_BTD)
    if head.num_ids is None:
      law = self._law(frozen_params, law)
    is_taught_BT = law.is_best_BT
    if head.num_ids is not None and self.divergence is None:
      row_V = (
        jnp.full(head.vocab_size, -1)
        .at[frozen_params['ids']]
        .set(jnp.arange(head.num_ids))
      )
      is_taught_BT = row_V[token_BT] >= 0
      token_BT = jnp.maximum(row_V[token_BT], 0)
    loss_BT = _taught(self.divergence, law.logits_BTR, q_BTR, token_BT)
    figures = {
      'loss': jnp.where(is_taught_BT, loss_BT, 0.0),
      'is_taught': is_taught_BT.astype(jnp.float32),
      'overlap': jax.lax.stop_gradient(_overlap(law, q_BTR)),
    }
    if self.feature_weight:
      true_BTD = jax.lax.stop_gradient(true_BTD)
      figures['features'] = _smooth_l1(feature_BTD, true_BTD)
    return figures


def _overlap(law: Law, q_BTR: Array) -> Array:
  """`losses.overlap`; behind the head's ids the draft has nothing."""
  p_BTR = jnp.exp(law.logits_BTR - law.log_norm_BT[:, :, None])
  q_BTR = jax.nn.softmax(q_BTR.astype(jnp.float32), axis=-1)
  return jnp.sum(jnp.minimum(p_BTR, q_BTR), axis=-1)


def _shift(x_BT: Array, offset: int, num: int) -> Array:
  """x[:, offset : offset + num], zeros behind its end."""
  x_BT = x_BT[:, offset : offset + num]
  missing = num - x_BT.shape[1]
  return jnp.pad(x_BT, ((0, 0), (0, missing), *((0, 0),) * (x_BT.ndim - 2)))


def _behind(old: Array, more: Array) -> Array:
  """A cache's slots [B, G, S, ...] with others behind; lengths are kept."""
  if old.ndim == 1:
    return old
  return jnp.concatenate([old, more], axis=2)


def _visible(num: int, s: int) -> Array:
  """What index t of depth s sees, bool [T, (s + 1) * T].

  The slots of depth 0 up to t, and of the depths behind it slot t alone.
  """
  index_T1 = jnp.arange(num)[:, None]
  slot_1S = jnp.arange((s + 1) * num)[None, :]
  is_true = slot_1S <= index_T1
  is_own = (slot_1S >= num) & (slot_1S % num == index_T1)
  return is_true | is_own


def _smooth_l1(x_BTD: Array, y_BTD: Array) -> Array:
  """Mean over D of d * d / 2 where |d| < 1, else |d| - 1 / 2."""
  d_BTD = jnp.abs((x_BTD - y_BTD).astype(jnp.float32))
  loss_BTD = jnp.where(d_BTD < 1, 0.5 * d_BTD * d_BTD, d_BTD - 0.5)
  return jnp.mean(loss_BTD, axis=-1)


# As published. The depth of the last two is a choice.
RECIPES: dict[str, dict[str, Any]] = {
  'eagle': {'token_weight': 0.1, 'feature_weight': 1.0, 'noise': 0.1},
  'eagle3': {'depth': 4},
  'mtp': {'depth': 4, 'divergence': None, 'decay': 1.0},
}


def objective_of(kind: str, head: Head, **settings):
  """The objective of a head of this kind, as published but for `settings`.

  Args:
    kind: 'medusa', 'mtp', 'eagle' or 'eagle3'.
    head: from `trainable_head`.
    **settings: fields of `MedusaLoss` or `FeatureLoss`.

  Raises:
    ValueError: for another kind.
  """
  if kind != 'medusa' and kind not in RECIPES:
    raise ValueError(
      f'kind must be one of medusa, {", ".join(RECIPES)}, got {kind!r}.'
    )
  if kind == 'medusa':
    return MedusaLoss(heads=head, **settings)
  return FeatureLoss(head=head, **{**RECIPES[kind], **settings})

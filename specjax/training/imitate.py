"""Objectives of language models: a text's next token, or a target's law."""

import dataclasses

import jax

from specjax.models.transformer import Transformer
from specjax.shapes import Array, Key, Params
from specjax.training import losses
from specjax.training.objective import Batch, Metrics, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextToken:
  """Cross-entropy of each token given those before it.

  Attributes:
    model: from `objective.trainable`.
  """

  model: Transformer

  def init(self, key: Key) -> Params:
    """The model's own parameters; `key` is consumed."""
    return self.model.init(key)

  def loss(
    self, params: Params, frozen_params: Params, batch: Batch, key: Key
  ) -> tuple[Array, Metrics]:
    """`Objective.loss`: nats per predicted token, float32 []."""
    del frozen_params, key
    tokens_BT, mask_BT = batch['tokens_BT'], batch['mask_BT']
    hidden = whole(self.model, params, tokens_BT[:, :-1])

    def per_token(last_BTD: Array, next_BT: Array) -> Metrics:
      logits_BTV = self.model.unembed(params, last_BTD)
      return {'cross_entropy': losses.cross_entropy(logits_BTV, next_BT)}

    figures = losses.chunked(
      per_token,
      (hidden.last_BTD, tokens_BT[:, 1:]),
      mask_BT[:, 1:],
      self.model.vocab_size,
    )
    return figures['cross_entropy'], figures


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distill:
  """A draft learns the law of a frozen target after every prefix of a text.

  The text may be anybody's: a dataset's, the target's, or the draft's own.

  Attributes:
    draft: from `objective.trainable`.
    target: likewise; its parameters are the frozen ones.
    divergence: a key of `losses.DIVERGENCES`.

  Raises:
    ValueError: the divergence is unknown, or the vocabularies differ.

  Source: Zhou et al., DistillSpec, arXiv:2310.08461, equation 1.
  """

  draft: Transformer
  target: Transformer
  divergence: str

  def __post_init__(self):
    losses.check_divergence(self.divergence)
    sizes = self.draft.vocab_size, self.target.vocab_size
    if sizes[0] != sizes[1]:
      raise ValueError(
        f'draft and target must have the same vocabulary, got {sizes[0]} and '
        f'{sizes[1]} ids.'
      )

  def init(self, key: Key) -> Params:
    """The draft's own parameters; `key` is consumed."""
    return self.draft.init(key)

  def loss(
    self, params: Params, frozen_params: Params, batch: Batch, key: Key
  ) -> tuple[Array, Metrics]:
    """`Objective.loss`: the divergence per predicted token, float32 [].

    `frozen_params` are the target's. The figures have the divergence under its
    name, and 'overlap', the mean of sum min(p, q).
    """
    del key
    # The law behind a prefix is compared where the mask wants what comes after;
    # the whole row has nothing after it.
    tokens_BT, mask_BT = batch['tokens_BT'][:, :-1], batch['mask_BT'][:, 1:]
    taught = jax.lax.stop_gradient(whole(self.target, frozen_params, tokens_BT))
    learnt = whole(self.draft, params, tokens_BT)

    def per_token(target_BTD: Array, draft_BTD: Array) -> Metrics:
      p_BTV = self.target.unembed(frozen_params, target_BTD)
      p_BTV = jax.lax.stop_gradient(p_BTV)
      q_BTV = self.draft.unembed(params, draft_BTD)
      return {
        self.divergence: losses.divergence(self.divergence, p_BTV, q_BTV),
        'overlap': jax.lax.stop_gradient(losses.overlap(p_BTV, q_BTV)),
      }

    figures = losses.chunked(
      per_token,
      (taught.last_BTD, learnt.last_BTD),
      mask_BT,
      self.draft.vocab_size,
    )
    return figures[self.divergence], figures

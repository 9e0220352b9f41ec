"""New heads in a target's measure."""

import dataclasses
from collections.abc import Callable

import numpy as np

from specjax.models.heads import base
from specjax.models.heads.eagle import Eagle
from specjax.models.heads.eagle3 import Eagle3, default_layers
from specjax.models.heads.medusa import MedusaHeads
from specjax.models.heads.mtp import MTP
from specjax.models.transformer import Transformer
from specjax.sharding import Placement

Head = Eagle | Eagle3 | MedusaHeads | MTP


def block_of(target: Transformer, dtype: str, **changes) -> Transformer:
  """A layer in the form of Llama's, of the target's widths and positions.

  Args:
    target: the model.
    dtype: of its weights.
    **changes: other fields.
  """
  return Transformer(
    **{
      **{
        name: getattr(target, name)
        for name in (
          'vocab_size',
          'padded_vocab_size',
          'context_length',
          'embed_dim',
          'ffn_dim',
          'num_heads',
          'num_kv_heads',
          'head_dim',
          'norm_eps',
          'cache_dtype',
        )
      },
      'windows': (None,),
      'ropes': target.ropes[-1:],
      'activation': 'silu',
      'score_scale': target.head_dim**-0.5,
      'dtype': dtype,
      **changes,
    }
  )


def _mtp(target: Transformer, dtype: str, **settings) -> MTP:
  return MTP(target=target, block=block_of(target, dtype), **settings)


def _eagle(target: Transformer, dtype: str, **settings) -> Eagle:
  block = block_of(target, dtype, input_norm=False)
  return Eagle(target=target, block=block, **settings)


def _eagle3(target: Transformer, dtype: str, **settings) -> Eagle3:
  return Eagle3(
    target=target,
    block=block_of(target, dtype, side_dim=target.embed_dim),
    target_features=default_layers(target.num_layers),
    **settings,
  )


def _medusa(target: Transformer, dtype: str, **settings) -> MedusaHeads:
  return MedusaHeads(target=target, dtype=dtype, **settings)


_MAKERS: dict[str, Callable[..., Head]] = {
  'medusa': _medusa,
  'mtp': _mtp,
  'eagle': _eagle,
  'eagle3': _eagle3,
}
KINDS = tuple(_MAKERS)


def build(
  kind: str, target: Transformer, dtype: str = 'float32', **settings
) -> Head:
  """A head for a target, in its widths.

  Args:
    kind: one of `KINDS`.
    target: the model it drafts for.
    dtype: of its weights and activations.
    **settings: further fields of the head's class, as num_heads for 'medusa'
      and num_ids for 'mtp' and 'eagle3'.

  Raises:
    ValueError: an unknown kind, or a target that has no hiddens.
  """
  if kind not in _MAKERS:
    raise ValueError(f'head must be one of {", ".join(KINDS)}, got {kind!r}.')
  base.check_target(target)
  return _MAKERS[kind](target, dtype, **settings)


def placement_of(head: Head) -> Placement | None:
  """Where a head's arrays lie."""
  owner = head if isinstance(head, MedusaHeads) else head.block
  return owner.placement


def placed(head: Head, placement: Placement | None) -> Head:
  """The same head with its arrays elsewhere; its target stays."""
  if isinstance(head, MedusaHeads):
    return dataclasses.replace(head, placement=placement)
  block = dataclasses.replace(head.block, placement=placement)
  return dataclasses.replace(head, block=block)


def most_frequent(counts_V: np.ndarray, num_ids: int) -> np.ndarray:
  """The ids of a reduced vocabulary: those seen most, ascending.

  Args:
    counts_V: integers [V], how often each id was seen.
    num_ids: R.

  Returns:
    int32 [R]; of ids seen equally often the lowest.

  Raises:
    ValueError: R is not in 1..V.

  >>> most_frequent(np.array([3, 0, 5, 3]), 2)
  array([0, 2], dtype=int32)
  """
  base.check_num_ids(num_ids, len(counts_V))
  order_V = np.argsort(-counts_V, kind='stable')
  return np.sort(order_V[:num_ids]).astype(np.int32)

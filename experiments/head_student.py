"""The student of --head: a head on a frozen target, see students.py."""

import dataclasses
from typing import Any

import jax
import numpy as np

from experiments import conversions, drafts
from experiments.students import put
from experiments.train_config import TrainConfig
from specjax import sharding
from specjax.models import load
from specjax.models.heads import build, files
from specjax.models.heads.build import Head
from specjax.models.heads.eagle3 import Eagle3
from specjax.models.heads.medusa import MedusaHeads
from specjax.proposers.base import Proposer
from specjax.shapes import Params
from specjax.sharding import Placement
from specjax.tokenizers import Tokenizer
from specjax.training import data
from specjax.training import heads as training
from specjax.training.objective import Objective

# A number of heads like that of the drafts that decoding asks for.
_DEFAULT_NUM_HEADS = 4


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HeadStudent:
  """A head; implements `Student`.

  Attributes:
    head: as it decodes, in one piece.
    loaded_params: where it starts; None: at random, and with what it has in
      common with the target (`begin` of the head).
    seed: of random parameters.
    reader_params: of the objective's reader, if it has one.
  """

  head: Head
  loaded_params: Params | None
  objective: Objective
  target: load.Loaded
  seed: int
  reader_params: Params | None = None

  @property
  def tokenizer(self) -> Tokenizer:
    return self.target.tokenizer

  @property
  def context_length(self) -> int:
    lengths = [self.target.model.context_length]
    if not isinstance(self.head, MedusaHeads):
      lengths.append(self.head.block.context_length)
    return min(lengths)

  @property
  def _placed(self) -> Head:
    objective = self.objective
    is_medusa = isinstance(objective, training.MedusaLoss)
    return objective.heads if is_medusa else objective.head

  @property
  def placement(self) -> Placement:
    return self._placed.target.placement

  def begin(self, packed: data.Packed) -> tuple[Params, Params]:
    """A reduced vocabulary has the ids that are predicted most."""
    params = self.loaded_params
    if params is None:
      params = self.head.init(jax.random.key(self.seed))
      if getattr(self.head, 'num_ids', None) is not None:
        counts_V = np.bincount(
          packed.tokens_n[packed.mask_n], minlength=self.head.vocab_size
        )
        params['ids'] = build.most_frequent(counts_V, self.head.num_ids)
      params = self.head.begin(params, self.target.params)
    placed = self._placed
    params = sharding.put_params(
      placed.param_specs(), params, build.placement_of(placed)
    )
    trained, frozen = training.split(params)
    frozen['target'] = put(placed.target, self.target.params)
    if self.reader_params is not None:
      frozen['reader'] = self.reader_params
    return trained, frozen

  def writers(self, frozen_params: Params) -> dict[str, Any]:
    return {
      'target': self._placed.target,
      'draft': None,
      'target_params': frozen_params['target'],
    }

  def reading(self, frozen_params: Params) -> dict[str, Any]:
    """Who reads the text, and what of: fields of `Remembered`."""
    reader, reader_params = self.objective.reading(frozen_params)
    return {
      'reader': reader,
      'reader_params': reader_params,
      'capture': self.head.target_features,
    }

  def proposer(
    self, params: Params, frozen_params: Params, num_draft_tokens: int
  ) -> tuple[Proposer, Params]:
    params = training.join(params, frozen_params)['proposer']
    if isinstance(self.head, MedusaHeads):
      num_draft_tokens = min(num_draft_tokens, self.head.num_heads)
    return drafts.with_head(self.head, num_draft_tokens), params

  def write(self, path: str, params: Params, frozen_params: Params):
    """The head's folder, for --head of generate.py."""
    params = training.join(params, frozen_params)['proposer']
    files.save_head(path, self.head, sharding.to_host(params))


def make_head(config: TrainConfig, target: load.Loaded) -> HeadStudent:
  """The student of --head, anew or from --init.

  Raises:
    ValueError, OSError: a file is missing or not what it should be, or a
      setting does not fit the kind or the target.
  """
  kind, loaded_params = config.head, None
  if config.init is not None:
    head, loaded_params = files.load_head(
      load.head_folder(config.init),
      kind.removesuffix('3'),
      target.model,
      target.params,
      config.dtype,
    )
    if isinstance(head, Eagle3) != (kind == 'eagle3'):
      raise ValueError(f'--init must be a head of --head={kind}, it is not.')
  else:
    head = _new(config, target)
  settings = {}
  if config.loss is not None:
    is_text = config.loss == 'text'
    settings['divergence'] = None if is_text else config.loss
  if kind != 'medusa' and config.depth is not None:
    settings['depth'] = config.depth
  reader_params = None
  if config.target_quantize != 'none':
    reader = conversions.load_model(
      config.target, config.dtype, config.target_quantize, None
    )
    settings['reader'], reader_params = reader.model, reader.params
  placed = training.trainable_head(head, config.view())
  objective = training.objective_of(kind, placed, **settings)
  taught = head.num_heads if kind == 'medusa' else objective.depth
  if config.length < taught + 2:
    raise ValueError(
      f'length must be at least {taught + 2}, two more than the depth, got '
      f'{config.length}.'
    )
  return HeadStudent(
    head=head,
    loaded_params=loaded_params,
    objective=objective,
    target=target,
    seed=config.seed,
    reader_params=reader_params,
  )


def _new(config: TrainConfig, target: load.Loaded) -> Head:
  settings: dict[str, Any] = {}
  if config.head == 'medusa':
    settings['num_heads'] = config.depth or _DEFAULT_NUM_HEADS
  if config.draft_vocab_size is not None:
    settings['num_ids'] = config.draft_vocab_size
  head = build.build(config.head, target.model, config.dtype, **settings)
  if config.head_ffn_dim is None:
    return head
  block = dataclasses.replace(head.block, ffn_dim=config.head_ffn_dim)
  return dataclasses.replace(head, block=block)

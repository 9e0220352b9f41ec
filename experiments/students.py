"""What a run trains: a language model, a draft, or a head (head_student.py).

Everything that differs between them is here; batches, steps, checkpoints and
metrics are the same for all.
"""

import dataclasses
import json
from typing import Any, Protocol

from experiments import text_files
from experiments.train_config import TrainConfig
from specjax import sharding, tokenizer_files
from specjax.models import load
from specjax.models.checkpoints import export
from specjax.models.config import config_from_hf
from specjax.models.transformer import Transformer
from specjax.proposers.base import Proposer
from specjax.proposers.draft_model import DraftModel
from specjax.shapes import Params
from specjax.sharding import Placement
from specjax.tokenizers import (
  ByteTokenizer,
  Tokenizer,
  check_same_vocabulary,
)
from specjax.training import data
from specjax.training.imitate import Distill, NextToken
from specjax.training.objective import Objective, trainable


class Student(Protocol):
  """What is trained, and what becomes of it.

  Attributes:
    objective: its loss.
    tokenizer: of the text that it is trained on.
    context_length: tokens of a row that it can read.
    placement: where it is trained.
    target: what it drafts for, as it decodes; None if nothing.
  """

  objective: Objective
  tokenizer: Tokenizer
  context_length: int
  placement: Placement
  target: load.Loaded | None

  def begin(self, packed: data.Packed) -> tuple[Params | None, Params]:
    """Where it starts (None: at random), and what is not trained."""
    ...

  def writers(self, frozen_params: Params) -> dict[str, Any]:
    """The models that `Written` decodes with: its fields."""
    ...

  def proposer(
    self, params: Params, frozen_params: Params, num_draft_tokens: int
  ) -> tuple[Proposer, Params]:
    """As it drafts for the target, K at most, and its parameters."""
    ...

  def write(self, path: str, params: Params, frozen_params: Params):
    """Its folder."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ModelStudent:
  """A language model, which imitates the target if there is one.

  Attributes:
    model: as it decodes, in one piece.
    config: in the form of a config.json.
    loaded_params: where it starts; None: at random.
  """

  model: Transformer
  config: dict[str, Any]
  loaded_params: Params | None
  objective: NextToken | Distill
  tokenizer: Tokenizer
  target: load.Loaded | None

  @property
  def context_length(self) -> int:
    return self.model.context_length

  @property
  def _placed(self) -> Transformer:
    objective = self.objective
    is_alone = isinstance(objective, NextToken)
    return objective.model if is_alone else objective.draft

  @property
  def placement(self) -> Placement:
    return self._placed.placement

  def begin(self, packed: data.Packed) -> tuple[Params | None, Params]:
    del packed
    frozen_params = None
    if self.target is not None:
      frozen_params = put(self.objective.target, self.target.params)
    if self.loaded_params is None:
      return None, frozen_params
    return put(self._placed, self.loaded_params), frozen_params

  def writers(self, frozen_params: Params) -> dict[str, Any]:
    return {
      'target': self.objective.target,
      'draft': self.objective.draft,
      'target_params': frozen_params,
    }

  def proposer(
    self, params: Params, frozen_params: Params, num_draft_tokens: int
  ) -> tuple[Proposer, Params]:
    del frozen_params
    return DraftModel(
      model=self.model, num_draft_tokens=num_draft_tokens
    ), params

  def write(self, path: str, params: Params, frozen_params: Params):
    """The model folder, tokenizer included."""
    del frozen_params
    export.write_folder(path, self.config, self.model, params)
    tokenizer_files.save_tokenizer(path, self.tokenizer)


def make_model(config: TrainConfig, target: load.Loaded | None) -> ModelStudent:
  """The student of --config or --init.

  Raises:
    ValueError, OSError: a file is missing or not what it should be.
  """
  tokenizer = ByteTokenizer() if target is None else target.tokenizer
  loaded_params = None
  if config.init is not None:
    loaded = load.load(config.init, 'float32')
    if loaded.config is None:
      raise ValueError(f'--init must be a model from files, got {config.init}.')
    if target is not None:
      check_same_vocabulary(target.tokenizer, loaded.tokenizer)
    tokenizer, hf_config = loaded.tokenizer, loaded.config
    loaded_params = loaded.params
  else:
    hf_config = _read_config(config.config)
  vocab_size = tokenizer.vocab_size
  num_rows = hf_config.get('vocab_size')
  if not isinstance(num_rows, int) or num_rows < vocab_size:
    raise ValueError(
      f'vocab_size must be at least {vocab_size}, the ids of the tokenizer, '
      f'got {num_rows!r}.'
    )
  model = config_from_hf(hf_config, vocab_size, config.dtype)
  view = config.view()
  if target is None:
    objective = NextToken(model=trainable(model, view))
  else:
    objective = Distill(
      draft=trainable(model, view),
      target=trainable(target.model, view),
      divergence=config.loss or 'forward_kl',
    )
  return ModelStudent(
    model=model,
    config=hf_config,
    loaded_params=loaded_params,
    objective=objective,
    tokenizer=tokenizer,
    target=target,
  )


def put(model: Transformer, params: Params) -> Params:
  """A model's parameters where it is trained, or read in training."""
  return sharding.put_params(model.param_specs(), params, model.placement)


def _read_config(path: str) -> dict[str, Any]:
  text = text_files.read_text(path)
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path} must be JSON: {error}.') from None
  if not isinstance(value, dict):
    raise ValueError(f'{path} must hold a JSON object.')
  return value

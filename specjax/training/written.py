"""Rows that a model continues: text of the target's, or of the draft's own.

A draft meets its own mistakes when it decodes. Trained on what it writes itself
it learns the target's law there, too.

Source: Agarwal et al., On-Policy Distillation of Language Models,
  arXiv:2306.13649, algorithm 1; Zhou et al., DistillSpec, arXiv:2310.08461.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from specjax import decode, sampling
from specjax.decode import Decoder
from specjax.models.base import LanguageModel
from specjax.proposers.base import Nothing
from specjax.shapes import Params
from specjax.sharding import to_host
from specjax.state import Requests
from specjax.training.data import Source
from specjax.verify import chain

_UNBOUNDED = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Written:
  """Batches whose first rows are continued by sampling at temperature 1.

  Attributes:
    source: of the beginnings, and of the rows that stay as they are.
    model: who writes.
    params: its parameters; None: those in training.
    share: of the rows, rounded to whole rows.
    after: tokens that a row keeps. What follows is written, and of such rows
      only that is predicted.
    seed: of what is written.
  """

  source: Source
  model: LanguageModel
  params: Params | None
  share: float
  after: int
  seed: int

  def batch(self, position: int, params: Params) -> dict[str, Any]:
    batch = self.source.batch(position, params)
    tokens_BT, mask_BT = batch['tokens_BT'], batch['mask_BT'].copy()
    num_rows, length = tokens_BT.shape
    num_written = round(self.share * num_rows)
    if num_written == 0:
      return batch
    is_written_B1 = (np.arange(num_rows) < num_written)[:, None]
    seed_B = (self.seed + position * num_rows + np.arange(num_rows)) % 2**32
    own_params = params if self.params is None else self.params
    requests = Requests(
      tokens_BL=tokens_BT.astype(np.int32),
      prompt_length_B=np.full(num_rows, self.after, np.int32),
      max_new_tokens_B=np.where(
        is_written_B1[:, 0], length - self.after, 0
      ).astype(np.int32),
      seed_B=seed_B.astype(np.uint32),
      # Nothing ends a row: what a model writes behind the end of a text is the
      # beginning of another.
      stop_ids_BJ=np.full((num_rows, 1), -1, np.int32),
    )
    decoder = Decoder(
      target=self.model,
      proposer=Nothing(),
      verify=chain.RULES['coupled'],
      max_length=length,
    )
    settings = sampling.stack_options(
      [sampling.SamplingOptions(temperature=1.0)] * num_rows,
      self.model.vocab_size,
    )
    all_params = {'target': own_params, 'proposer': ()}
    state = decode.init(decoder, all_params, requests)
    state = decode.run(
      decoder, all_params, state, jax.device_get(settings), np.int32(_UNBOUNDED)
    )
    written_BT = to_host(state.tokens_BL)
    is_new_BT = is_written_B1 & (np.arange(length) >= self.after)[None]
    return {
      'tokens_BT': np.where(is_new_BT, written_BT, tokens_BT),
      'mask_BT': np.where(is_written_B1, is_new_BT, mask_BT),
    }

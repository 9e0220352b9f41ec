"""Rows that models continue: the target, the draft, or both together.

A draft meets its own mistakes when it decodes. Trained on what it writes itself
it learns the target's law there, too. Decoding together, the pair writes the
target's text and marks where the draft was wrong: training on these places
alone is what a server can do on the way.

Source: Agarwal et al., On-Policy Distillation of Language Models,
  arXiv:2306.13649, algorithm 1; Zhou et al., DistillSpec, arXiv:2310.08461; Liu
  et al., Online Speculative Decoding, arXiv:2310.07177, algorithm 2. Deviation:
  a batch is decoded, learnt from, and forgotten; there is no replay.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from specjax import decode, sampling
from specjax.decode import Decoder
from specjax.models.base import LanguageModel
from specjax.proposers.base import Nothing
from specjax.proposers.draft_model import DraftModel
from specjax.shapes import Params
from specjax.sharding import is_spec, to_host
from specjax.state import CORRECTION, Requests
from specjax.training.data import Source
from specjax.verify import chain

WRITERS = ('target', 'draft', 'pair')
_UNBOUNDED = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Written:
  """Batches whose first rows are continued by sampling at temperature 1.

  Of a continued row only what was written is predicted; of one that the pair
  wrote, only the tokens in whose place a draft was rejected.

  Attributes:
    source: of the beginnings, and of the rows that stay as they are.
    writer: one of `WRITERS`.
    target: the target, with `target_params`.
    draft: the draft; its parameters are those in training. None, for a writer
      that needs none: 'target'.
    target_params: of the target.
    share: of the rows that are continued, rounded to whole rows.
    after: tokens that such a row keeps.
    seed: of what is written.
    num_draft_tokens: K, of the pair.

  Raises:
    ValueError: the writer is unknown, `share` or `after` is out of range, or a
      draft is missing.
  """

  source: Source
  writer: str
  target: LanguageModel
  draft: LanguageModel | None
  target_params: Params
  share: float
  after: int
  seed: int
  num_draft_tokens: int = 4

  def __post_init__(self):
    if self.writer not in WRITERS:
      raise ValueError(
        f'writer must be one of {", ".join(WRITERS)}, got {self.writer!r}.'
      )
    if not 0 < self.share <= 1:
      raise ValueError(f'share must be > 0 and <= 1, got {self.share}.')
    if self.after < 1:
      raise ValueError(f'after must be >= 1, got {self.after}.')
    if self.draft is None and self.writer != 'target':
      raise ValueError(f'a draft must be there for writer {self.writer!r}.')

  def batch(self, position: int, params: Params) -> dict[str, Any]:
    """`Source.batch`: {'tokens_BT': int32, 'mask_BT': bool}, both [B, T].

    A function of position, seed and parameters. The first rows keep `after`
    tokens and are written on to the end; no stop id ends one.
    """
    batch = self.source.batch(position, params)
    tokens_BT = batch['tokens_BT'].astype(np.int32)
    num_rows, length = tokens_BT.shape
    num_written = round(self.share * num_rows)
    is_written_B1 = (np.arange(num_rows) < num_written)[:, None]
    seed_B = (self.seed + position * num_rows + np.arange(num_rows)) % 2**32
    room_B = np.where(is_written_B1[:, 0], length - self.after, 0)
    requests = Requests(
      tokens_BL=tokens_BT,
      prompt_length_B=np.full(num_rows, self.after, np.int32),
      max_new_tokens_B=room_B.astype(np.int32),
      seed_B=seed_B.astype(np.uint32),
      # Nothing ends a row: what a model writes behind the end of a text is the
      # beginning of another.
      stop_ids_BJ=np.full((num_rows, 1), -1, np.int32),
    )
    written_BT, source_BT = self._write(requests, params)
    is_new_BT = is_written_B1 & (np.arange(length) >= self.after)[None]
    is_learnt_BT = is_new_BT
    if self.writer == 'pair':
      is_learnt_BT = is_new_BT & (source_BT == CORRECTION)
    return {
      'tokens_BT': np.where(is_new_BT, written_BT, tokens_BT),
      'mask_BT': np.where(is_written_B1, is_learnt_BT, batch['mask_BT']),
    }

  def _write(
    self, requests: Requests, params: Params
  ) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of all rows, and where each comes from."""
    proposer = Nothing()
    if self.writer == 'pair':
      proposer = DraftModel(
        model=self.draft, num_draft_tokens=self.num_draft_tokens
      )
    is_draft = self.writer == 'draft'
    if self.writer != 'target':
      # As the draft will decode, not as the optimizer keeps it.
      params = jax.tree.map(
        lambda spec, x: x.astype(spec.dtype),
        self.draft.param_specs(),
        params,
        is_leaf=is_spec,
      )
    decoder = Decoder(
      target=self.draft if is_draft else self.target,
      proposer=proposer,
      verify=chain.RULES['rejection'],
      max_length=requests.tokens_BL.shape[1],
    )
    all_params = {
      'target': params if is_draft else self.target_params,
      'proposer': params if self.writer == 'pair' else (),
    }
    settings = sampling.stack_options(
      [sampling.SamplingOptions(temperature=1.0)] * len(requests.seed_B),
      self.target.vocab_size,
    )
    state = decode.init(decoder, all_params, requests)
    state = decode.run(
      decoder, all_params, state, jax.device_get(settings), np.int32(_UNBOUNDED)
    )
    return to_host((state.tokens_BL, state.source_BL))

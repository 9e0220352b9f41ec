"""What drafts from files: models, with whichever vocabulary, and heads."""

import dataclasses

from experiments import conversions
from experiments.progress import Progress
from experiments.run_config import RunConfig
from specjax.mesh import View
from specjax.models import load
from specjax.models.heads.build import Head
from specjax.models.heads.medusa import MedusaHeads
from specjax.models.translated import translate
from specjax.proposers.base import Proposer
from specjax.proposers.feature_fed import FeatureFed
from specjax.proposers.medusa import Medusa
from specjax.proposers.stopping import Fixed, StoppingRule
from specjax.text_drafts import TextDrafter
from specjax.tokenizers import check_same_vocabulary


def load_draft(config: RunConfig, view: View | None) -> load.Loaded:
  """The draft that the flags name."""
  with Progress(f'loading draft {config.draft}'):
    return conversions.load_model(
      config.draft,
      config.draft_dtype or config.dtype,
      config.draft_quantize or config.quantize,
      view,
      cache_dtype=config.cache_dtype,
      cache_dir=config.cache_dir,
    )


def check_same_ids(target: load.Loaded, draft: load.Loaded):
  """Raises ValueError unless every id means the same to both."""
  check_same_vocabulary(target.tokenizer, draft.tokenizer)
  sizes = target.model.vocab_size, draft.model.vocab_size
  if sizes[0] != sizes[1]:
    raise ValueError(
      'target and draft must have the same number of ids in their embeddings, '
      f'got {sizes[0]} and {sizes[1]}.'
    )


def translated(draft: load.Loaded, target: load.Loaded) -> load.Loaded:
  """The draft as one with the target's ids, for --proposer=tli."""
  model, params = translate(
    draft.model,
    draft.params,
    draft.tokenizer,
    target.tokenizer,
    target.model.vocab_size,
  )
  return dataclasses.replace(
    draft, model=model, params=params, tokenizer=target.tokenizer
  )


def text_drafter(
  config: RunConfig, target: load.Loaded, max_length: int
) -> TextDrafter:
  """What drafts on the host, for --proposer=slem.

  Args:
    config: the run.
    target: its target.
    max_length: of the target's rows.
  """
  draft = load_draft(config, None)
  return TextDrafter(
    draft.model,
    draft.params,
    draft.tokenizer,
    target.tokenizer,
    config.num_draft_tokens,
    # Its ids may cut the text finer than the target's.
    max_length=2 * max_length,
  )


def with_head(
  head: Head, num_draft_tokens: int, stop: StoppingRule = Fixed()
) -> Proposer:
  """The proposer that drafts with a head, whatever its kind."""
  settings = {'num_draft_tokens': num_draft_tokens, 'stop': stop}
  if isinstance(head, MedusaHeads):
    return Medusa(heads=head, **settings)
  return FeatureFed(head=head, **settings)

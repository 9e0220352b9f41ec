"""specjax: a laboratory for speculative decoding in JAX.

A target, a proposer and a rule make a `Decoder`; `generate` serves requests.

>>> model = load('demo:target', 'float32')
>>> decoder = Decoder(
...   target=model.model, proposer=NGram(num_draft_tokens=4),
...   verify=Coupled(), max_length=64)
>>> ids = model.tokenizer.encode('import ', add_special=True)
>>> request = Request(prompt_tokens=tuple(ids), max_new_tokens=4)
>>> params = {'target': model.params, 'proposer': ()}
>>> results = generate(
...   decoder, params, [request], model.tokenizer, batch_size=1)
>>> [result.finish_reason for result in results]
['length']

The names here are those of a first use. Where the rest is:

- `specjax.shapes` letters of axes, `specjax.noise` keys, `specjax.sampling`
  from logits to laws, `specjax.ranking` and `specjax.sharding` under them
- `specjax.models` what makes logits: `specjax.models.base` the protocol,
  `specjax.models.transformer` the families, `specjax.models.load` files and
  names, `specjax.models.heads` draft heads
- `specjax.proposers` what guesses, `specjax.verify` what decides:
  `specjax.verify.chain` has the rules
- `specjax.decode` the loop, `specjax.state` what it carries, `specjax.commit`
  what a step writes
- `specjax.generation` requests served, `specjax.requests`,
  `specjax.metrics`, `specjax.tokenizers`, `specjax.detokenize`, `specjax.chat`,
  `specjax.text_drafts`
- `specjax.mesh` several devices, `specjax.kernels` products on a CPU,
  `specjax.atomic` files that are there whole
- `specjax.training` objectives, the step, checkpoints
- `specjax.testing` exact laws, conformance checks, the certificate
"""

from specjax.decode import Decoder
from specjax.generation import generate
from specjax.models.base import LanguageModel
from specjax.models.heads.files import load_head, save_head
from specjax.models.load import Loaded, load
from specjax.models.transformer import Transformer
from specjax.models.translated import Translated, translate
from specjax.proposers.base import Nothing, Proposer
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.early_exit import EarlyExit
from specjax.proposers.feature_fed import FeatureFed
from specjax.proposers.given import Given
from specjax.proposers.medusa import Medusa
from specjax.proposers.ngram import NGram
from specjax.requests import Request, Result
from specjax.sampling import SamplingOptions
from specjax.state import DecodeState, StepInfo
from specjax.text_drafts import TextDrafter
from specjax.tokenizers import (
  ByteTokenizer,
  Tokenizer,
  check_same_vocabulary,
)
from specjax.verify.chain import Block, Coupled, Greedy, Rejection, Rule

__version__ = '0.1.0'

__all__ = (
  'Block',
  'ByteTokenizer',
  'Coupled',
  'DecodeState',
  'Decoder',
  'DraftModel',
  'EarlyExit',
  'FeatureFed',
  'Given',
  'Greedy',
  'LanguageModel',
  'Loaded',
  'Medusa',
  'NGram',
  'Nothing',
  'Proposer',
  'Rejection',
  'Request',
  'Result',
  'Rule',
  'SamplingOptions',
  'StepInfo',
  'TextDrafter',
  'Tokenizer',
  'Transformer',
  'Translated',
  '__version__',
  'check_same_vocabulary',
  'generate',
  'load',
  'load_head',
  'save_head',
  'translate',
)

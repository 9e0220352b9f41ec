"""What was trained here, read by another program: the same tokens and steps.

The demo's draft and heads are exported; NumPy reads the folders by published
names, drafts and verifies greedily, and must emit the same tokens in the same
steps as the loop does.
"""

import functools
import pathlib
import tempfile

import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import drafts
from specjax import generation
from specjax.decode import Decoder
from specjax.models import load
from specjax.models.checkpoints import export
from specjax.models.heads import files
from specjax.proposers.draft_model import DraftModel
from specjax.requests import Request
from specjax.verify import chain
from tests.models.heads import numpy_reader

PROMPT = 'class Queue:\n  def put(self, item, '
NUM_TOKENS, K = 40, 4


@functools.cache
def target():
  return load.load('demo:target', 'float32')


def decoded(proposer, params):
  """Prompt, tokens and what was counted, by the loop."""
  prompt = tuple(target().tokenizer.encode(PROMPT, add_special=True))
  decoder = Decoder(
    target=target().model,
    proposer=proposer,
    verify=chain.RULES['greedy'],
    max_length=len(prompt) + NUM_TOKENS,
  )
  (result,) = generation.generate(
    decoder,
    {'target': target().params, 'proposer': params},
    [Request(prompt_tokens=prompt, max_new_tokens=NUM_TOKENS)],
    target().tokenizer,
    batch_size=1,
  )
  return prompt, list(result.tokens), result.tally


def by_numpy(prompt, tensors, config, draft_of):
  """Greedy decoding; `draft_of` has K drafts behind a text."""
  text, histogram = list(prompt), np.zeros(K + 1, int)
  end = len(prompt) + NUM_TOKENS
  while len(text) < end:
    hiddens, logits, head = numpy_reader.llama(tensors, config, text)
    del logits
    made = draft_of(text, hiddens[:-1], head)[: end - len(text) - 1]
    wanted = numpy_reader.llama(tensors, config, text + made)[1]
    wanted = wanted[len(text) - 1 :].argmax(axis=-1).tolist()
    num = 0
    while num < len(made) and made[num] == wanted[num]:
      num += 1
    text += wanted[: num + 1]
    histogram[num] += 1
  return text[len(prompt) :], histogram


def chain_of(make, tensors, config, embed, text, hiddens, head):
  """Drafts of a head that goes on from its own output."""
  feature, tokens, made = hiddens, list(text[1:]), []
  for _ in range(K):
    out, logits = make(tensors, config, embed[tokens], feature, head)
    made.append(int(logits[-1].argmax()))
    feature = np.concatenate([feature, out[-1:]])
    tokens.append(made[-1])
  return made


class InterchangeTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)
    self.published = numpy_reader.read(load.demo_folder('demo:target'))

  def compare(self, proposer, params, draft_of):
    prompt, tokens, tally = decoded(proposer, params)
    want, histogram = by_numpy(prompt, *self.published, draft_of)
    self.assertEqual(tokens, want)
    self.assertEqual(tally.accepted_histogram.tolist(), histogram.tolist())
    self.assertGreater(tally.num_accepted, NUM_TOKENS // 3)

  def test_the_draft(self):
    draft = load.load('demo:draft', 'float32')
    export.write_folder(
      str(self.folder / 'draft'), draft.config, draft.model, draft.params
    )
    tensors, config = numpy_reader.read(self.folder / 'draft')

    def draft_of(text, hiddens, head):
      del hiddens, head
      made = []
      for _ in range(K):
        logits = numpy_reader.llama(tensors, config, text + made)[1]
        made.append(int(logits[-1].argmax()))
      return made

    proposer = DraftModel(model=draft.model, num_draft_tokens=K)
    self.compare(proposer, draft.params, draft_of)

  @parameterized.parameters('medusa', 'mtp')
  def test_a_head(self, kind):
    published = load.head_folder(f'demo:{kind}')
    head, params = files.load_head(
      published, kind, target().model, target().params
    )
    files.save_head(self.folder / kind, head, params)
    tensors, config = numpy_reader.read(self.folder / kind)
    embed = self.published[0]['model.embed_tokens.weight']

    def draft_of(text, hiddens, head):
      if kind == 'medusa':
        found = numpy_reader.medusa(tensors, config, hiddens[-1:], head)
        return [int(logits[0].argmax()) for logits in found[:K]]
      make = getattr(numpy_reader, kind)
      return chain_of(make, tensors, config, embed, text, hiddens, head)

    self.compare(drafts.with_head(head, K), params, draft_of)


if __name__ == '__main__':
  absltest.main()

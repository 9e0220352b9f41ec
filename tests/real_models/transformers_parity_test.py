"""Real files: logits and greedy text equal those of transformers, float32.

Both sides read the same quantised file; ours de-quantises it in its own code.
"""

import os

import jax
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import decode, generation, tokenizers
from specjax.models import load
from specjax.proposers.base import Nothing
from specjax.requests import Request
from specjax.verify import chain
from tests.real_models import files

try:
  import torch
  import transformers
except ImportError:
  torch = None

PROMPTS = (
  'def quicksort(items):\n  """Sorts a list."""\n',
  'The capital of France is',
  'Once upon a time there was a fox who',
  'import numpy as np\n\nclass Matrix:\n',
  'Q: What is 12 times 12?\nA:',
)
NUM_TOKENS = 48

# Largest difference of two logits that may be called rounding: both sides sum
# products of a few thousand float32 in another order, over up to 28 layers.
TOLERANCE = 2e-3


@absltest.skipIf(torch is None, 'needs torch and transformers')
class TransformersParityTest(parameterized.TestCase):
  @parameterized.parameters(
    files.SMOLLM2, files.GEMMA, files.QWEN_DRAFT, files.QWEN_TARGET
  )
  def test_logits_and_greedy_text(self, name):
    path = files.find(name)
    ours = load.load(path, 'float32')
    prompts = [
      ours.tokenizer.encode(text, add_special=True) for text in PROMPTS
    ]
    own_logits = _own_logits(ours, prompts)
    own_tokens = _own_greedy(ours, prompts)
    vocab_size = ours.model.vocab_size
    del ours
    jax.clear_caches()

    with torch.no_grad():
      folder, file = os.path.split(path)
      reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32
      ).eval()
      for prompt, logits_TV, tokens in zip(prompts, own_logits, own_tokens):
        ids = torch.tensor([prompt])
        expected_TV = reference(ids).logits[0, :, :vocab_size].numpy()
        difference = np.max(np.abs(expected_TV - logits_TV))
        print(f'{name}: max abs difference of logits {difference:.1e}')
        self.assertLess(difference, TOLERANCE)
        self.assertEqual(tokens, _reference_greedy(reference, ids, vocab_size))


def _own_logits(
  ours: load.Loaded, prompts: list[list[int]]
) -> list[np.ndarray]:
  """Logits [T, V] of each prompt, from one ragged pass over all of them."""
  tokens_BT, length_B = tokenizers.pad_batch(prompts, max(map(len, prompts)))

  @jax.jit
  def forward(params, tokens_BT, length_B):
    cache = ours.model.init_cache(*tokens_BT.shape, max_rewind=0)
    hidden, _ = ours.model.apply(
      params, tokens_BT, cache, num_tokens_B=length_B
    )
    return ours.model.unembed(params, hidden.last_BTD)

  logits_BTV = np.asarray(forward(ours.params, tokens_BT, length_B))
  return [row[:length] for row, length in zip(logits_BTV, length_B)]


def _own_greedy(ours: load.Loaded, prompts: list[list[int]]) -> list[list[int]]:
  decoder = decode.Decoder(
    target=ours.model,
    proposer=Nothing(),
    verify=chain.Greedy(),
    max_length=128,
  )
  requests = [
    Request(prompt_tokens=tuple(ids), max_new_tokens=NUM_TOKENS)
    for ids in prompts
  ]
  results = generation.generate(
    decoder,
    {'target': ours.params, 'proposer': ()},
    requests,
    ours.tokenizer,
    batch_size=len(requests),
  )
  return [list(result.tokens) for result in results]


def _reference_greedy(reference, ids, vocab_size: int) -> list[int]:
  tokens, cache = [], None
  for _ in range(NUM_TOKENS):
    output = reference(ids, past_key_values=cache, use_cache=True)
    cache = output.past_key_values
    ids = output.logits[:, -1:, :vocab_size].argmax(-1)
    tokens.append(int(ids))
  return tokens


if __name__ == '__main__':
  absltest.main()

"""No whole cache is copied while the loop runs, says the compiled program.

Nor is a weight written down once more in a wider type.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import hlo, random_pair
from specjax import decode
from specjax.kernels import products as kernels
from specjax.proposers import stopping
from specjax.proposers.base import Nothing
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.early_exit import EarlyExit
from specjax.proposers.feature_fed import FeatureFed
from specjax.proposers.ngram import NGram
from specjax.sampling import SamplingOptions, stack_options
from specjax.verify import chain
from tests.models import tiny
from tests.models.heads import tiny_heads

K, L = 3, 40
MODEL = tiny.model('llama')  # Two layers.
NARROW = dataclasses.replace(MODEL, dtype='bfloat16')
DRAFT = DraftModel(
  model=MODEL, num_draft_tokens=K, stop=stopping.Confidence(least=0.3)
)
EXIT = EarlyExit(model=MODEL, exit_layer=1, num_draft_tokens=K)
HEAD = FeatureFed(
  head=tiny_heads.head_of('eagle3_reduced', MODEL), num_draft_tokens=K
)
NGRAM = NGram(num_draft_tokens=K, stop=stopping.Acceptance())


def compiled(decoder: decode.Decoder, batch_size: int) -> str:
  """The text of the loop's program."""
  key = jax.random.key(0)
  target = decoder.target
  drafter = decoder.proposer.head if decoder.proposer == HEAD else target
  params = {'target': target.init(key), 'proposer': drafter.init(key)}
  length_B = np.full(batch_size, 5)
  requests = random_pair.make_requests(MODEL, length_B, 20, L)
  state = jax.eval_shape(
    lambda: decode.init(decoder, params, requests),
  )
  options = [SamplingOptions()] * batch_size
  sampling = stack_options(options, MODEL.vocab_size)
  lowered = decode.run.lower(decoder, params, state, sampling, jnp.int32(9))
  return lowered.compile().as_text()


class CopiesTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('draft_1', DRAFT, 1, (1, 2, 4)),
    ('draft_4', DRAFT, 4, None),
    ('early_exit_1', EXIT, 1, None),
    ('eagle_2', HEAD, 2, None),
    ('ngram_4', NGRAM, 4, (1, 2, 4)),
    ('nothing_1', Nothing(), 1, None),
  )
  def test_the_loop_copies_no_cache(self, proposer, batch_size, widths):
    decoder = decode.Decoder(
      target=MODEL,
      proposer=proposer,
      verify=chain.Greedy(),
      max_length=L,
      widths=widths,
    )
    shape = (
      batch_size,
      MODEL.num_kv_heads,
      decoder.num_slots,
      MODEL.head_dim,
    )
    text = compiled(decoder, batch_size)
    self.assertIn(f'f32[{",".join(map(str, shape))}]', text)
    self.assertEqual(hlo.copies(text, shape), {})

  @parameterized.named_parameters(
    ('draft', DraftModel(model=NARROW, num_draft_tokens=K)),
    ('nothing', Nothing()),
  )
  def test_no_bfloat16_weight_is_written_again(self, proposer):
    if not kernels.is_available():
      self.skipTest('THE KERNELS WERE NOT BUILT')
    decoder = decode.Decoder(
      target=NARROW, proposer=proposer, verify=chain.Greedy(), max_length=L
    )
    text = compiled(decoder, 1)
    for shape in {spec.shape for spec in jax.tree.leaves(NARROW.param_specs())}:
      if len(shape) > 1:
        size = f'[{",".join(map(str, shape))}]'
        self.assertNotIn('f32' + size, text)
        # The bits of a table are fine where they are looked up, not beside it.
        for line in text.splitlines():
          if ' while(' in line:
            self.assertNotIn('u16' + size, line)


class CountingTest(absltest.TestCase):
  def test_copies_are_counted_by_shape_and_computation(self):
    text = """HloModule m

%body (p: (f32[7,3])) -> (f32[7,3]) {
  %p = (f32[7,3]{1,0}) parameter(0)
  %x = f32[7,3]{1,0} get-tuple-element(%p), index=0
  %copy.1 = f32[7,3]{1,0} copy(%x)
  %copy.2 = f32[7,3]{0,1} copy(%copy.1)
  ROOT %t = (f32[7,3]{1,0}) tuple(%copy.2)
}

ENTRY %main (x: f32[7,3]) -> f32[7,3] {
  %x = f32[7,3]{1,0} parameter(0)
  ROOT %copy.3 = f32[7,3]{1,0} copy(%x), metadata={op_name="copy(x)"}
}
"""
    self.assertEqual(hlo.copies(text, (7, 3)), {'body': 2, 'main': 1})
    self.assertEqual(hlo.copies(text, (3, 7)), {})


if __name__ == '__main__':
  absltest.main()

"""What a compiled step communicates: counted, and no more than it must."""

import dataclasses
import math

import jax
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import hlo
from specjax import decode, mesh
from specjax import state as states
from specjax.models import config
from specjax.proposers import stopping
from specjax.proposers.base import Nothing
from specjax.proposers.draft_model import DraftModel
from specjax.sampling import SamplingOptions, stack_options
from specjax.verify import chain

B, L, K, D, V = 2, 32, 3, 32, 512


def make_model(num_layers: int, num_kv_heads: int = 4):
  return config.config_from_hf(
    {
      'model_type': 'llama',
      'vocab_size': V,
      'hidden_size': D,
      'intermediate_size': 64,
      'num_hidden_layers': num_layers,
      'num_attention_heads': 8,
      'num_key_value_heads': num_kv_heads,
      'max_position_embeddings': 64,
      'rms_norm_eps': 1e-5,
      'hidden_act': 'silu',
      'rope_theta': 10000.0,
      'tie_word_embeddings': True,
    },
    dtype='float32',
  )


def compiled_step(
  target,
  draft,
  target_mesh: str,
  draft_mesh: str,
  rule: chain.Rule,
  stop: stopping.StoppingRule = stopping.Fixed(),
  widths: tuple[int, ...] | None = None,
) -> str:
  """A step's optimised program."""
  views = mesh.refine(mesh.parse_mesh(target_mesh), mesh.parse_mesh(draft_mesh))
  target, draft = (
    model
    and dataclasses.replace(
      model, placement=mesh.place(model.param_specs(), view)
    )
    for model, view in zip((target, draft), views)
  )
  proposer = Nothing()
  params = {'target': target.init(jax.random.key(0)), 'proposer': ()}
  if draft is not None:
    proposer = DraftModel(
      model=draft, num_draft_tokens=K, stop=stop, prefill_chunk=8
    )
    params['proposer'] = draft.init(jax.random.key(1))
  decoder = decode.Decoder(
    target=target,
    proposer=proposer,
    verify=rule,
    max_length=L,
    width=K + 1,
    widths=widths,
    prefill_chunk=8,
  )
  requests = states.Requests(
    tokens_BL=np.zeros((B, L), np.int32),
    prompt_length_B=np.ones(B, np.int32),
    max_new_tokens_B=np.ones(B, np.int32),
    seed_B=np.zeros(B, np.uint32),
    stop_ids_BJ=np.full((B, 2), -1, np.int32),
  )
  options = SamplingOptions(temperature=0.8, top_k=20, top_p=0.9)
  sampling = jax.device_get(stack_options([options] * B, V))
  state = decode.init(decoder, params, requests)
  lowered = decode.step.lower(decoder, params, state, sampling)
  return lowered.compile().as_text()


def collectives(*args) -> list[hlo.Collective]:
  """All communication in a step."""
  return hlo.collectives(compiled_step(*args))


def size(collective: hlo.Collective) -> int:
  """Numbers in the largest array that it yields."""
  return max(math.prod(array.shape) for array in collective.arrays)


class CollectivesTest(parameterized.TestCase):
  def test_a_verification_is_two_all_reduces_a_layer(self):
    counts = {}
    for num_layers in (1, 2):
      found = collectives(
        make_model(num_layers), None, 'model:8', 'model:8', chain.Block()
      )
      # Activations of all rows, or more; the others are a few numbers.
      large = [c for c in found if size(c) >= B * (K + 1) * D]
      self.assertEqual({c.kind for c in large}, {'all-reduce'})
      counts[num_layers] = len(large)
      # Not even one row of logits; partial maxima are gathered.
      self.assertLess(max(map(size, found)), V)
      kinds = {c.kind for c in found if c not in large}
      self.assertLessEqual(kinds, {'all-reduce', 'all-gather'})
    # One for the embedding, whose rows are split.
    self.assertEqual(counts, {1: 1 + 2, 2: 1 + 4})

  @parameterized.parameters(('model:1', 0), ('model:2', 1 + 2))
  def test_the_draft_loop(self, draft_mesh, num_large):
    found = collectives(
      make_model(1), make_model(1, 2), 'model:8', draft_mesh, chain.Block()
    )
    # The only loop of a step that stands in no branch is that over drafts.
    drafting = [c for c in found if c.path[:1] == ('while',)]
    large = [c for c in drafting if size(c) >= B * D]
    self.assertLen(large, num_large)
    if not num_large:
      self.assertEmpty(drafting)
    self.assertLess(max(map(size, found)), V)

  @parameterized.parameters(
    (chain.Rejection(), stopping.Confidence(least=0.3), (1, 2, K + 1)),
    (chain.Coupled(), stopping.Fixed(), None),
    (chain.Block(), stopping.Acceptance(), None),
  )
  def test_nothing_communicates_beside_a_branch(self, rule, stop, widths):
    text = compiled_step(
      make_model(1),
      make_model(1),
      'data:2,model:4',
      'data:2,model:4',
      rule,
      stop,
      widths,
    )
    self.assertEmpty(hlo.beside_branches(text))


if __name__ == '__main__':
  absltest.main()

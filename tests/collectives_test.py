"""What a compiled step communicates: counted, and no more than it must."""

import collections
import dataclasses
import math
import re

import jax
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from specjax import decode, mesh
from specjax import state as states
from specjax.models import config
from specjax.proposers.base import Nothing
from specjax.proposers.draft_model import DraftModel
from specjax.sampling import SamplingOptions, stack_options
from specjax.verify import chain

B, L, K, D, V = 2, 32, 3, 32, 512
_KINDS = (
  'all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|'
  'collective-broadcast'
)


@dataclasses.dataclass(frozen=True)
class Collective:
  """One instruction: its kind, its largest result, where it comes from."""

  kind: str
  size: int
  source: str


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


def collectives(text: str) -> list[Collective]:
  """All communication in an optimised program."""
  found = []
  for line in text.splitlines():
    match = re.search(rf'= (.*?) ({_KINDS})(?:-start)?\(', line)
    if match:
      shapes = re.findall(r'\w+\[([\d,]*)\]', match[1])
      sizes = [math.prod(map(int, s.split(','))) if s else 1 for s in shapes]
      name = re.search(r'op_name="([^"]*)"', line)
      found.append(Collective(match[2], max(sizes), name[1] if name else ''))
  return found


def compiled_step(
  target, draft, target_mesh: str, draft_mesh: str, rule: chain.Rule
) -> list[Collective]:
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
    proposer = DraftModel(model=draft, num_draft_tokens=K, prefill_chunk=8)
    params['proposer'] = draft.init(jax.random.key(1))
  decoder = decode.Decoder(
    target=target,
    proposer=proposer,
    verify=rule,
    max_length=L,
    width=K + 1,
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
  return collectives(lowered.compile().as_text())


def large(found: list[Collective]) -> list[Collective]:
  """Those that carry activations, or more: the others are a few numbers."""
  return [c for c in found if c.size >= B * (K + 1) * D]


class CollectivesTest(parameterized.TestCase):
  def test_a_verification_is_two_all_reduces_a_layer(self):
    counts = {}
    for num_layers in (1, 2):
      found = compiled_step(
        make_model(num_layers), None, 'model:8', 'model:8', chain.Block()
      )
      self.assertEqual({c.kind for c in large(found)}, {'all-reduce'})
      # Nothing is as large as one row of logits.
      self.assertLess(max(c.size for c in found), V)
      counts[num_layers] = len(large(found))
      others = collections.Counter(
        c.kind for c in found if c not in large(found)
      )
      # The vocabulary is never gathered: partial maxima are.
      self.assertLessEqual(set(others), {'all-reduce', 'all-gather'})
    # One for the embedding, whose rows are split.
    self.assertEqual(counts, {1: 1 + 2, 2: 1 + 4})

  @parameterized.named_parameters(
    ('copied', 'model:1', 0, 0),
    ('split', 'model:2', 1, 2 * 1),
  )
  def test_the_draft_loop(self, draft_mesh, num_embedding, num_in_layers):
    found = compiled_step(
      make_model(1), make_model(1, 2), 'model:8', draft_mesh, chain.Block()
    )
    # One loop over the drafts; those inside the filters are deeper.
    in_loop = [c for c in found if '/while/body' in c.source]
    drafting = [c for c in in_loop if 'closed_call' in c.source]
    carrying = [c for c in drafting if 'dot_general' in c.source]
    self.assertLen(carrying, num_in_layers)
    if not num_in_layers:
      looped = [
        c for c in drafting if not c.source.startswith('jit(step)/cond')
      ]
      self.assertEmpty(looped)
    lookups = [c for c in drafting if '_take' in c.source]
    self.assertLen(lookups, num_embedding)
    self.assertLess(max(c.size for c in found), V)


if __name__ == '__main__':
  absltest.main()

"""A program for several processes: eight ragged rows, tokens to stdout.

Run by tests in processes of its own, with a number of devices of its own:

  python tests/experiments/mesh_program.py --target=demo:target \
    --mesh=data:2,model:4 --coordinator=... --num_processes=2 --process_id=0
"""

import dataclasses
import json
import sys

from absl import flags

from experiments import common, processes
from specjax import generation, mesh, sharding
from specjax.decode import Decoder
from specjax.models import load
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.ngram import NGram
from specjax.requests import Request
from specjax.sampling import SamplingOptions
from specjax.verify import chain

PROMPTS = (
  'def fibonacci(n):\n',
  'The capital of France is Paris. The capital of Italy is',
  'Once upon a time',
  '1, 2, 3, 4, 5, 6, 7, 8,',
  'class Stack:\n  def push(self, item):\n',
  'Dear Sir or Madam,',
  'A B C A B C A B C A',
  'import os\nimport sys\n\ndef main():\n',
)


def define_flags(values: flags.FlagValues):
  for name, default in (('target', ''), ('draft', ''), ('mesh', 'data:1')):
    flags.DEFINE_string(name, default, '', flag_values=values)
  for name, default in (('max_new_tokens', 16), ('rounds', 1)):
    flags.DEFINE_integer(name, default, '', flag_values=values)


def on_mesh(name: str, view: mesh.View):
  """A model by name, and its parameters, on the mesh."""
  loaded = load.load(name, 'float32')
  specs = loaded.model.param_specs()
  placement = mesh.place(specs, view)
  model = dataclasses.replace(loaded.model, placement=placement)
  params = sharding.put_params(specs, loaded.params, placement)
  return dataclasses.replace(loaded, model=model, params=params)


def run(values: flags.FlagValues):
  view, draft_view = mesh.refine(mesh.parse_mesh(values.mesh))
  target = on_mesh(values.target, view)
  proposer, proposer_params = NGram(num_draft_tokens=3), ()
  if values.draft:
    draft = on_mesh(values.draft, draft_view)
    proposer = DraftModel(model=draft.model, num_draft_tokens=3)
    proposer_params = draft.params
  num_new = values.max_new_tokens
  # Greedy and sampled rows side by side: coupled is exact for both.
  requests = [
    Request(
      prompt_tokens=tuple(target.tokenizer.encode(text, add_special=True)),
      options=SamplingOptions(temperature=0.8 * (row % 2)),
      seed=row,
      max_new_tokens=num_new - row if num_new > 8 else num_new,
    )
    for row, text in enumerate(PROMPTS)
  ]
  decoder = Decoder(
    target=target.model,
    proposer=proposer,
    verify=chain.Coupled(),
    max_length=64 + num_new,
    prefill_chunk=32,
  )
  results = generation.generate(
    decoder,
    {'target': target.params, 'proposer': proposer_params},
    values.rounds * requests,
    target.tokenizer,
    batch_size=len(requests),
    on_batch=lambda batch: print('decoding', file=sys.stderr, flush=True),
  )
  print(json.dumps([result.tokens for result in results]))


def main(values: flags.FlagValues):
  joining = values.coordinator, values.num_processes, values.process_id
  processes.check(*joining)
  with processes.joined(*joining):
    run(values)


if __name__ == '__main__':
  groups = (('Program', define_flags), ('Processes', processes.define_flags))
  processes.leave(common.run_main(main, groups))

r"""Draws a recorded run.

  python experiments/generate.py --target=demo:target --draft=demo:draft \
    --prompt='def ' --temperature=1 --record=run.npz
  python experiments/draw.py --trace=run.npz --out=.

heat_map.png  the text of a request, and how probably a draft is accepted at
              each of its tokens
timeline.png  its steps in time: drafts, verifications, what they yield
laws.png      p, q and the residual at its first correction
"""

import importlib.util
import os
import pathlib
import sys
from typing import Any

import numpy as np
from absl import flags

from experiments import replay_laws, script, trace_file
from specjax import atomic, pictures
from specjax.models import load
from specjax.state import CORRECTION
from specjax.tokenizers import Tokenizer

NUM_IDS = 8  # The likeliest ones, in laws.png.
NUM_STEPS = 16  # The first ones, in timeline.png.
Figure = Any


def check(flag: str, folder: str):
  """Raises ValueError unless pictures can be written there later."""
  if importlib.util.find_spec('matplotlib') is None:
    raise ValueError(
      f"{flag} needs the package matplotlib: pip install 'specjax[plots]'."
    )
  path = pathlib.Path(folder)
  if not path.is_dir():
    raise ValueError(f'{flag} must be an existing folder, got {folder!r}.')
  if not os.access(path, os.W_OK | os.X_OK):
    raise ValueError(f'{flag}: the folder {folder!r} is read-only.')


def save(figure: Figure, path: pathlib.Path):
  """Writes a PNG; a failure leaves an old one as it was."""
  with atomic.replacing(path) as unfinished:
    figure.savefig(unfinished, format='png', dpi=160)


def _rows(trace: trace_file.TraceFile, request: int) -> slice:
  """Where a request's positions stand.

  Raises:
    ValueError: there is no such request, or it has no tokens.
  """
  if not 0 <= request < trace.num_requests:
    raise ValueError(
      f'--request must be in 0..{trace.num_requests - 1}, got {request}.'
    )
  begin, num = trace.begin[request], trace['num_tokens'][request]
  if not num:
    raise ValueError(f'request {request} has no tokens to draw.')
  return slice(begin, begin + num)


def heat_map(
  trace: trace_file.TraceFile, tokenizer: Tokenizer, request: int = 0
) -> Figure:
  """A request's text; acceptance is sum min(p, q) at its own temperature."""
  rows = _rows(trace, request)
  p, q = replay_laws.laws(trace, trace['temperature'])
  overlap = np.exp(np.minimum(p[rows], q[rows])).sum(axis=1)
  return pictures.heat_map(
    [tokenizer.decode([int(i)]) for i in trace['token'][rows]],
    np.minimum(overlap, 1.0),
    trace['source'][rows],
  )


def timeline(
  trace: trace_file.TraceFile, request: int = 0, *, draft_cost: float
) -> Figure:
  """A request's first steps.

  Args:
    trace: the run.
    request: its index.
    draft_cost: of a draft over a pass of plain decoding.
  """
  _rows(trace, request)
  own = np.flatnonzero(trace['step_request'] == request)
  own = own[np.argsort(trace['step_index'][own])][:NUM_STEPS]
  counts = [trace[name][own] for name in ('drafted', 'accepted', 'emitted')]
  return pictures.timeline(*counts, draft_cost=draft_cost)


def laws(
  trace: trace_file.TraceFile, tokenizer: Tokenizer, request: int = 0
) -> Figure:
  """p, q and residual at a request's first correction, or at its first token.

  Of the likeliest ids; the residual is that among them.
  """
  if np.all(np.isnan(trace['law_q'])):
    raise ValueError('a draft that is looked up has no law to be drawn.')
  rows = _rows(trace, request)
  corrected = np.flatnonzero(trace['source'][rows] == CORRECTION)
  at = rows.start + (corrected[0] if len(corrected) else 0)
  p, q = (
    np.exp(x[at, :-1]) for x in replay_laws.laws(trace, trace['temperature'])
  )
  best = np.argsort(-np.maximum(p, q), kind='stable')[:NUM_IDS]
  labels = [repr(tokenizer.decode([int(i)])) for i in trace['law_id'][at, best]]
  return pictures.laws(
    p[best], q[best], labels, title=f'Token {at - rows.start} of the text'
  )


def define_flags(values: flags.FlagValues):
  string = lambda name, default, text: flags.DEFINE_string(
    name, default, text, flag_values=values
  )
  string('trace', None, 'The file that --record of generate.py wrote.')
  string('out', None, 'The folder that the pictures are written to.')
  string(
    'tokenizer', None, 'A model, for its tokenizer; if not given, the target.'
  )
  flags.DEFINE_integer('request', 0, 'Which one.', flag_values=values)
  flags.DEFINE_float(
    'draft_cost',
    0.1,
    'Of a draft over a pass of plain decoding, in timeline.png.',
    flag_values=values,
  )


FLAG_GROUPS = (('Pictures', define_flags),)


def main(values: flags.FlagValues):
  for name in ('trace', 'out'):
    if values[name].value is None:
      raise ValueError(f'--{name} must be given; --help says how.')
  if not 0 <= values.draft_cost <= 1e6:
    raise ValueError(
      f'--draft_cost must be in [0, 1e6], got {values.draft_cost}.'
    )
  check('--out', values.out)
  trace = trace_file.load(values.trace)
  name = values.tokenizer or trace.about.get('config', {}).get('target')
  if not isinstance(name, str):
    raise ValueError(f'--tokenizer must be given: {values.trace} names none.')
  tokenizer = load.load_tokenizer(name)
  if tokenizer.vocab_size < trace.about['vocab_size']:
    raise ValueError(
      f'--tokenizer must have {trace.about["vocab_size"]} ids as the recorded '
      f'target, got {tokenizer.vocab_size} of {name!r}.'
    )
  drawn = {
    'heat_map': heat_map(trace, tokenizer, values.request),
    'timeline': timeline(trace, values.request, draft_cost=values.draft_cost),
    'laws': laws(trace, tokenizer, values.request),
  }
  for name, figure in drawn.items():
    path = pathlib.Path(values.out) / f'{name}.png'
    save(figure, path)
    print(path)


if __name__ == '__main__':
  sys.exit(script.run_main(main, FLAG_GROUPS))

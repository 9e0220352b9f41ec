"""Records a run for `experiments/replay.py`: --record of generate.py.

The loop comes back to the host after every step, which is timed and noted. At
the end the models read every text once more, teacher-forced, so that every
emitted token has the laws of both. The proposer must be a language model over
the target's ids, or look its drafts up in the text, as a replay does again.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import text_files, trace_file
from specjax import sampling as sampling_lib
from specjax.decode import Decoder
from specjax.models import base as models
from specjax.models.base import LanguageModel
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.early_exit import EarlyExit
from specjax.requests import Result
from specjax.sampling import Sampling
from specjax.shapes import Array, Params
from specjax.state import ACCEPTED, BONUS, CORRECTION, StepInfo
from specjax.tokenizers import pad_batch

# Language models over the target's ids, and what is made again from the text.
_RECORDED = ('draft', 'tli', 'early_exit', 'ngram')
_REFUSED = {
  'none': 'drafts nothing',
  'slem': 'drafts text on the host and has no laws',
}
_CHUNK = 16  # Rows of a pass: two laws over the vocabulary for each.


def check(path: str, top: int, proposer: str, num_processes: int | None):
  """Raises ValueError unless such a run can be recorded."""
  if proposer not in _RECORDED:
    reason = _REFUSED.get(
      proposer,
      'is a head, whose law of a token depends on where the step began, so '
      'that one law per token cannot be replayed',
    )
    raise ValueError(
      f'--record needs --proposer={", ".join(_RECORDED[:-1])} or '
      f'{_RECORDED[-1]}, got {proposer}, which {reason}.'
    )
  if (num_processes or 1) > 1:
    raise ValueError(f'--record needs one process, got {num_processes}.')
  if top < 0:
    raise ValueError(f'--record_top must be >= 0, got {top}.')
  if not path.endswith('.npz'):
    raise ValueError(f'--record must name a .npz file, got {path!r}.')
  text_files.check_writable(path)


def reading_models(
  decoder: Decoder, params: Params
) -> tuple[tuple[LanguageModel, Params], ...]:
  """The target, and the language model that drafts if there is one."""
  target = (decoder.target, params['target'])
  proposer = decoder.proposer
  if isinstance(proposer, DraftModel):
    return target, (proposer.model, params['proposer'])
  if isinstance(proposer, EarlyExit):
    first = proposer.first_params(params['target'])
    return target, (proposer.first_layers, first)
  return (target,)


class Recorder:
  """Takes what `generation.generate` reports, and writes it down.

  Attributes:
    results: to be appended to as they come, in order.
  """

  def __init__(self, batch_size: int):
    self.results: list[Result] = []
    self._batch_size = batch_size
    self._first = 0  # The first request of the batch.
    self._steps: list[dict[str, Any]] = []
    self._clock = 0.0

  def on_batch(self, batch: int):
    """A batch begins; those of later turns follow the ones before."""
    if batch == 0:
      self._turn = len(self.results)
    self._first = self._turn + batch * self._batch_size
    self._index = np.zeros(self._batch_size, int)
    self._clock = None

  def on_step(self, info: StepInfo):
    now = time.perf_counter()
    # What a batch's first step takes is not known apart from its prefill.
    seconds = np.nan if self._clock is None else now - self._clock
    self._clock = now
    for row in np.flatnonzero(np.asarray(info.num_emitted_B)):
      self._steps.append(
        {
          'step_request': self._first + int(row),
          'step_index': int(self._index[row]),
          'draft': np.asarray(info.draft_BK[row]),
          'drafted': int(info.num_draft_B[row]),
          'accepted': int(info.num_accepted_B[row]),
          'emitted': int(info.num_emitted_B[row]),
          'seconds': seconds,
        }
      )
      self._index[row] += 1

  def finish(
    self,
    decoder: Decoder,
    params: Params,
    top: int,
    config: dict[str, Any],
    environment: dict[str, Any],
  ) -> trace_file.TraceFile:
    """Reads the texts again with the models.

    Args:
      decoder: of the run.
      params: {'target', 'proposer'}.
      top: M, ids per law; 0 keeps all.
      config, environment: for the record.
    """
    readers = reading_models(decoder, params)
    results = self.results
    k = decoder.proposer.num_draft_tokens
    requests = [result.request for result in results]
    size = decoder.target.vocab_size
    laws = [
      law
      for start in range(0, len(results), self._batch_size)
      for law in read_again(
        decoder,
        readers,
        results[start : start + self._batch_size],
        self._batch_size,
        min(top or size, size),
      )
    ]
    arrays = {
      'prompt_length': [len(r.prompt_tokens) for r in requests],
      'prompt_token': [token for r in requests for token in r.prompt_tokens],
      'num_tokens': [len(r.tokens) for r in results],
      'seed': [r.seed for r in requests],
      'temperature': [
        0.0 if r.options.is_greedy else r.options.temperature for r in requests
      ],
      'max_new_tokens': [r.max_new_tokens for r in requests],
      'is_stopped': [r.finish_reason == 'stop' for r in results],
      'token': [token for r in results for token in r.tokens],
      **self._by_token(),
      **{name: np.concatenate([law[name] for law in laws]) for name in laws[0]},
      **{
        name: [step[name] for step in self._steps]
        for name in trace_file.STEP_NAMES
      },
      'draft': np.reshape([step['draft'][:k] for step in self._steps], (-1, k)),
    }
    return trace_file.TraceFile(
      about={
        'config': config,
        'environment': environment,
        'vocab_size': size,
        'num_draft_tokens': k,
        'verify': decoder.verify.name,
        'options': [dataclasses.asdict(r.options) for r in requests],
      },
      arrays={
        name: np.asarray(value, trace_file.DTYPES[name])
        for name, value in arrays.items()
      },
    )

  def _by_token(self) -> dict[str, list[int]]:
    """Step, source and num_draft of every token, request after request."""
    found = {'step': [], 'source': [], 'num_draft': []}
    ordered = sorted(
      self._steps, key=lambda s: (s['step_request'], s['step_index'])
    )
    for step in ordered:
      accepted, emitted = step['accepted'], step['emitted']
      own = CORRECTION if accepted < step['drafted'] else BONUS
      found['step'] += [step['step_index']] * emitted
      found['source'] += [ACCEPTED] * accepted + [own] * (emitted - accepted)
      found['num_draft'] += [step['drafted']] + [0] * (emitted - 1)
    return found


def read_again(
  decoder: Decoder,
  readers: Sequence[tuple[LanguageModel, Params]],
  results: Sequence[Result],
  batch_size: int,
  top: int,
) -> list[dict[str, np.ndarray]]:
  """The laws of the models at every emitted token, per result.

  Args:
    decoder: of the run.
    readers: models and parameters; target, draft if there is one.
    results: at most `batch_size`; idle rows are filled up.
    batch_size: B.
    top: M.
  """
  models_, params = zip(*readers)
  num_real = len(results)
  results = [*results, *results[:1] * (batch_size - len(results))]
  texts = [[*r.request.prompt_tokens, *r.tokens] for r in results]
  tokens_BL, length_B = pad_batch(texts, decoder.max_length)
  begin_B = np.array([len(r.request.prompt_tokens) for r in results], np.int32)
  settings = sampling_lib.stack_options(
    [r.request.options for r in results], decoder.target.vocab_size
  )
  caches = _prefill(
    models_,
    params,
    tokens_BL,
    begin_B,
    decoder.prefill_chunk,
  )
  found = []
  most = max(len(r.tokens) for r in results)
  for start in range(0, max(most, 1), _CHUNK):
    caches, rows = _read(
      models_,
      params,
      caches,
      tokens_BL,
      begin_B,
      np.asarray(length_B, np.int32),
      np.int32(start),
      settings,
      top,
    )
    found.append(jax.device_get(rows))
  joined = {
    name: np.concatenate([rows[name] for rows in found], axis=1)
    for name in found[0]
  }
  return [
    {name: value[row, : len(r.tokens)] for name, value in joined.items()}
    for row, r in enumerate(results[:num_real])
  ]


@functools.partial(jax.jit, static_argnames=('models_', 'chunk'))
def _prefill(models_, params, tokens_BL, begin_B, chunk):
  """The caches behind all of the prompt but its last token."""
  size = tokens_BL.shape[1] + _CHUNK
  return tuple(
    models.prefill(
      model,
      own,
      model.init_cache(tokens_BL.shape[0], size, max_rewind=0),
      tokens_BL,
      begin_B - 1,
      chunk,
    )
    for model, own in zip(models_, params)
  )


@functools.partial(jax.jit, static_argnames=('models_', 'top'))
def _read(
  models_: tuple[LanguageModel, ...],
  params: tuple[Params, ...],
  caches: tuple[Any, ...],
  tokens_BL: Array,
  begin_B: Array,
  length_B: Array,
  start: Array,
  settings: Sampling,
  top: int,
) -> tuple[tuple[Any, ...], dict[str, Array]]:
  """The laws at the emitted tokens start..start + T - 1 of every row."""
  last = tokens_BL.shape[1] - 1
  index_BT = (
    begin_B[:, None] + start + jnp.arange(_CHUNK, dtype=jnp.int32)[None]
  )
  take = lambda index_BT: jnp.take_along_axis(
    tokens_BL, jnp.minimum(index_BT, last), axis=1
  )
  fed_BT, next_BT1 = take(index_BT - 1), take(index_BT)[:, :, None]
  num_B = jnp.clip(length_B - begin_B - start, 0, _CHUNK)
  counts = None
  if settings.has_penalties:
    counts = sampling_lib.count_committed(
      tokens_BL, begin_B + start, begin_B, models_[0].vocab_size
    )
    counts = sampling_lib.count_drafts(counts, take(index_BT)[:, :-1])
  raw, chosen, grown = [], [], []
  for model, own, cache in zip(models_, params, caches):
    hidden, cache = model.apply(own, fed_BT, cache, num_tokens_B=num_B)
    logits_BTV = model.unembed(own, hidden.last_BTD)
    law_BTV = sampling_lib.transform(settings, logits_BTV, counts)
    law_BTV = jax.nn.log_softmax(law_BTV, axis=-1)
    chosen.append(jnp.take_along_axis(law_BTV, next_BT1, axis=-1)[..., 0])
    raw.append(jax.nn.log_softmax(logits_BTV, axis=-1))
    grown.append(cache)
  if len(raw) == 1:
    # No language model drafts.
    raw.append(jnp.full_like(raw[0], jnp.nan))
    chosen.append(jnp.full_like(chosen[0], jnp.nan))
  p_BTV, q_BTV = raw
  # fmax passes NaN over.
  _, id_BTM = jax.lax.top_k(jnp.fmax(p_BTV, q_BTV), top)
  entropy = lambda x_BTV: (
    -jnp.sum(jnp.where(x_BTV == -jnp.inf, 0.0, jnp.exp(x_BTV) * x_BTV), axis=-1)
  )
  rows = {'law_id': id_BTM.astype(jnp.int32)}
  for name, law_BTV, own_BT in zip('pq', raw, chosen):
    law_BTM = jnp.take_along_axis(law_BTV, id_BTM, axis=-1)
    rows[f'law_{name}'] = law_BTM
    tail_BT = 1 - jnp.sum(jnp.exp(law_BTM), axis=-1)
    rows[f'tail_{name}'] = jnp.maximum(tail_BT, 0.0)
    rows[f'chosen_{name}'] = own_BT
    rows[f'entropy_{name}'] = entropy(law_BTV)
  return tuple(grown), rows

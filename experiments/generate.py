r"""Generates text: a draft proposes, the target verifies.

  python experiments/generate.py --target=demo:target --draft=demo:draft \
    --prompt='def ' --trace

The text goes to stdout, progress and a summary to stderr, everything with its
configuration to --json_out. A model is demo:target, demo:draft, a .gguf file, a
folder with config.json and safetensors, an orbax folder, or hf:ORG/NAME.
"""

import contextlib
import dataclasses
import sys
import time
from typing import Any, TextIO

import jax
from absl import flags

from experiments import (
  conversions,
  drafts,
  lengths,
  processes,
  prompts,
  recording,
  script,
  surroundings,
  text_files,
  trace,
  trace_file,
)
from experiments.progress import Progress
from experiments.run_config import HEADS, RunConfig
from experiments.run_flags import FLAG_GROUPS, config_from_flags
from specjax import chat, generation, mesh, metrics
from specjax.decode import Decoder
from specjax.models import load
from specjax.models.base import LanguageModel
from specjax.models.heads import files as head_files
from specjax.proposers.base import Nothing, Proposer
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.early_exit import EarlyExit
from specjax.proposers.feature_fed import FeatureFed
from specjax.proposers.given import Given
from specjax.requests import Request, Result, unanswered
from specjax.verify import chain


def make_proposer(
  config: RunConfig, target: load.Loaded, view: mesh.View | None
) -> tuple[Proposer, Any]:
  """The proposer and its parameters."""
  if config.proposer == 'none':
    return Nothing(), ()
  if config.proposer == 'ngram':
    return config.make_ngram(), ()
  if config.proposer == 'early_exit':
    return EarlyExit(
      model=target.model,
      exit_layer=config.exit_layer,
      num_draft_tokens=config.num_draft_tokens,
      stop=lengths.parse(config.stop_rule),
    ), ()
  if config.proposer in HEADS:
    return make_head(config, target, view)
  if config.proposer == 'slem':
    return Given(num_draft_tokens=config.num_draft_tokens), ()
  draft = drafts.load_draft(config, view)
  if config.proposer == 'tli':
    draft = drafts.translated(draft, target)
  drafts.check_same_ids(target, draft)
  return DraftModel(
    model=draft.model,
    num_draft_tokens=config.num_draft_tokens,
    stop=lengths.parse(config.stop_rule),
  ), draft.params


def make_head(
  config: RunConfig, target: load.Loaded, view: mesh.View | None
) -> tuple[Proposer, Any]:
  """A proposer with a head from files, and the head's parameters."""
  with Progress(f'loading head {config.head}'):
    head, params = head_files.load_head(
      load.head_folder(config.head),
      config.proposer,
      target.model,
      target.params,
      view=view,
    )
  stop = lengths.parse(config.stop_rule)
  return drafts.with_head(head, config.num_draft_tokens, stop), params


def read_rows(config: RunConfig) -> list[prompts.Conversation]:
  """What the prompt flags ask for, with the run's settings for defaults."""
  return prompts.read(
    prompt=config.prompt,
    prompt_file=config.prompt_file,
    prompts_jsonl=config.prompts_jsonl,
    limit=config.limit,
    defaults=prompts.Conversation(
      turns=(),
      options=config.options,
      seed=config.seed,
      stop=config.stop,
      max_new_tokens=config.max_new_tokens,
    ),
  )


def choose_rule(name: str, rows: list[prompts.Conversation]) -> chain.Rule:
  """The rule by name; 'auto' looks at the rows' temperatures."""
  warm = [row.options.temperature for row in rows if not row.options.is_greedy]
  if name == 'auto':
    name = 'rejection' if warm else 'greedy'
  if name == 'greedy' and warm:
    raise ValueError(
      f'--verify=greedy needs temperature 0 in every row, got {warm[0]}.'
    )
  return chain.RULES[name]


def generate(config: RunConfig, out: TextIO | None = None) -> dict[str, Any]:
  """Runs a configuration and returns what --json_out holds.

  Args:
    config: the run.
    out: where text, stream or trace goes; None is stdout.
  """
  out = sys.stdout if out is None else out
  rows = read_rows(config)
  rule = choose_rule(config.verify, rows)
  target_view, draft_view = config.views()
  clock = time.perf_counter()
  with Progress(f'loading target {config.target}'):
    target = conversions.load_model(
      config.target,
      config.dtype,
      config.quantize,
      target_view,
      cache_dtype=config.cache_dtype,
      cache_dir=config.cache_dir,
    )
  proposer, proposer_params = make_proposer(config, target, draft_view)
  seconds_load = time.perf_counter() - clock

  size = target.model.vocab_size
  if config.stop_ids and max(config.stop_ids) >= size:
    raise ValueError(
      f'--stop_ids must be in 0..{size - 1}, got {max(config.stop_ids)}.'
    )
  first = None if config.process_id is None else 0
  alike = dataclasses.replace(config, process_id=first, json_out=None)
  processes.check_same((alike, rows))
  talks = [Talk(config, target, row) for row in rows]
  decoder = Decoder(
    target=target.model,
    proposer=proposer,
    verify=rule,
    max_length=max_length_of(
      config, target, max(talk.most_tokens() for talk in talks)
    ),
    width=config.num_draft_tokens + 1 if config.exact else None,
    widths=config.widths(target.model.has_independent_rows),
  )
  params = {'target': target.params, 'proposer': proposer_params}
  drafter = None
  if config.proposer == 'slem':
    drafter = drafts.text_drafter(config, target, decoder.max_length)
  if config.is_first:
    if isinstance(proposer, DraftModel):
      _warn_of_short_draft(proposer.model.context_length, decoder.max_length)
      _warn_of_copies('draft', proposer.model, draft_view)
    if isinstance(proposer, FeatureFed):
      block = proposer.head.block
      _warn_of_short_draft(block.context_length, decoder.max_length)
      _warn_of_copies('head', proposer.head, draft_view)
    _warn_of_copies('target', target.model, target_view)
  costs = None
  if config.stop_rule == 'cost':
    with Progress('measuring step costs'):
      decoder, costs = lengths.with_costs(decoder, params, config.batch_size)
    if config.is_first:
      print(costs, file=sys.stderr)
  shown = _Shown(config, target, out)
  recorder = recording.Recorder(config.batch_size) if config.record else None
  for turn in range(max(len(talk.turns) for talk in talks)):
    speaking = [talk for talk in talks if turn < len(talk.turns)]
    requests = [talk.ask(turn) for talk in speaking]
    # An answer may take more ids to read than it took to write.
    most = max(len(r.prompt_tokens) + r.max_new_tokens for r in requests)
    decoder = dataclasses.replace(
      decoder,
      max_length=max(decoder.max_length, max_length_of(config, target, most)),
    )
    for i, request in reversed(list(enumerate(requests))):
      if turn and len(request.prompt_tokens) > decoder.max_length:
        # The answers so far have filled the buffer: this talk ends here, and
        # nothing that was generated is lost.
        speaking.pop(i).end(unanswered(requests.pop(i), decoder.num_rows - 1))
    stages = _Stages(config, len(requests), recorder)
    answers = generation.generate(
      decoder,
      params,
      requests,
      target.tokenizer,
      batch_size=config.batch_size,
      on_text=shown.on_text if config.stream else None,
      on_step=_all_of(
        shown.on_step if config.trace else None,
        recorder.on_step if recorder else None,
      ),
      on_batch=stages.decoding,
      drafter=drafter,
    )
    with stages:
      for talk, result in zip(speaking, answers):
        talk.hear(result)
        if recorder:
          recorder.results.append(result)
        stages.pause()
        shown.result(result)
  results = [result for talk in talks for result in talk.results]
  report = _report(config, decoder, results, seconds_load, costs)
  if recorder:
    with Progress('reading the texts again'):
      recorded = recorder.finish(
        decoder,
        params,
        config.record_top,
        report['config'],
        report['environment'],
      )
    trace_file.save(config.record, recorded)
  return report


def _all_of(*calls: generation.OnStep | None) -> generation.OnStep | None:
  """One call that makes all of them; None if there are none."""
  calls = [call for call in calls if call is not None]

  def call_all(info):
    for call in calls:
      call(info)

  return call_all if calls else None


def _warn_of_short_draft(context_length: int, max_length: int):
  if context_length < max_length:
    print(
      f'the draft falls silent behind {context_length} tokens, its context; '
      f'rows may have {max_length}.',
      file=sys.stderr,
    )


def _warn_of_copies(who: str, model: LanguageModel, view: mesh.View | None):
  if view is not None:
    for fact in mesh.copied(model.param_specs(), view):
      print(f'{who}: {fact}', file=sys.stderr)


class _Stages:
  """The progress line of a turn: compiling, then decoding batch by batch.

  While text or a trace appears on stdout the line is silent.
  """

  def __init__(
    self,
    config: RunConfig,
    num_requests: int,
    recorder: recording.Recorder | None,
  ):
    self._recorder = recorder
    self._is_silent = config.stream or config.trace
    self._num_batches = -(-num_requests // config.batch_size)
    self._line = contextlib.ExitStack()

  def __enter__(self) -> '_Stages':
    self._line.enter_context(Progress('compiling'))
    return self

  def __exit__(self, *exc_info):
    self._line.close()

  def decoding(self, batch: int):
    self._line.close()
    if self._recorder:
      self._recorder.on_batch(batch)
    if not self._is_silent:
      what = f'decoding batch {batch + 1} of {self._num_batches}'
      self._line.enter_context(Progress(what))

  def pause(self):
    self._line.close()


class Talk:
  """One row of input on its way through its turns."""

  def __init__(
    self, config: RunConfig, target: load.Loaded, row: prompts.Conversation
  ):
    self._config, self._target, self._row = config, target, row
    self._messages: list[dict[str, str]] = []
    self._text = ''
    self._is_over = False
    self.results: list[Result] = []
    if config.system is not None:
      self._messages.append({'role': 'system', 'content': config.system})

  @property
  def turns(self) -> tuple[str, ...]:
    """The turns that are, or will be, asked."""
    if self._is_over:
      return self._row.turns[: len(self.results)]
    return self._row.turns

  def ask(self, turn: int) -> Request:
    """The request of a turn, after the answers to those before it."""
    text = self.turns[turn]
    tokenizer = self._target.tokenizer
    self._messages.append({'role': 'user', 'content': text})
    self._text += text
    if self._config.chat:
      spell = lambda i: '' if i is None else tokenizer.id_to_token(i)
      prompt = chat.render_chat(
        tokenizer.chat_template,
        self._messages,
        bos_token=spell(tokenizer.bos_id),
        eos_token=spell(tokenizer.eos_id),
      )
      ids = tokenizer.encode(prompt, add_special=False)
    else:
      prompt = self._text
      ids = tokenizer.encode(prompt, add_special=True)
    stop_ids = () if self._config.ignore_eos else self._target.stop_ids
    return Request(
      prompt=prompt,
      prompt_tokens=tuple(ids),
      options=self._row.options,
      seed=self._row.seed,
      max_new_tokens=self._row.max_new_tokens,
      stop=self._row.stop,
      stop_ids=tuple(sorted({*stop_ids, *self._config.stop_ids})),
    )

  def end(self, result: Result):
    """The last turn could not be asked any more."""
    self.results.append(result)
    self._is_over = True

  def hear(self, result: Result):
    self.results.append(result)
    self._messages.append({'role': 'assistant', 'content': result.text})
    self._text += result.text

  def most_tokens(self) -> int:
    """Room for all turns, whatever the answers are."""
    rehearsal = Talk(self._config, self._target, self._row)
    for turn in range(len(self.turns)):
      request = rehearsal.ask(turn)
      rehearsal._messages.append({'role': 'assistant', 'content': ''})
    room = len(self.turns) * self._row.max_new_tokens
    return len(request.prompt_tokens) + room


def max_length_of(config: RunConfig, target: load.Loaded, most: int) -> int:
  """The buffer's length for rows of at most so many tokens."""
  if config.max_length is not None:
    return config.max_length
  # Round lengths, so that nearby runs share a compilation.
  return min(-(-most // 64) * 64, target.model.context_length)


class _Shown:
  """What a person sees on stdout while the requests are served."""

  def __init__(self, config: RunConfig, target: load.Loaded, out: TextIO):
    self._config, self._out = config, out
    self.on_step = trace.Trace(
      target.tokenizer, out, out.isatty(), config.batch_size
    )
    if config.trace:
      out.write(f'each line is a step: {self.on_step.legend()}\n')

  def on_text(self, row: int, text: str):
    del row  # --stream has one.
    self._out.write(text)
    self._out.flush()

  def result(self, result: Result):
    self._out.write('\n' if self._config.stream else result.text + '\n')
    self._out.flush()


def _report(
  config: RunConfig,
  decoder: Decoder,
  results: list[Result],
  seconds_load: float,
  costs: lengths.StepCosts | None,
) -> dict[str, Any]:
  """The contents of --json_out."""
  timings = list({id(r.timing): r.timing for r in results}.values())
  requests = [
    {
      'prompt': result.request.prompt,
      'prompt_tokens': list(result.request.prompt_tokens),
      'text': result.text,
      'tokens': list(result.tokens),
      'finish_reason': result.finish_reason,
      'seed': result.request.seed,
      'logprobs': list(result.logprobs) if config.logprobs else None,
      'metrics': {
        **metrics.summarise(result.tally),
        'seconds_load': seconds_load,
        'seconds_compile': result.timing.compile,
        'seconds_prefill': result.timing.prefill,
        'seconds_decode': result.timing.decode,
      },
    }
    for result in results
  ]
  total = results[0].tally
  for result in results[1:]:
    total += result.tally
  seconds_decode = sum(timing.decode for timing in timings)
  aggregate = {
    **metrics.summarise(total),
    'seconds_load': seconds_load,
    'seconds_compile': sum(timing.compile for timing in timings),
    'seconds_prefill': sum(timing.prefill for timing in timings),
    'seconds_decode': seconds_decode,
    'tokens_per_second': total.num_emitted / seconds_decode,
  }
  return {
    'config': {
      **dataclasses.asdict(config),
      'verify': decoder.verify.name,
      'max_length': decoder.max_length,
      'widths': list(decoder.pass_widths),
      'step_milliseconds': costs and dataclasses.asdict(costs),
    },
    'environment': surroundings.environment(),
    'requests': requests,
    'aggregate': aggregate,
  }


def summary(report: dict[str, Any]) -> str:
  """One line about a run, for stderr."""
  figures = report['aggregate']
  return (
    f'{figures["num_emitted"]} tokens in {figures["num_steps"]} steps '
    f'(block efficiency {figures["block_efficiency"] or 0:.2f}), '
    f'{figures["tokens_per_second"]:.1f} tokens/s on '
    f'{jax.devices()[0].platform}; load {figures["seconds_load"]:.1f} s, '
    f'compile {figures["seconds_compile"]:.1f} s, '
    f'prefill {figures["seconds_prefill"]:.1f} s, '
    f'decode {figures["seconds_decode"]:.1f} s'
  )


def main(values: flags.FlagValues):
  config = config_from_flags(values)
  with processes.joined(
    config.coordinator, config.num_processes, config.process_id
  ):
    report = generate(config)
    if config.is_first:
      print(summary(report), file=sys.stderr)
      if config.json_out is not None:
        text_files.write_json(config.json_out, report)


if __name__ == '__main__':
  processes.leave(script.run_main(main, FLAG_GROUPS))

r"""Times decoding by every proposer beside what its own steps predict.

  python experiments/benchmark.py --target=big.gguf --draft=small.gguf \
    --prompts_jsonl=prompts.jsonl --limit=8 --max_new_tokens=96 \
    --quantize=int8 --peers=transformers --plots=plots --json_out=speed.json

Only the decoding loop is timed; prefill and compilation are apart. Stop ids are
ignored, so that every run makes the same number of tokens. A conversation is
asked its first turn. In each repeat the cells take turns over the same prompts,
and the costs of their parts are measured again: a slow minute hits all alike.

A speed-up is over the fastest plain decoding of the same run: greedy text of
one row or of two, whichever step is cheaper on this device. It is predicted as
tau * plain / (verify + drafting), every part measured alone, at the length that
the texts have on average and with as many slots in the cache. Drafting is the
pass over two rows (of a head: K + 1) that absorbs what was committed, and one
over a row for each further draft, of which Medusa needs none; other proposers
are timed as they are. Efficiency is the measured speed-up over the predicted
one; the overhead is the share of a step that its parts do not explain. The
table goes to stdout, everything to --json_out.
"""

import contextlib
import dataclasses
import os
import sys
from typing import Any

from absl import flags

from experiments import (
  bench_report,
  bench_run,
  draw,
  peers,
  plots,
  run_config,
  run_flags,
  script,
  surroundings,
  text_files,
)
from experiments.run_config import HEADS, PROPOSERS, RunConfig

# Flags of generate.py that a benchmark sets itself, or that would end a text.
_SET_HERE = ('proposer', 'num_draft_tokens', 'batch_size')
_NOT_HERE = ('stop', 'stop_ids', 'ignore_eos')
# Flags that are of use to one proposer and refused with the others.
_ONLY_WITH = {
  'draft': run_config.DRAFTING,
  'draft_dtype': run_config.DRAFTING,
  'draft_quantize': run_config.DRAFTING,
  'draft_mesh': run_config.DRAFTING,
  'exit_layer': ('early_exit',),
  'head': HEADS,
  'stop_rule': (*run_config.DRAFTING, 'ngram', 'early_exit', *HEADS),
}
_MOST_REPEATS = 1000
# What slem does between steps, on the host, would not be timed.
_TIMED = tuple(name for name in PROPOSERS if name != 'slem')


def _without(define, names):
  def define_rest(values: flags.FlagValues):
    define(values)
    for name in set(names) & set(values):
      delattr(values, name)

  return define_rest


def define_speculation_flags(values: flags.FlagValues):
  _without(run_flags.define_speculation_flags, _SET_HERE)(values)
  values.set_default('exact', False)
  values['exact'].help = (
    'Time plain decoding at the width of every verification too, and say '
    'whether the texts are bit-equal. The baseline stays the fastest one.'
  )


def define_benchmark_flags(values: flags.FlagValues):
  many = lambda name, default, text: flags.DEFINE_list(
    name, default, text, flag_values=values
  )
  many(
    'proposers',
    'none,draft,ngram',
    f'Of {", ".join(_TIMED)}; plain decoding is run in any case.',
  )
  many('draft_lengths', '1,2,4,8', 'Drafts per step, each 1..64.')
  many('batch_sizes', '1', 'Rows decoded side by side.')
  flags.DEFINE_integer(
    'accept',
    None,
    'Force so many drafts per step to be accepted, to measure the system apart '
    'from its models: lossy, for the text has the law of the drafts. With '
    '--verify=rejection and a temperature above 0.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'repeats', 5, 'Timed runs of every cell.', flag_values=values
  )
  flags.DEFINE_enum(
    'peers',
    'none',
    ['none', *peers.PROGRAMS],
    'Another program to time on the same weights and prompts, one at a time, '
    'in a process of its own; its repeats alternate with ours.',
    flag_values=values,
  )
  flags.DEFINE_enum(
    'peers_dtype',
    None,
    list(run_config.DTYPES),
    "Of the peer's weights, if not as --dtype: some CPUs are slow in bfloat16.",
    flag_values=values,
  )
  flags.DEFINE_string(
    'plots', None, 'Write plots (PNG) to this folder.', flag_values=values
  )
  flags.DEFINE_string(
    'json_out',
    None,
    'Write configuration and results to this file, anew after every repeat.',
    flag_values=values,
  )


FLAG_GROUPS = (
  ('Models', run_flags.define_model_flags),
  ('Devices', run_flags.define_device_flags),
  ('Speculation', define_speculation_flags),
  ('Prompts', _without(run_flags.define_prompt_flags, _SET_HERE)),
  (
    'Sampling and limits',
    _without(run_flags.define_sampling_flags, _NOT_HERE),
  ),
  ('Benchmark', define_benchmark_flags),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig:
  """A benchmark, checked.

  Attributes:
    runs: by proposer, each with the smallest draft length; 'none' is there.
    draft_lengths: K, without repetition.
    batch_sizes: B, likewise.
    repeats: timed runs of each cell.
    peers: 'none' or one of `peers.PROGRAMS`.
    peers_dtype: of its weights; None: as ours.
    accept: drafts per step that are accepted by force (lossy), or None.
    stop_rule: 'fixed', or one by which every proposer is run once more, with
      the largest draft length.
    plots: a folder, or None.
    json_out: a file, or None.
  """

  runs: dict[str, RunConfig]
  draft_lengths: tuple[int, ...]
  batch_sizes: tuple[int, ...]
  repeats: int
  peers: str = 'none'
  peers_dtype: str | None = None
  accept: int | None = None
  stop_rule: str = 'fixed'
  plots: str | None = None
  json_out: str | None = None

  def __post_init__(self):
    if not 1 <= self.repeats <= _MOST_REPEATS:
      raise ValueError(
        f'repeats must be in 1..{_MOST_REPEATS}, got {self.repeats}.'
      )
    plain = self.runs['none']
    if plain.max_new_tokens < 1:
      raise ValueError(
        f'max_new_tokens must be at least 1, got {plain.max_new_tokens}.'
      )
    if self.accept is not None and plain.options.is_greedy:
      raise ValueError(
        '--accept needs a temperature above 0, got '
        f'{plain.options.temperature}.'
      )
    least = min(self.draft_lengths, default=64)
    if self.accept is not None and not 0 <= self.accept <= least:
      raise ValueError(
        f'--accept must be in 0..{least}, the least of --draft_lengths, got '
        f'{self.accept}.'
      )
    if self.peers_dtype is not None and self.peers == 'none':
      raise ValueError('--peers_dtype needs --peers.')
    if self.peers != 'none':
      peers.check(self.peers, plain.target, self.draft)
      if plain.options.temperature != 0:
        raise ValueError(
          f'--peers={self.peers} needs --temperature=0, got '
          f'{plain.options.temperature}.'
        )
    if self.plots is not None:
      draw.check('--plots', self.plots)
    if self.json_out is not None:
      text_files.check_writable(self.json_out)

  @property
  def draft(self) -> str | None:
    return self.runs['draft'].draft if 'draft' in self.runs else None


def config_from_flags(values: flags.FlagValues) -> BenchConfig:
  """The benchmark that the flags ask for."""
  names = list(dict.fromkeys(['none', *values.proposers]))
  for name in names:
    if name not in _TIMED:
      raise ValueError(
        f'--proposers must be some of {", ".join(_TIMED)}, got {name!r}.'
      )
  # Without --draft, the default of --proposers means what there is.
  if not values['proposers'].present and values.draft is None:
    names.remove('draft')
  for flag, users in _ONLY_WITH.items():
    is_given = flag in values and values[flag].present
    if is_given and not set(users) & set(names):
      raise ValueError(
        f'--{flag} needs {users[0]} among --proposers, got {",".join(names)}.'
      )
  lengths = _numbers('draft_lengths', values.draft_lengths, 64)
  sizes = _numbers('batch_sizes', values.batch_sizes, 65536)
  return BenchConfig(
    runs={
      name: _run_config(values, name, min(lengths), size)
      for size in reversed(sizes)  # All are checked; the first one stays.
      for name in names
    },
    draft_lengths=lengths,
    batch_sizes=sizes,
    repeats=values.repeats,
    peers=values.peers,
    peers_dtype=values.peers_dtype,
    plots=values.plots,
    accept=values.accept,
    stop_rule=values.stop_rule,
    json_out=values.json_out,
  )


def _numbers(name: str, items: list[str], most: int) -> tuple[int, ...]:
  found = []
  for item in items:
    is_plain = item.isascii() and item.isdigit() and len(item) < 8
    if not is_plain or not 1 <= int(item) <= most:
      raise ValueError(
        f'--{name} must be numbers in 1..{most} joined by commas, got {item!r}.'
      )
    found.append(int(item))
  if not found:
    raise ValueError(f'--{name} must have at least one number.')
  return tuple(dict.fromkeys(found))


def _run_config(
  values: flags.FlagValues, proposer: str, num_draft_tokens: int, size: int
) -> RunConfig:
  """The flags as those of generate.py, with one proposer."""
  run = flags.FlagValues()
  for _, define in run_flags.FLAG_GROUPS:
    define(run)
  run.mark_as_parsed()
  for name in run:
    is_ours = name in values and name not in (
      *_SET_HERE,
      'stop_rule',
      'json_out',
    )
    if is_ours and proposer in _ONLY_WITH.get(name, (proposer,)):
      run[name].value = values[name].value
  run.proposer = proposer
  run.num_draft_tokens = num_draft_tokens
  run.batch_size = size
  run.ignore_eos = True
  config = run_flags.config_from_flags(run)
  if proposer != 'none' and values.stop_rule != 'fixed':
    # Refused here, if it does not suit; cells without it share the models.
    dataclasses.replace(config, stop_rule=values.stop_rule)
  return config


def benchmark(config: BenchConfig) -> dict[str, Any]:
  """Runs everything and returns what --json_out holds."""
  bench = bench_run.prepare(config)
  with contextlib.ExitStack() as stack:
    peer = None
    if config.peers != 'none':
      job = bench.peer_job(config)
      peer = stack.enter_context(peers.Peer(config.peers, job))
    for rounds in bench.rounds(config.repeats, peer):
      report = _report(config, bench, rounds)
      if config.json_out is not None:  # Whatever happens later, this is kept.
        text_files.write_json(config.json_out, report)
  return report


def _report(
  config: BenchConfig, bench: bench_run.Bench, rounds: bench_run.Rounds
) -> dict[str, Any]:
  plain = dataclasses.asdict(config.runs['none'])
  for name in (*_SET_HERE, *_NOT_HERE, 'stream', 'trace', 'logprobs'):
    plain.pop(name, None)
  plain_run = config.runs['none']
  draft = next((run for run in config.runs.values() if run.draft), plain_run)
  for name in ('draft', 'draft_dtype', 'draft_quantize', 'draft_mesh'):
    plain[name] = getattr(draft, name)
  rows = bench_report.rows(bench, rounds)
  return {
    'config': {
      **plain,
      'proposers': list(config.runs),
      'draft_lengths': config.draft_lengths,
      'batch_sizes': config.batch_sizes,
      'accept': config.accept,
      'stop_rule': config.stop_rule,
      'repeats': config.repeats,
      'repeats_done': rounds.num_done,
      'peers': config.peers,
      'peers_dtype': config.peers_dtype,
      'verify': bench.rule.name,
      'max_length': bench.max_length,
      'num_prompts': len(bench.requests),
      'num_threads': len(os.sched_getaffinity(0)),
      'json_out': config.json_out,
    },
    'environment': surroundings.environment(),
    'rows': rows,
    'step_costs': bench_report.step_costs(rounds),
    'peers': bench_report.peer_rows(bench, rounds, rows),
  }


def main(values: flags.FlagValues):
  config = config_from_flags(values)
  report = benchmark(config)
  print(bench_report.markdown(report))
  if config.plots is not None:
    for path in plots.write(report, config.plots):
      print(f'wrote {path}', file=sys.stderr)


if __name__ == '__main__':
  sys.exit(script.run_main(main, FLAG_GROUPS))

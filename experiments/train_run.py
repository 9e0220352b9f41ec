"""A training run: from a configuration to a model folder and its metrics."""

import dataclasses
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from experiments import (
  head_student,
  held_out,
  students,
  surroundings,
  text_files,
)
from experiments.progress import Progress
from experiments.students import Student
from experiments.train_config import TrainConfig
from specjax import sharding
from specjax.models import load
from specjax.models.checkpoints import orbax
from specjax.shapes import Params
from specjax.tokenizers import Tokenizer
from specjax.training import data, evaluate, loop, written
from specjax.training.checkpoints import Checkpoints
from specjax.training.remembered import Remembered
from specjax.training.step import Trainer, TrainState

_NUM_EVAL_BATCHES = 16
_NUM_DRAFT_TOKENS = 4
_TEMPERATURES = (0.0, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
  """What a configuration stands for, loaded and checked.

  Attributes:
    student: what is trained.
    trainer: its objective, and the optimizer.
    init_params: where it starts; None: at random.
    frozen_params: what is not trained, or None.
    source: of batches.
    eval_batches: held-out text.
    digest: a hash of all that the result depends on.
  """

  student: Student
  trainer: Trainer
  init_params: Params | None
  frozen_params: Params
  source: data.Source
  eval_batches: tuple[Any, ...]
  digest: str


def prepare(config: TrainConfig) -> Setup:
  """Loads models and data.

  Raises:
    ValueError, OSError: a file is missing or not what it should be.
  """
  if config.out is not None:
    orbax.check_free(pathlib.Path(config.out))
  target = None
  if config.target is not None:
    with Progress(f'loading target {config.target}'):
      target = load.load(config.target, config.dtype)
  make = head_student.make_head if config.head else students.make_model
  student = make(config, target)
  # The last token of a row is predicted, and never read.
  if config.length - 1 > student.context_length:
    raise ValueError(
      f'length must be at most {student.context_length + 1}, one more than the '
      f'context of the model, got {config.length}.'
    )
  packed = _pack(config, config.data, student.tokenizer, config.seed)
  init_params, frozen_params = student.begin(packed)
  trainer = Trainer(
    objective=student.objective, adamw=config.adamw(), seed=config.seed
  )
  source: data.Source = packed
  if config.written_by != 'none':
    source = written.Written(
      source=packed,
      writer=config.written_by,
      share=config.written_share,
      after=config.written_after,
      seed=config.seed,
      **student.writers(frozen_params),
    )
  if config.remember:
    reading = student.reading(frozen_params)
    source = Remembered(source=packed, **reading)
  eval_batches = ()
  if config.eval_data:
    unseen = _pack(config, config.eval_data, student.tokenizer, 0)
    num = max(min(unseen.num_rows // config.batch_size, _NUM_EVAL_BATCHES), 1)
    if config.remember:
      unseen = Remembered(source=unseen, **reading)
    eval_batches = tuple(unseen.batch(i, None) for i in range(num))
  identity = hashlib.sha256(repr((trainer, _decides(config))).encode())
  identity.update(packed.digest().encode())
  for leaf in jax.tree.leaves(sharding.to_host((init_params, frozen_params))):
    identity.update(np.ascontiguousarray(leaf).tobytes())
  return Setup(
    student=student,
    trainer=trainer,
    init_params=init_params,
    frozen_params=frozen_params,
    source=source,
    eval_batches=eval_batches,
    digest=identity.hexdigest(),
  )


def _decides(config: TrainConfig) -> dict[str, Any]:
  """The settings that the parameters depend on."""
  idle = {'run_dir', 'out', 'eval_data', 'num_eval_prompts'}
  idle |= {'save_every', 'stop_at', 'log_every', 'eval_every'}
  settings = dataclasses.asdict(config)
  return {k: v for k, v in settings.items() if k not in idle}


def _pack(
  config: TrainConfig, names: tuple[str, ...], tokenizer: Tokenizer, seed: int
) -> data.Packed:
  documents = held_out.read(names, tokenizer)
  return data.pack(
    documents,
    batch_size=config.batch_size,
    length=config.length,
    seed=seed,
    recuts=not config.remember,
  )


class _Log:
  """Writes metrics as JSON lines and says on stderr how far a run is."""

  def __init__(self, config: TrainConfig, setup: Setup, progress):
    self._config, self._setup, self._progress = config, setup, progress
    self._file: pathlib.Path | None = None
    if config.run_dir is not None:
      config.run_folder().mkdir(parents=True, exist_ok=True)
      self._file = config.run_folder() / 'metrics.jsonl'
    self.rows: list[dict[str, Any]] = []

  def start(self, step: int, state: TrainState):
    """Forgets what was logged behind the checkpoint that a run goes on from."""
    del state
    self._start, self._earlier = step, 0.0
    self._clock = time.perf_counter()
    if self._file is None or not self._file.exists():
      return
    for line in self._file.read_text(encoding='utf-8').splitlines():
      try:
        row = json.loads(line)
      except ValueError:
        continue  # A line that a killed run did not finish.
      if row['step'] <= step:
        self.rows.append(row)
        self._earlier = row['seconds']
    temporary = self._file.with_name(f'.{self._file.name}.{os.getpid()}.tmp')
    text = ''.join(json.dumps(row) + '\n' for row in self.rows)
    temporary.write_text(text, encoding='utf-8')
    os.replace(temporary, self._file)

  def step(self, step: int, state: TrainState, figures: dict[str, Any]):
    config = self._config
    is_last = step == config.last_step
    if step % config.log_every and not is_last and step % config.eval_every:
      return
    row = {'step': step}
    row |= {k: float(v) for k, v in jax.device_get(figures).items()}
    seconds = time.perf_counter() - self._clock
    num_tokens = (step - self._start) * config.batch_size * (config.length - 1)
    rate = num_tokens / seconds
    left = (config.last_step - step) * seconds / (step - self._start)
    self._progress.update(
      f'step {step} of {config.last_step}, loss {row["loss"]:.4f}, '
      f'{rate:.0f} tokens/s, {left:.0f} s left'
    )
    row |= {'tokens_per_second': rate, 'seconds': self._earlier + seconds}
    if self._setup.eval_batches and (is_last or step % config.eval_every == 0):
      # Evaluation is no part of the training's speed.
      clock = time.perf_counter()
      figures = self.evaluate(state.params)
      row |= {f'eval_{k}': v for k, v in figures.items()}
      self._clock += time.perf_counter() - clock
    self.rows.append(row)
    if self._file is not None:
      with self._file.open('a', encoding='utf-8') as file:
        file.write(json.dumps(row) + '\n')

  def evaluate(self, params: Params) -> dict[str, float]:
    setup = self._setup
    return evaluate.evaluate(
      setup.trainer.objective,
      setup.trainer.rounded(params),
      setup.frozen_params,
      setup.eval_batches,
    )


def run(config: TrainConfig) -> dict[str, Any]:
  """Trains, writes what the configuration asks for, and returns the report."""
  setup = prepare(config)
  checkpoints = None
  if config.run_dir is not None:
    checkpoints = Checkpoints(directory=config.run_folder(), run=setup.digest)
  with Progress('training') as progress:
    log = _Log(config, setup, progress)
    state = loop.train(
      setup.trainer,
      setup.source,
      setup.frozen_params,
      init_params=setup.init_params,
      placement=setup.student.placement,
      checkpoints=checkpoints,
      save_every=config.save_every,
      stop_at=config.stop_at,
      on_start=log.start,
      on_step=log.step,
    )
  params = setup.trainer.rounded(state.params)
  report = {
    'config': dataclasses.asdict(config),
    'environment': surroundings.environment(),
    'num_parameters': sum(x.size for x in jax.tree.leaves(params)),
    'last': log.rows[-1] if log.rows else None,
    'decoding': None,
  }
  if config.num_eval_prompts:
    with Progress('decoding held-out prompts'):
      report['decoding'] = list(decode_held_out(config, setup, params))
  # Where there is a model there is a report of it.
  if config.run_dir is not None:
    text_files.write_json(str(config.run_folder() / 'report.json'), report)
  if config.out is not None:
    setup.student.write(config.out, params, setup.frozen_params)
  return report


def decode_held_out(
  config: TrainConfig, setup: Setup, params: Params
) -> Iterator[dict[str, Any]]:
  """What decoding with the student counts, by temperature."""
  prompts = held_out.Prompts(
    names=config.eval_data, num_prompts=config.num_eval_prompts
  )
  student = setup.student
  proposer, params = student.proposer(
    params, setup.frozen_params, _NUM_DRAFT_TOKENS
  )
  params = jax.tree.map(jax.device_put, sharding.to_host(params))
  for temperature in _TEMPERATURES:
    requests = prompts.requests(student.tokenizer, temperature)
    figures = held_out.measure(student.target, proposer, params, requests)
    del figures['tokens']
    yield {'temperature': temperature, **figures}


def summary(report: dict[str, Any]) -> str:
  """One line about a run, for stderr."""
  last = report['last'] or {}
  parts = [f'{report["num_parameters"]:,} parameters']
  # A head has an overlap for every token that it is taught ahead.
  overlaps = [name for name in last if name.startswith('eval_overlap')]
  for name in ('loss', 'eval_loss', *overlaps):
    if name in last:
      parts.append(f'{name} {last[name]:.4f}')
  for row in report['decoding'] or ():
    parts.append(
      f'block efficiency {row["block_efficiency"]:.2f} at temperature '
      f'{row["temperature"]:g}'
    )
  return ', '.join(parts)

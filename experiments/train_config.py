"""The flags of a training run, and the checked configuration they become."""

import dataclasses
import pathlib

from absl import flags

from experiments.run_config import DTYPES
from specjax import noise
from specjax.mesh import MeshShape, View, parse_mesh, refine
from specjax.models.heads.build import KINDS
from specjax.training.losses import DIVERGENCES
from specjax.training.step import AdamW
from specjax.training.written import WRITERS


def define_model_flags(values: flags.FlagValues):
  string, enum, _, _ = _definers(values)
  string(
    'config',
    None,
    "A config.json with the new model's shape; it starts from random weights.",
  )
  string(
    'init',
    None,
    'In place of --config: a model to start from; with --head, a head.',
  )
  string(
    'target',
    None,
    'A model whose law is imitated, or that gets a head. If not given: plain '
    'text.',
  )
  enum(
    'loss',
    None,
    (*DIVERGENCES, 'text'),
    'How far the draft is from the target, with --target; tv is one minus the '
    'probability that a draft is accepted. text, for heads: of the next tokens '
    'of the text. If not given: forward_kl, and for medusa and mtp text, as in '
    'their papers.',
  )
  enum(
    'dtype',
    'bfloat16',
    DTYPES,
    'In which the losses compute, and of the folder; the optimizer keeps '
    'float32.',
  )
  string('mesh', 'data:1', 'Devices, as data:4: rows are split over data.')


def define_head_flags(values: flags.FlagValues):
  _, enum, whole, _ = _definers(values)
  enum(
    'head',
    None,
    KINDS,
    'In place of --config: a head on the frozen --target, which reads its '
    'hiddens. --out gets a folder for --head of generate.py.',
  )
  whole(
    'depth',
    None,
    'How many tokens ahead it is taught. medusa has so many heads; the others '
    'go on from their own output in training as they will in drafting '
    '(training-time test). If not given: 1 for eagle, 4 for the others.',
  )
  whole(
    'draft_vocab_size',
    None,
    'With mtp and eagle3: it drafts only so many ids, those that come most '
    'often among the predicted tokens of --data. If not given: all.',
  )
  whole(
    'head_ffn_dim',
    None,
    "Feed-forward width of its layer. If not given: the target's.",
  )
  enum(
    'target_quantize',
    'none',
    ('none', 'int8'),
    'In which the target reads the text and says its law, not for medusa: with '
    'int8, and on one device, as generate.py decodes with --quantize=int8, '
    'which is faster on a CPU.',
  )
  flags.DEFINE_boolean(
    'remember',
    False,
    'The target reads every window of the text once, in place of once per '
    'epoch, and its hiddens stay in memory: (layers captured + 1) * width '
    'values per token. Not for medusa.',
    flag_values=values,
  )


def define_data_flags(values: flags.FlagValues):
  string, enum, whole, number = _definers(values)
  flags.DEFINE_multi_string(
    'data',
    [],
    'A file to train on: a text, a .jsonl with text (or prompt_tokens and '
    "tokens) in every line, a .json result of generate.py, or stdlib: Python's "
    'standard library without the modules kept for evaluation. Prompt tokens '
    'are read and not learnt. May be given more than once.',
    flag_values=values,
  )
  flags.DEFINE_multi_string(
    'eval_data',
    [],
    'Files to evaluate on; stdlib_held_out names the modules that were kept.',
    flag_values=values,
  )
  whole('batch_size', 8, 'Rows of a step.')
  whole('length', 257, 'Tokens of a row; all but the first are predicted.')
  enum(
    'written_by',
    'none',
    ('none', *WRITERS),
    'Who continues the beginnings of rows, with --target: nobody; the target; '
    'the draft as it is by then (on-policy); or the pair, decoding together, '
    'and only the places are learnt in which a draft was rejected (online). '
    'With --head: nobody, or the target.',
  )
  number(
    'written_share',
    1.0,
    'Share of the rows that are continued by --written_by.',
  )
  whole('written_after', 64, 'Tokens of the text that those rows keep.')


def define_optimizer_flags(values: flags.FlagValues):
  _, _, whole, number = _definers(values)
  whole('num_steps', None, 'Steps of the schedule.')
  number('learning_rate', 1e-3, 'At its peak.')
  whole('num_warmup_steps', 100, 'Of linear growth, before the cosine.')
  number('weight_decay', 0.1, 'Of matrices.')
  number('max_grad_norm', 1.0, 'Longer gradients are shortened to it.')
  whole('num_accumulated', 1, 'Parts in which a batch goes through.')
  whole('seed', 0, 'Of weights, order and noise.')


def define_run_flags(values: flags.FlagValues):
  string, _, whole, _ = _definers(values)
  string('run_dir', None, 'Folder of checkpoints and metrics.jsonl.')
  string('out', None, 'Model folder to write at the end; absent or empty.')
  whole('save_every', 200, 'Steps between checkpoints.')
  whole(
    'stop_at',
    None,
    'End at this step, before the schedule does; --out gets the model as it '
    'is, and the run can go on later.',
  )
  whole('log_every', 10, 'Steps between lines of metrics.')
  whole('eval_every', 500, 'Steps between evaluations, with --eval_data.')
  whole(
    'num_eval_prompts',
    0,
    'Prompts on which block efficiency is measured at the end, by decoding, '
    'with --target and --eval_data.',
  )


FLAG_GROUPS = (
  ('Models', define_model_flags),
  ('Heads', define_head_flags),
  ('Data', define_data_flags),
  ('Optimizer', define_optimizer_flags),
  ('Run', define_run_flags),
)


def _definers(values: flags.FlagValues):
  def string(name, default, text):
    flags.DEFINE_string(name, default, text, flag_values=values)

  def enum(name, default, choices, text):
    flags.DEFINE_enum(name, default, list(choices), text, flag_values=values)

  def whole(name, default, text):
    flags.DEFINE_integer(name, default, text, flag_values=values)

  def number(name, default, text):
    flags.DEFINE_float(name, default, text, flag_values=values)

  return string, enum, whole, number


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
  """A training run, checked. Attributes are the flags of the same names."""

  data: tuple[str, ...]
  num_steps: int
  config: str | None = None
  init: str | None = None
  target: str | None = None
  loss: str | None = None
  head: str | None = None
  depth: int | None = None
  draft_vocab_size: int | None = None
  head_ffn_dim: int | None = None
  target_quantize: str = 'none'
  remember: bool = False
  dtype: str = 'bfloat16'
  mesh: str = 'data:1'
  eval_data: tuple[str, ...] = ()
  batch_size: int = 8
  length: int = 257
  written_by: str = 'none'
  written_share: float = 1.0
  written_after: int = 64
  learning_rate: float = 1e-3
  num_warmup_steps: int = 100
  weight_decay: float = 0.1
  max_grad_norm: float = 1.0
  num_accumulated: int = 1
  seed: int = 0
  run_dir: str | None = None
  out: str | None = None
  save_every: int = 200
  stop_at: int | None = None
  log_every: int = 10
  eval_every: int = 500
  num_eval_prompts: int = 0

  def __post_init__(self):
    self._check_student()
    if not self.data:
      raise ValueError('--data must name a file, or stdlib.')
    noise.check_seed(self.seed)
    self.adamw()
    for name in ('save_every', 'log_every', 'eval_every'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} must be >= 1, got {getattr(self, name)}.')
    if self.stop_at is not None and not 1 <= self.stop_at <= self.num_steps:
      raise ValueError(
        f'stop_at must be in 1..{self.num_steps}, got {self.stop_at}.'
      )
    shape = self.mesh_shape()
    if self.batch_size < 1 or self.batch_size % (
      shape.data * self.num_accumulated
    ):
      raise ValueError(
        'batch_size must be a multiple of '
        f'{shape.data * self.num_accumulated}, the size of the data axis times '
        f'num_accumulated, got {self.batch_size}.'
      )
    if self.written_by != 'none':
      if self.target is None:
        raise ValueError(f'--written_by={self.written_by} needs --target.')
      if not 1 <= self.written_after < self.length:
        raise ValueError(
          f'written_after must be in 1..{self.length - 1}, below length, got '
          f'{self.written_after}.'
        )
      if not 0 < self.written_share <= 1:
        raise ValueError(
          f'written_share must be > 0 and <= 1, got {self.written_share}.'
        )
    if self.num_eval_prompts < 0:
      raise ValueError(
        f'num_eval_prompts must be >= 0, got {self.num_eval_prompts}.'
      )
    if self.num_eval_prompts and not (self.target and self.eval_data):
      raise ValueError('--num_eval_prompts needs --target and --eval_data.')

  def _check_student(self):
    if self.head is None:
      if (self.config is None) == (self.init is None):
        raise ValueError('one of --config, --init and --head must be given.')
      for name in ('depth', 'draft_vocab_size', 'head_ffn_dim'):
        if getattr(self, name) is not None:
          raise ValueError(f'--{name} needs --head.')
      if self.target_quantize != 'none' or self.remember:
        raise ValueError('--target_quantize and --remember need --head.')
      if self.loss == 'text' and self.target is not None:
        raise ValueError(
          '--loss=text needs --head; a model learns a text without --target.'
        )
      return
    if self.head not in KINDS:
      raise ValueError(
        f'head must be one of {", ".join(KINDS)}, got {self.head!r}.'
      )
    if self.config is not None:
      raise ValueError('--config is not used with --head; drop one.')
    if self.target is None:
      raise ValueError(f'--head={self.head} needs --target.')
    if self.written_by not in ('none', 'target'):
      raise ValueError(
        f'--written_by must be none or target with --head, got '
        f'{self.written_by}.'
      )
    if self.target_quantize != 'none' and (
      self.head == 'medusa' or self.mesh_shape().num_devices > 1
    ):
      raise ValueError(
        f'--target_quantize={self.target_quantize} needs one device, and a '
        'head other than medusa.'
      )
    if self.remember and (self.head == 'medusa' or self.written_by != 'none'):
      raise ValueError(
        '--remember needs a text that stays, without --written_by, and a head '
        'other than medusa.'
      )
    is_unused = {
      'depth': self.head == 'medusa' and self.init is not None,
      'draft_vocab_size': self.head in ('medusa', 'eagle')
      or self.init is not None,
      'head_ffn_dim': self.head == 'medusa' or self.init is not None,
    }
    for name, is_idle in is_unused.items():
      value = getattr(self, name)
      if value is not None and value < 1:
        raise ValueError(f'{name} must be >= 1, got {value}.')
      if value is not None and is_idle:
        more = '' if self.init is None else ' and --init'
        raise ValueError(
          f'--{name} is not used with --head={self.head}{more}; drop one.'
        )

  def adamw(self) -> AdamW:
    names = {field.name for field in dataclasses.fields(AdamW)}
    given = dataclasses.asdict(self)
    return AdamW(**{name: given[name] for name in names & set(given)})

  def mesh_shape(self) -> MeshShape:
    return parse_mesh(self.mesh)

  @property
  def last_step(self) -> int:
    return self.stop_at or self.num_steps

  def view(self) -> View:
    return refine(self.mesh_shape())[0]

  def run_folder(self) -> pathlib.Path | None:
    return None if self.run_dir is None else pathlib.Path(self.run_dir)


def config_from_flags(values: flags.FlagValues) -> TrainConfig:
  """The run that the flags ask for."""
  if values.num_steps is None:
    raise ValueError('--num_steps must be given; --help says how.')
  given = {field.name for field in dataclasses.fields(TrainConfig)}
  taken = {name: values[name].value for name in values if name in given}
  for name in ('data', 'eval_data'):
    taken[name] = tuple(taken[name])
  return TrainConfig(**taken)

"""The flags of a run, and the checked configuration they become."""

import dataclasses

from absl import flags

from experiments import common
from specjax import noise
from specjax.proposers.base import check_num_draft_tokens
from specjax.sampling import SamplingOptions
from specjax.verify import chain

DTYPES = ('float32', 'bfloat16')
PROPOSERS = ('none', 'draft', 'ngram')


def define_model_flags(values: flags.FlagValues):
  string, enum = _definers(values)
  string('target', None, 'The model whose text is produced.')
  string('draft', None, 'The model that guesses; same vocabulary.')
  enum('dtype', 'bfloat16', DTYPES, 'Weights, activations and cache.')
  enum('draft_dtype', None, DTYPES, 'Of the draft; as --dtype if not given.')


def define_speculation_flags(values: flags.FlagValues):
  _, enum = _definers(values)
  enum(
    'proposer',
    None,
    PROPOSERS,
    'Who guesses: a draft model, the text itself (ngram), or nobody: plain '
    'decoding. If not given: draft with --draft, else none.',
  )
  flags.DEFINE_integer(
    'num_draft_tokens', 4, 'Drafts per step, 1..64.', flag_values=values
  )
  enum(
    'verify',
    'auto',
    ('auto', *chain.RULES),
    'The rule. greedy: temperature 0; rejection, block: same law; coupled: '
    'same tokens as plain sampling with the seed. auto: greedy if every '
    'temperature is 0, else rejection.',
  )
  flags.DEFINE_boolean(
    'exact',
    True,
    'Plain decoding runs at the width of a verification, so that its greedy '
    'and coupled text is bit-equal to any speculative run with the same '
    '--num_draft_tokens and --batch_size, in any dtype.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'ngram_min', 1, 'Shortest suffix to look up.', flag_values=values
  )
  flags.DEFINE_integer(
    'ngram_max', 3, 'Longest suffix to look up.', flag_values=values
  )


def define_prompt_flags(values: flags.FlagValues):
  string, _ = _definers(values)
  string('prompt', None, 'A text to continue.')
  string('prompt_file', None, 'A UTF-8 file that is the prompt.')
  string(
    'prompts_jsonl',
    None,
    'A file with an object per line: prompt, question or turns, and settings '
    'of its own (temperature, top_k, top_p, min_p, penalties, seed, stop, '
    'max_new_tokens).',
  )
  flags.DEFINE_integer(
    'limit', None, 'Use at most so many rows.', flag_values=values
  )
  flags.DEFINE_integer(
    'batch_size', 1, 'Rows decoded together.', flag_values=values
  )
  flags.DEFINE_boolean(
    'chat', False, "Apply the target's chat template.", flag_values=values
  )
  string('system', None, 'System message for --chat.')


def define_sampling_flags(values: flags.FlagValues):
  string, _ = _definers(values)
  number = lambda name, default, text: flags.DEFINE_float(
    name, default, text, flag_values=values
  )
  whole = lambda name, default, text: flags.DEFINE_integer(
    name, default, text, flag_values=values
  )
  whole('max_new_tokens', 128, 'Tokens to generate at most, per turn.')
  whole(
    'max_length',
    None,
    'Buffer per row, prompt included; what is needed if not given.',
  )
  number('temperature', 0.0, '0 is greedy.')
  whole('top_k', 0, 'Keep the k most likely; 0 is off.')
  number('top_p', 1.0, 'Keep the fewest with this mass; 1 is off.')
  number('min_p', 0.0, 'Keep those this likely beside the best; 0 is off.')
  number('repetition_penalty', 1.0, 'For ids in prompt or output; 1 is off.')
  number('presence_penalty', 0.0, 'Once, for ids in the output; 0 is off.')
  number('frequency_penalty', 0.0, 'Per occurrence in the output; 0 is off.')
  string('logit_bias', '', 'Added to logits, as ID:X,ID:X.')
  string('banned_ids', '', 'Ids never emitted, as 1,2,3.')
  string('allowed_ids', None, 'The only ids emitted, as 1,2,3.')
  whole('seed', 0, 'Of the first row; row i adds i. 0..4294967295.')
  flags.DEFINE_multi_string(
    'stop', [], 'A text that ends the output; repeatable.', flag_values=values
  )
  string('stop_ids', '', "Ids that end the output beside the model's own.")
  flags.DEFINE_boolean(
    'ignore_eos', False, "Do not end at the model's own.", flag_values=values
  )


def define_output_flags(values: flags.FlagValues):
  string, _ = _definers(values)
  switch = lambda name, text: flags.DEFINE_boolean(
    name, False, text, flag_values=values
  )
  switch('logprobs', 'Keep the log-probability of every token.')
  switch('stream', 'Print text as it is committed (batch size 1).')
  switch('trace', 'Print a line per step: accepted, rejected, corrected.')
  string('json_out', None, 'Write results to this file.')


FLAG_GROUPS = (
  ('Models', define_model_flags),
  ('Speculation', define_speculation_flags),
  ('Prompts', define_prompt_flags),
  ('Sampling and limits', define_sampling_flags),
  ('Output', define_output_flags),
)


def _definers(values: flags.FlagValues):
  def string(name, default, text):
    flags.DEFINE_string(name, default, text, flag_values=values)

  def enum(name, default, choices, text):
    flags.DEFINE_enum(name, default, list(choices), text, flag_values=values)

  return string, enum


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """One run, checked; a notebook may build it without flags.

  Attributes are the flags of the same names; `options`, `stop_ids` and
  `proposer` are already parsed.
  """

  target: str
  draft: str | None = None
  dtype: str = 'bfloat16'
  draft_dtype: str | None = None
  proposer: str = 'none'
  num_draft_tokens: int = 4
  verify: str = 'auto'
  exact: bool = True
  ngram_min: int = 1
  ngram_max: int = 3
  prompt: str | None = None
  prompt_file: str | None = None
  prompts_jsonl: str | None = None
  limit: int | None = None
  batch_size: int = 1
  chat: bool = False
  system: str | None = None
  max_new_tokens: int = 128
  max_length: int | None = None
  options: SamplingOptions = SamplingOptions()
  seed: int = 0
  stop: tuple[str, ...] = ()
  stop_ids: tuple[int, ...] = ()
  ignore_eos: bool = False
  logprobs: bool = False
  stream: bool = False
  trace: bool = False
  json_out: str | None = None

  def __post_init__(self):
    if not self.target:
      raise ValueError('--target must name a model; --help says how.')
    if self.proposer == 'draft' and not self.draft:
      raise ValueError('--proposer=draft needs --draft.')
    if self.proposer != 'draft' and self.draft:
      raise ValueError(
        f'--draft is not used with --proposer={self.proposer}; drop one.'
      )
    check_num_draft_tokens(self.num_draft_tokens)
    noise.check_seed(self.seed)
    if self.batch_size < 1:
      raise ValueError(f'batch_size must be >= 1, got {self.batch_size}.')
    if not 0 <= self.max_new_tokens < 2**31:
      raise ValueError(
        f'max_new_tokens must be in 0..{2**31 - 1}, got {self.max_new_tokens}.'
      )
    if self.max_length is not None and self.max_length < 1:
      raise ValueError(f'max_length must be >= 1, got {self.max_length}.')
    if self.stream and (self.trace or self.batch_size > 1):
      raise ValueError(
        '--stream needs --batch_size=1 and no --trace, got '
        f'--batch_size={self.batch_size}{" --trace" * self.trace}.'
      )
    if self.system is not None and not self.chat:
      raise ValueError('--system needs --chat.')
    if self.json_out is not None:
      common.check_writable(self.json_out)


def config_from_flags(values: flags.FlagValues) -> RunConfig:
  """The run that the flags ask for."""
  given = {name: values[name].value for name in values}
  names = {field.name for field in dataclasses.fields(RunConfig)}
  taken = {name: value for name, value in given.items() if name in names}
  option_names = {field.name for field in dataclasses.fields(SamplingOptions)}
  options = {n: value for n, value in given.items() if n in option_names}
  options['logit_bias'] = common.parse_logit_bias(values.logit_bias)
  options['banned_ids'] = common.parse_ids(values.banned_ids, '--banned_ids')
  if values.allowed_ids is not None:
    options['allowed_ids'] = common.parse_ids(
      values.allowed_ids, '--allowed_ids'
    )
  taken['options'] = SamplingOptions(**options)
  taken['stop'] = tuple(values.stop)
  taken['stop_ids'] = common.parse_ids(values.stop_ids, '--stop_ids')
  if values.proposer is None:
    taken['proposer'] = 'draft' if values.draft else 'none'
  return RunConfig(**taken)

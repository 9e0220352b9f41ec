"""The flags of a run, and the configuration that they ask for."""

import dataclasses

from absl import flags

from experiments import processes, run_config, token_flags
from experiments.run_config import RunConfig
from specjax.models import quantize, transformer
from specjax.sampling import SamplingOptions
from specjax.verify import chain


def define_model_flags(values: flags.FlagValues):
  string, enum = _definers(values)
  string('target', None, 'The model whose text is produced.')
  string(
    'draft',
    None,
    'A smaller model that guesses; it has the same vocabulary, unless with '
    '--proposer=tli or slem.',
  )
  enum(
    'dtype', 'bfloat16', run_config.DTYPES, 'Of weights, activations and cache.'
  )
  enum(
    'draft_dtype', None, run_config.DTYPES, 'Of the draft, if not as --dtype.'
  )
  enum(
    'quantize',
    'none',
    quantize.SCHEMES,
    'int8: matrices are rounded when they are loaded, a scale per output '
    'channel; activations, a scale per row, in every product.',
  )
  enum(
    'draft_quantize',
    None,
    quantize.SCHEMES,
    'Of the draft, if not as --quantize.',
  )
  enum(
    'cache_dtype',
    None,
    transformer.CACHE_DTYPES,
    'Of the keys and values of target and draft; int8 is rounded with a scale '
    'per token and head. If not given: as --dtype, on a CPU float32.',
  )
  string(
    'cache_dir',
    None,
    'A folder in which models are kept as they are after loading, found again '
    "by their files' content, --dtype and --quantize; it is made if missing. "
    'Not for hf:ORG/NAME.',
  )


def define_device_flags(values: flags.FlagValues):
  string, _ = _definers(values)
  string(
    'mesh',
    'data:1,model:1',
    'Devices: rows of the batch are split over data; heads, feed-forward width '
    'and vocabulary over model. In float32 the text does not depend on it; in '
    'narrower types other sums round otherwise, and every mesh has its own.',
  )
  string(
    'draft_mesh',
    None,
    'The same devices as the draft sees them, as model:2; over those it does '
    'not name it is copied. If not given: as --mesh.',
  )
  flags.DEFINE_boolean(
    'fully_sharded',
    False,
    'Parameters are split over data as well, and gathered where they are used.',
    flag_values=values,
  )


def define_speculation_flags(values: flags.FlagValues):
  string, enum = _definers(values)
  enum(
    'proposer',
    None,
    run_config.PROPOSERS,
    'Who guesses: the draft model, a draft model with another vocabulary '
    '(tli: it draws from the ids that both have; slem: its text is cut into '
    "the target's ids, on the host), the text so far (ngram), the first layers "
    'of the target (early_exit), a head that reads its hiddens (medusa, mtp, '
    'eagle, EAGLE-3 included), or nobody, which is plain decoding. If not '
    'given: draft with --draft, else none.',
  )
  string(
    'head',
    None,
    'A folder with config.json and safetensors of a head, as its authors '
    'publish it or train.py writes it, with --proposer=medusa, mtp or eagle; '
    'demo:medusa and demo:mtp come along.',
  )
  flags.DEFINE_integer(
    'num_draft_tokens', 4, 'Drafts per step, 1..64.', flag_values=values
  )
  string(
    'stop_rule',
    'fixed',
    'When a row drafts less: fixed (never), confidence:X (behind a draft of '
    'which no id had the probability X), acceptance (by how many were accepted '
    'of late), or cost (so that tokens per second are most, by step costs that '
    'are measured first).',
  )
  enum(
    'verify',
    'auto',
    ('auto', *chain.RULES),
    'How drafts are decided on; none changes the law of the text. greedy: for '
    'temperature 0; rejection, block: accept as much as the laws allow; '
    'coupled: the very tokens of plain decoding with the same seed. auto: '
    'greedy if every temperature is 0, else rejection.',
  )
  flags.DEFINE_boolean(
    'exact',
    True,
    'Greedy and coupled text is bit-equal to that of plain decoding with the '
    'same --num_draft_tokens and --batch_size, in any dtype: plain decoding '
    'runs at the width of a verification, unless the model has the same bits '
    'at every width (on one CPU in int8, or in bfloat16 with the kernels). '
    '--noexact: a step is never wider than its drafts need.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'ngram_min',
    1,
    'Shortest ending of the text to look up.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'ngram_max', 3, 'Longest ending of the text to look up.', flag_values=values
  )
  flags.DEFINE_integer(
    'exit_layer',
    None,
    "How many of the target's layers draft, with --proposer=early_exit.",
    flag_values=values,
  )


def define_prompt_flags(values: flags.FlagValues):
  string, _ = _definers(values)
  string(
    'prompt',
    None,
    'A text to continue. It may be empty where the tokenizer begins every text '
    'with a token of its own.',
  )
  string('prompt_file', None, 'A UTF-8 file; all of it is the prompt.')
  string(
    'prompts_jsonl',
    None,
    'A file with a JSON object per line: prompt, question or turns, and '
    'settings of its own (temperature, top_k, top_p, min_p, '
    'repetition_penalty, presence_penalty, frequency_penalty, seed, stop, '
    'max_new_tokens).',
  )
  flags.DEFINE_integer(
    'limit', None, 'Use the first N rows of the file.', flag_values=values
  )
  flags.DEFINE_integer(
    'batch_size', 1, 'Rows decoded together.', flag_values=values
  )
  flags.DEFINE_boolean(
    'chat',
    False,
    "Put prompts into the target's chat template; otherwise they are fed as "
    'they are.',
    flag_values=values,
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
    'Tokens per row at most, prompt included. If not given: what the rows '
    "need, up to the target's context.",
  )
  number('temperature', 0.0, '0 is greedy.')
  whole('top_k', 0, 'Keep the k most likely ids; 0 keeps all.')
  number('top_p', 1.0, 'Keep the fewest ids with this probability; 1: all.')
  number(
    'min_p',
    0.0,
    'Keep ids at least this fraction as likely as the likeliest; 0 keeps all.',
  )
  number(
    'repetition_penalty',
    1.0,
    'Divides positive and multiplies negative logits of ids in prompt or '
    'output; 1 is off.',
  )
  number(
    'presence_penalty',
    0.0,
    'Subtracted once from logits of ids in the output; 0 is off.',
  )
  number(
    'frequency_penalty',
    0.0,
    'Subtracted per occurrence in the output; 0 is off.',
  )
  string('logit_bias', '', 'Added to logits, as ID:X,ID:X.')
  string('banned_ids', '', 'Ids never emitted, as 1,2,3.')
  string('allowed_ids', None, 'The only ids emitted, as 1,2,3.')
  whole(
    'seed', 0, 'Of the first row; row i has the seed plus i. 0..4294967295.'
  )
  flags.DEFINE_multi_string(
    'stop',
    [],
    'A text before which the output ends; may be given more than once.',
    flag_values=values,
  )
  string(
    'stop_ids', '', "Ids that end the output beside the model's own, as 1,2,3."
  )
  flags.DEFINE_boolean(
    'ignore_eos',
    False,
    "Do not end at the model's own stop ids.",
    flag_values=values,
  )


def define_output_flags(values: flags.FlagValues):
  string, _ = _definers(values)
  switch = lambda name, text: flags.DEFINE_boolean(
    name, False, text, flag_values=values
  )
  switch('logprobs', 'Record the log-probability of every token, in nats.')
  switch('stream', 'Print text as it is committed (batch size 1).')
  switch(
    'trace',
    'Print a line per step: accepted, rejected, correction or bonus; in colour '
    'on a terminal.',
  )
  string('json_out', None, 'Write configuration and results to this file.')
  string(
    'record',
    None,
    'Write every step, and the laws of target and draft at every token, to '
    'this file (.npz) for experiments/replay.py. The loop returns to the host '
    'after every step.',
  )
  flags.DEFINE_integer(
    'record_top',
    256,
    'Ids per recorded law, the others as one tail; 0 records all ids.',
    flag_values=values,
  )


FLAG_GROUPS = (
  ('Models', define_model_flags),
  ('Devices', define_device_flags),
  ('Speculation', define_speculation_flags),
  ('Prompts', define_prompt_flags),
  ('Sampling and limits', define_sampling_flags),
  ('Output', define_output_flags),
  ('Several processes', processes.define_flags),
)


def _definers(values: flags.FlagValues):
  def string(name, default, text):
    flags.DEFINE_string(name, default, text, flag_values=values)

  def enum(name, default, choices, text):
    flags.DEFINE_enum(name, default, list(choices), text, flag_values=values)

  return string, enum


def config_from_flags(values: flags.FlagValues) -> RunConfig:
  """The run that the flags ask for."""
  given = {name: values[name].value for name in values}
  names = {field.name for field in dataclasses.fields(RunConfig)}
  taken = {name: value for name, value in given.items() if name in names}
  option_names = {field.name for field in dataclasses.fields(SamplingOptions)}
  options = {n: value for n, value in given.items() if n in option_names}
  options['logit_bias'] = token_flags.parse_logit_bias(values.logit_bias)
  options['banned_ids'] = token_flags.parse_ids(
    values.banned_ids, '--banned_ids'
  )
  if values.allowed_ids is not None:
    options['allowed_ids'] = token_flags.parse_ids(
      values.allowed_ids, '--allowed_ids'
    )
  taken['options'] = SamplingOptions(**options)
  taken['stop'] = tuple(values.stop)
  taken['stop_ids'] = token_flags.parse_ids(values.stop_ids, '--stop_ids')
  if values.proposer is None:
    taken['proposer'] = 'draft' if values.draft else 'none'
  return RunConfig(**taken)

"""Bad input ends with one sentence and exit code 2, and writes nothing."""

import contextlib
import io
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import generate, script
from experiments.run_flags import FLAG_GROUPS
from specjax.models import load
from tests.experiments import tiny_files

DEMO = ('--target=demo:target', '--prompt=a')
PAIR = (*DEMO, '--draft=demo:draft')
EMBED, UP = 'model.embed_tokens.weight', 'model.layers.0.mlp.up_proj.weight'
# What is shown while a machine is slow is no error.
PROGRESS = re.compile(
  r'^(loading|compiling|decoding).* \.\.\. \d+\.\d s\n', re.M
)


class Case(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def refused(self, argv, *fragments):
    """Runs and checks everything that holds for any bad input."""
    json_out = self.folder / 'never-written.json'
    before = sorted(self.folder.rglob('*'))
    argv = [*map(str, argv)]
    if not any(arg.startswith('--json_out') for arg in argv):
      argv.insert(0, f'--json_out={json_out}')
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      code = script.run_main(generate.main, FLAG_GROUPS, argv)
    message = PROGRESS.sub('', err.getvalue())
    self.assertEqual((code, out.getvalue()), (2, ''), message)
    self.assertRegex(message, r'^generate\.py: [^\n]+[.?]\n$')
    for fragment in fragments:
      self.assertIn(fragment, message)
    self.assertEqual(sorted(self.folder.rglob('*')), before)


class BadInputTest(Case):
  @parameterized.named_parameters(
    ('unknown', ('--temprature=1',), '--temprature', '--temperature?'),
    ('stray', ('tell me',), "'tell me'", '--name=value'),
    ('seed_text', ('--seed=abc',), '--seed must be an integer', "'abc'"),
    ('seed_half', ('--seed=1.5',), '--seed must be an integer', "'1.5'"),
    ('seed_negative', ('--seed=-1',), '0..4294967295', '-1'),
    ('seed_large', ('--seed=4294967296',), '0..4294967295', '4294967296'),
    ('drafts_0', ('--num_draft_tokens=0',), '1..64', 'got 0'),
    ('drafts_1000', ('--num_draft_tokens=1000',), '1..64', 'got 1000'),
    ('temperature', ('--temperature=-0.5',), 'in [0, 1e6]', '-0.5'),
    ('temperature_nan', ('--temperature=nan',), 'in [0, 1e6]', 'nan'),
    ('temperature_inf', ('--temperature=inf',), 'in [0, 1e6]', 'inf'),
    ('temperature_text', ('--temperature=hot',), 'a number', "'hot'"),
    ('top_p_0', ('--top_p=0',), 'top_p must be in (0, 1]', 'got 0'),
    ('top_p_large', ('--top_p=1.5',), 'top_p must be in (0, 1]', '1.5'),
    ('top_p_nan', ('--top_p=nan',), 'top_p must be in (0, 1]', 'nan'),
    ('min_p', ('--min_p=-1',), 'min_p must be in [0, 1]', '-1'),
    ('top_k', ('--top_k=-3',), 'top_k must be a whole number in 0..', '-3'),
    ('top_k_large', ('--top_k=99999999999',), 'top_k', '99999999999'),
    ('repetition', ('--repetition_penalty=0',), 'in [1e-6, 1e6]', 'got 0'),
    ('presence', ('--presence_penalty=inf',), 'in [-1e6, 1e6]', 'inf'),
    ('frequency', ('--frequency_penalty=nan',), 'in [-1e6, 1e6]', 'nan'),
    ('allowed_none', ('--allowed_ids=',), 'allowed_ids must leave', '[]'),
    (
      'allowed_banned',
      ('--allowed_ids=5,6', '--banned_ids=6,5'),
      'allowed_ids must leave',
      '[5, 6]',
    ),
    ('ids_text', ('--banned_ids=1,x',), '--banned_ids', "'1,x'", '1,2,3'),
    ('bias_text', ('--logit_bias=5',), '--logit_bias', 'ID:X', "'5'"),
    ('bias_inf', ('--logit_bias=5:inf',), '--logit_bias', "'5:inf'"),
    ('verify', ('--verify=fast',), 'greedy, rejection, coupled', "'fast'"),
    ('proposer', ('--proposer=oracle',), 'none, draft, ngram', "'oracle'"),
    (
      'exit_layer_missing',
      ('--proposer=early_exit',),
      '--proposer=early_exit needs --exit_layer',
    ),
    (
      'exit_layer_unused',
      ('--proposer=ngram', '--exit_layer=2'),
      '--exit_layer',
      '--proposer=ngram',
    ),
    (
      'exit_layer_text',
      ('--proposer=early_exit', '--exit_layer=deep'),
      '--exit_layer must be an integer',
      "'deep'",
    ),
    (
      'stop_rule',
      ('--proposer=ngram', '--stop_rule=entropy'),
      '--stop_rule must be fixed, confidence:X, acceptance or cost',
      "'entropy'",
    ),
    (
      'stop_rule_number',
      ('--proposer=ngram', '--stop_rule=confidence:high'),
      '--stop_rule=confidence:X needs an X above 0 and at most 1',
      "'high'",
    ),
    (
      'stop_rule_of_ngram',
      ('--proposer=ngram', '--stop_rule=confidence:0.4'),
      '--stop_rule=confidence:0.4 needs logits of a draft',
      '--proposer=ngram',
    ),
    (
      'stop_rule_unused',
      ('--stop_rule=acceptance',),
      '--stop_rule is not used with --proposer=none',
    ),
    ('dtype', ('--dtype=float16',), 'float32, bfloat16', "'float16'"),
    ('draft', ('--proposer=draft',), '--proposer=draft needs --draft'),
    ('draft_dtype', ('--draft_dtype=float32',), '--draft_dtype needs --draft'),
    ('quantize', ('--quantize=int4',), 'none, int8', "'int4'"),
    (
      'draft_quantize',
      ('--draft_quantize=int8',),
      '--draft_quantize needs --draft',
    ),
    ('limit', ('--limit=0',), 'limit must be >= 1', 'got 0'),
    ('limit_of_one', ('--limit=7',), '--limit=7 needs --prompts_jsonl'),
    ('batch', ('--batch_size=0',), 'batch_size must be >= 1', 'got 0'),
    ('new_tokens', ('--max_new_tokens=-1',), '0..2147483647', '-1'),
    ('max_length', ('--max_length=0',), 'max_length must be >= 1', 'got 0'),
    ('stop', ('--stop=',), 'stop must not hold an empty text', "''"),
    ('stream', ('--stream', '--batch_size=2'), '--batch_size=1', '=2'),
    ('stream_trace', ('--stream', '--trace'), '--stream', '--trace'),
    ('system', ('--system=Be brief.',), '--system needs --chat'),
    ('no_value', ('--stop',), '--stop'),
    ('switch', ('--stream=maybe',), 'true or false', "'maybe'"),
    ('bytes', ('--stop=\udcff',), 'argument 4', 'UTF-8'),
    (
      'ngram',
      ('--proposer=ngram', '--ngram_min=3', '--ngram_max=2'),
      '1 <= min <= max <= 64',
      'got 3 and 2',
    ),
  )
  def test_a_flag(self, flags, *fragments):
    with mock.patch.object(load, 'load') as loads:
      self.refused((*DEMO, *flags), *fragments)
    # Nobody waits for a model to be told of a slip.
    loads.assert_not_called()

  @parameterized.named_parameters(
    ('banned', ('--banned_ids=257',), '0..256', 'banned_ids', '257'),
    ('allowed', ('--allowed_ids=1000',), '0..256', 'allowed_ids', '1000'),
    ('bias', ('--logit_bias=300:1',), '0..256', 'logit_bias', '300'),
    ('stop', ('--stop_ids=10,2000',), '0..256', '--stop_ids', '2000'),
    (
      'all_banned',
      (f'--banned_ids={",".join(map(str, range(257)))}',),
      'banned_ids must leave at least one',
      '257',
    ),
  )
  def test_an_id_of_no_vocabulary(self, flags, *fragments):
    self.refused((*PAIR, *flags), *fragments)

  @parameterized.named_parameters(
    (
      'greedy',
      ('--verify=greedy', '--temperature=0.7'),
      'temperature 0',
      '0.7',
    ),
    ('context', ('--max_length=9999',), '512', 'context', '9999'),
    ('chat', ('--chat',), 'no chat template'),
    ('demo', ('--target=demo:teacher',), "'demo:teacher'", 'demo:target'),
    ('missing', ('--target=/no/such/model.gguf',), '/no/such', '.gguf'),
    ('no_target', ('--target=',), '--target must name a model'),
    (
      'proposer',
      ('--draft=demo:draft', '--proposer=ngram'),
      '--draft is not used',
      'ngram',
    ),
    ('same', ('--draft=/no/such/draft',), "'/no/such/draft'", 'allowed'),
  )
  def test_what_does_not_fit(self, flags, *fragments):
    self.refused((*DEMO, *flags), *fragments)

  @parameterized.named_parameters(
    ('none', (), '--prompt, --prompt_file, --prompts_jsonl', 'none'),
    ('two', ('--prompt=a', '--prompt_file=b'), '--prompt and --prompt_file'),
    ('no_file', ('--prompt_file=/no/such.txt',), '/no/such.txt'),
    ('no_rows', ('--prompts_jsonl=/no/such.jsonl',), '/no/such.jsonl'),
    ('folder', ('--prompt_file=/',), "'/'", 'directory'),
  )
  def test_a_source_of_prompts(self, flags, *fragments):
    self.refused(('--target=demo:target', *flags), *fragments)

  def test_a_prompt_that_is_too_long(self):
    target = '--target=demo:target'
    long = '--prompt=' + 'a' * 100
    self.refused((target, long, '--max_length=50'), 'at most 50', '101')
    self.refused((target, '--prompt=' + 'a' * 5000), 'at most 512', '5001')

  def test_a_prompt_that_is_not_utf8(self):
    path = self.folder / 'prompt.txt'
    path.write_bytes(b'abc\xff')
    argv = ('--target=demo:target', f'--prompt_file={path}')
    self.refused(argv, 'prompt.txt', 'UTF-8', '0xff at 3')
    self.refused(
      ('--target=demo:target', '--prompt=\udcfe'), 'argument 3', 'UTF-8'
    )

  @parameterized.named_parameters(
    ('broken', '{"prompt": "a"', 'not JSON'),
    ('list', '["a"]', 'must be a JSON object', 'list'),
    ('no_prompt', '{"text": "a"}', 'prompt, question, turns', 'none'),
    ('two_prompts', '{"prompt": "a", "turns": ["b"]}', "'turns'"),
    ('number', '{"prompt": 5}', 'prompt must be valid text', '5'),
    ('null', '{"prompt": null}', 'prompt must be valid text', 'None'),
    ('no_turns', '{"turns": []}', 'turns must be valid text', '[]'),
    ('turn', '{"turns": ["a", 1]}', 'turns must be valid text'),
    ('surrogate', '{"prompt": "\\ud800"}', 'valid text', "'\\ud800'"),
    ('seed_text', '{"prompt": "a", "seed": "1"}', '0..4294967295', "'1'"),
    ('seed_true', '{"prompt": "a", "seed": true}', '0..4294967295', 'True'),
    ('seed_huge', '{"prompt": "a", "seed": 1e999}', '0..4294967295', 'inf'),
    ('seed_nan', '{"prompt": "a", "seed": NaN}', '0..4294967295', 'nan'),
    ('seed_half', '{"prompt": "a", "seed": 0.5}', '0..4294967295', '0.5'),
    (
      'temperature',
      '{"prompt": "a", "temperature": "0.5"}',
      'temperature must be in [0, 1e6]',
      "'0.5'",
    ),
    (
      'temperature_huge',
      '{"prompt": "a", "temperature": 1%s}' % ('0' * 400),
      'temperature must be in [0, 1e6]',
    ),
    ('digits', '{"prompt": "a", "seed": %s}' % ('1' * 5000), 'line 2'),
    ('nested', '[' * 100_000, 'not JSON'),
    ('top_k', '{"prompt": "a", "top_k": 1.5}', 'top_k', '1.5'),
    ('top_p', '{"prompt": "a", "top_p": [1]}', 'top_p', '[1]'),
    ('stop', '{"prompt": "a", "stop": 5}', 'stop must be', '5'),
    ('stop_empty', '{"prompt": "a", "stop": ["b", ""]}', 'none empty'),
    ('stop_map', '{"prompt": "a", "stop": {"b": 1}}', 'stop must be'),
    (
      'new_tokens',
      '{"prompt": "a", "max_new_tokens": -1}',
      '0..2147483647',
      '-1',
    ),
    (
      'new_tokens_half',
      '{"prompt": "a", "max_new_tokens": 1.5}',
      'max_new_tokens',
      '1.5',
    ),
  )
  def test_a_row(self, line, *fragments):
    path = self.folder / 'rows.jsonl'
    path.write_text('{"prompt": "fine"}\n' + line + '\n')
    self.refused(
      ('--target=demo:target', f'--prompts_jsonl={path}'),
      "line 2 of '",
      *fragments,
    )

  def test_a_file_without_rows_and_one_that_is_not_utf8(self):
    path = self.folder / 'rows.jsonl'
    argv = ('--target=demo:target', f'--prompts_jsonl={path}')
    path.write_text('\n \n')
    self.refused(argv, 'rows.jsonl', 'no rows')
    path.write_bytes(b'{"prompt": "\xc3"}')
    self.refused(argv, 'rows.jsonl', 'UTF-8', '0xc3')

  def test_a_seed_that_runs_out(self):
    path = self.folder / 'rows.jsonl'
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    self.refused(
      (
        '--target=demo:target',
        f'--prompts_jsonl={path}',
        f'--seed={2**32 - 1}',
      ),
      'line 2',
      '4294967296',
    )

  @parameterized.named_parameters(
    ('no_folder', 'no/such/out.json', 'not an existing folder'),
    ('folder', 'a_folder', 'it is a folder'),
    ('empty', '', 'the path is empty'),
  )
  def test_a_result_that_cannot_be_written(self, name, *fragments):
    (self.folder / 'a_folder').mkdir()
    path = str(self.folder / name) if name else ''
    with mock.patch.object(load, 'load') as loads:
      self.refused((*DEMO, f'--json_out={path}'), 'cannot write', *fragments)
    loads.assert_not_called()

  @parameterized.named_parameters(
    ('no_folder', 'no/such/cache', 'not an existing folder'),
    ('file', 'a_file', 'it is not a folder'),
    ('empty', '', 'the path is empty'),
  )
  def test_a_cache_that_cannot_be_used(self, name, *fragments):
    (self.folder / 'a_file').write_text('')
    path = str(self.folder / name) if name else ''
    with mock.patch.object(load, 'load') as loads:
      self.refused((*DEMO, f'--cache_dir={path}'), '--cache_dir', *fragments)
    loads.assert_not_called()

  def test_a_result_that_is_read_only(self):
    path = self.folder / 'out.json'
    path.write_text('old')
    # Root may write anything, so the answer of the system is set.
    with mock.patch.object(os, 'access', lambda path, mode: False):
      self.refused((*DEMO, f'--json_out={path}'), 'cannot write', 'read-only')
    self.assertEqual(path.read_text(), 'old')

  @parameterized.parameters(
    ('--seed=-1',), ('--target=/no/such',), ('--max_length=1',)
  )
  def test_an_old_result_is_left_alone(self, flag):
    path = self.folder / 'out.json'
    path.write_text('old')
    self.refused((*DEMO, flag, f'--json_out={path}'))
    self.assertEqual(path.read_text(), 'old')

  def test_as_a_process(self):
    script = pathlib.Path(generate.__file__)
    environment = {**os.environ, 'PYTHONPATH': str(script.parents[1])}
    ran = subprocess.run(
      [sys.executable, script, *DEMO, b'--stop=\xff'],
      capture_output=True,
      env=environment,
      timeout=120,
    )
    self.assertEqual(
      (ran.returncode, ran.stdout, ran.stderr),
      (2, b'', b'generate.py: argument 3 is not valid UTF-8.\n'),
    )


class BadFolderTest(Case):
  def folder_refused(self, folder, *fragments, more=()):
    self.refused((f'--target={folder}', '--prompt=a', *more), *fragments)

  def test_the_whole_folder_is_fine(self):
    loaded = load.load(
      str(tiny_files.write_folder(self.folder / 'model')), 'float32'
    )
    self.assertEqual(loaded.model.vocab_size, len(tiny_files.TOKENS))
    self.assertEqual(loaded.stop_ids, (len(tiny_files.TOKENS) - 1,))

  @parameterized.parameters(
    ('config.json', 'config.json'),
    ('tokenizer.json', 'tokenizer.json'),
    ('model.safetensors', '.safetensors files'),
  )
  def test_a_file_is_missing(self, name, *fragments):
    folder = tiny_files.write_folder(self.folder / 'model')
    (folder / name).unlink()
    self.folder_refused(folder, 'model', *fragments)

  def test_a_folder_is_empty(self):
    self.folder_refused(self.folder, 'tokenizer.json')

  @parameterized.parameters(
    'config.json', 'tokenizer.json', 'tokenizer_config.json'
  )
  def test_a_file_is_broken(self, name):
    folder = tiny_files.write_folder(self.folder / 'model')
    for data in (b'', b'{"a": ', b'[1]', b'\xff\xfe', b'[' * 100_000):
      (folder / name).write_bytes(data)
      self.folder_refused(folder, name)

  def test_a_tokenizer_is_another_kind(self):
    folder = tiny_files.write_folder(self.folder / 'model')
    parsed = json.loads(tiny_files.tokenizer_json())
    (folder / 'tokenizer.json').write_text(json.dumps({'model': {}}))
    self.folder_refused(folder, 'tokenizer.json', 'not a tokenizer')
    parsed['model'] = {
      'type': 'WordLevel',
      'vocab': {'a': 0},
      'unk_token': 'a',
    }
    (folder / 'tokenizer.json').write_text(json.dumps(parsed))
    self.folder_refused(folder, "'WordLevel'", 'BPE')

  @parameterized.parameters(
    ({'model_type': 'bloom'}, "'bloom'", 'llama, mistral, qwen2'),
    ({'hidden_act': 'relu'}, "'relu'", 'silu'),
    ({'rope_scaling': {'rope_type': 'dynamic'}}, "'dynamic'", 'llama3'),
    ({'rope_scaling': 5}, '5', 'rope_scaling'),
    (
      {'model_type': 'mistral', 'sliding_window': None, 'rope_theta': None},
      'rope_theta is missing',
    ),
    ({'model_type': 'mistral', 'sliding_window': 2**40}, str(2**40)),
    ({'rope_theta': 'big'}, "'big'", 'rope_theta'),
    ({'hidden_size': 0}, 'hidden_size', 'got 0'),
    ({'hidden_size': 2**30}, 'shape', str(2**30)),
    ({'hidden_size': 2**40}, 'hidden_size', str(2**40)),
    ({'num_hidden_layers': 2**30}, 'num_hidden_layers', str(2**30)),
    ({'num_hidden_layers': 2}, 'missing: model.layers.1'),
    ({'num_attention_heads': 3}, 'q_proj.weight', '(24, 16)', '(16, 16)'),
    ({'num_key_value_heads': '1'}, 'num_key_value_heads', "'1'"),
    ({'vocab_size': 1000}, 'model.embed_tokens.weight', '1000'),
    ({'max_position_embeddings': -1}, 'max_position_embeddings', '-1'),
    ({'quantization_config': {'bits': 4}}, 'quantization_config'),
    ({'eos_token_id': 'x'}, 'eos_token_id', "'x'"),
    ({'rms_norm_eps': float('nan')}, 'rms_norm_eps', 'nan'),
    ({'rms_norm_eps': float('inf')}, 'rms_norm_eps', 'inf'),
    ({'architectures': 7, 'model_type': None}, 'model_type'),
  )
  def test_a_config(self, changes, *fragments):
    folder = tiny_files.write_folder(self.folder / 'model', **changes)
    self.folder_refused(folder, *fragments)

  @parameterized.parameters(np.nan, np.inf)
  def test_a_weight_is_not_finite(self, value):
    weights = tiny_files.tensors(tiny_files.CONFIG)
    weights[UP] = weights[UP].copy()
    weights[UP][3, 5] = value
    folder = tiny_files.write_folder(self.folder / 'model', weights=weights)
    self.folder_refused(folder, UP, 'must be finite')

  def test_tensors_are_missing_or_too_many(self):
    weights = tiny_files.tensors(tiny_files.CONFIG)
    renamed = {name.replace('up_proj', 'up'): w for name, w in weights.items()}
    folder = tiny_files.write_folder(self.folder / 'model', weights=renamed)
    self.folder_refused(
      folder, f'missing: {UP}', 'unexpected: model.layers.0.mlp.up.weight'
    )

  def test_a_shard_is_missing(self):
    folder = tiny_files.write_folder(self.folder / 'model')
    (folder / 'model.safetensors').rename(
      folder / 'model-00001-of-00002.safetensors'
    )
    self.folder_refused(folder, 'model-00002-of-00002.safetensors')
    index = {'weight_map': {EMBED: 'model-00003-of-00003.safetensors'}}
    path = folder / 'model.safetensors.index.json'
    path.write_text(json.dumps(index))
    self.folder_refused(folder, 'model-00003-of-00003.safetensors')
    path.write_text(json.dumps({'weight_map': {EMBED: '../../etc/passwd'}}))
    self.folder_refused(folder, '../../etc/passwd')

  def test_safetensors_are_truncated_or_absurd(self):
    folder = tiny_files.write_folder(self.folder / 'model')
    path = folder / 'model.safetensors'
    data = path.read_bytes()
    for size in (0, 4, 8, 100, len(data) // 2, len(data) - 1):
      path.write_bytes(data[:size])
      self.folder_refused(folder, 'model.safetensors', 'not a whole')
    path.write_bytes(struct.pack('<Q', 2**62) + data[8:])
    self.folder_refused(folder, 'model.safetensors', 'not a whole')

  def test_vocabularies_differ(self):
    folder = tiny_files.write_folder(self.folder / 'target')
    tokens = [*tiny_files.TOKENS]
    tokens[5] = 'other'
    draft = tiny_files.write_folder(self.folder / 'draft', tokens=tokens)
    self.folder_refused(
      folder,
      'the same vocabulary',
      'id 5',
      "'other'",
      more=(f'--draft={draft}',),
    )
    self.folder_refused(folder, 'id 0', more=('--draft=demo:draft',))

  def test_embeddings_of_one_vocabulary_differ(self):
    folder = tiny_files.write_folder(self.folder / 'target')
    weights = {
      name: w[:-8] if w.shape[0] == len(tiny_files.TOKENS) else w
      for name, w in tiny_files.tensors(tiny_files.CONFIG).items()
    }
    draft = tiny_files.write_folder(
      self.folder / 'draft',
      weights=weights,
      vocab_size=len(tiny_files.TOKENS) - 8,
    )
    self.folder_refused(
      folder, 'embeddings', '258 and 250', more=(f'--draft={draft}',)
    )
    # Nor is an id fed that has no embedding.
    self.refused(
      (f'--target={draft}', f'--prompt={tiny_files.END}'), '0..249', '257'
    )

  def test_the_prompt_is_empty_or_past_the_context(self):
    folder = tiny_files.write_folder(self.folder / 'model')
    self.refused((f'--target={folder}', '--prompt='), 'at least one token')
    self.refused(
      (f'--target={folder}', '--prompt=' + 'b' * 65), 'at most 64', 'got 65'
    )
    self.folder_refused(folder, '64', '65', more=('--max_length=65',))

  def test_int8_weights_do_not_become_float(self):
    folder = tiny_files.write_folder(self.folder / 'model')
    converted = self.folder / 'int8'
    load.save(converted, load.load(str(folder), 'bfloat16', 'int8'))
    self.folder_refused(converted, 'int8', 'quantize must be int8', 'got none')
    self.folder_refused(
      folder,
      'quantize must be int8',
      more=(f'--draft={converted}',),
    )

  def test_a_chat_template(self):
    folder = tiny_files.write_folder(self.folder / 'model')
    self.folder_refused(folder, 'no chat template', more=('--chat',))
    path = folder / 'chat_template.jinja'
    for template, fragment in (
      ('{% for', 'chat template failed'),
      ("{{ raise_exception('roles must alternate') }}", 'roles must alternate'),
      ("{{ ''.__class__.__mro__ }}", 'chat template failed'),
    ):
      path.write_text(template)
      self.folder_refused(folder, fragment, more=('--chat',))

  def test_the_hub_cannot_be_reached(self):
    with mock.patch.dict(os.environ, HF_HUB_OFFLINE='1', HF_HOME=str('/none')):
      from huggingface_hub import constants

      with mock.patch.object(constants, 'HF_HUB_OFFLINE', True):
        self.folder_refused('hf:not/there', "'hf:not/there'")
        self.folder_refused('hf:a/b/c/d', "'hf:a/b/c/d'")
        self.folder_refused('hf:', "'hf:'")

  def test_a_package_is_missing(self):
    folder = tiny_files.write_folder(self.folder / 'model')
    with mock.patch.dict(sys.modules, {'tokenizers': None}):
      self.folder_refused(folder, 'tokenizers', "'specjax[models]'")


class BadGgufTest(Case):
  def gguf_refused(self, data, *fragments):
    path = self.folder / 'model.gguf'
    path.write_bytes(data)
    self.refused((f'--target={path}', '--prompt=a'), *fragments)

  def good(self, **changes):
    path = tiny_files.write_gguf(self.folder / 'good.gguf', **changes)
    data = path.read_bytes()
    path.unlink()
    return data

  def test_the_whole_file_is_fine(self):
    path = tiny_files.write_gguf(self.folder / 'model.gguf')
    loaded = load.load(str(path), 'float32')
    self.assertEqual(loaded.model.vocab_size, len(tiny_files.TOKENS))

  def test_a_file_is_truncated(self):
    data = self.good()
    for size in (0, 3, 4, 7, 12, 23, 24, 40, 1000, len(data) // 2, -1):
      self.gguf_refused(data[:size], 'model.gguf')

  def test_a_file_is_no_gguf(self):
    self.gguf_refused(b'PK\x03\x04' + b'\0' * 100, 'not a GGUF file')
    data = self.good()
    self.gguf_refused(data[:4] + struct.pack('<I', 9) + data[8:], 'version 9')

  def test_a_header_is_absurd(self):
    data = self.good()
    count = lambda n: struct.pack('<Q', n)
    self.gguf_refused(
      data[:8] + count(2**60) + data[16:], 'number of tensors', str(2**60)
    )
    self.gguf_refused(
      data[:16] + count(2**60) + data[24:], 'metadata entries', str(2**60)
    )
    self.gguf_refused(
      data[:24] + count(2**62) + data[32:], 'length of', str(2**62)
    )
    # The first axis of the embedding.
    axis = data.index(b'token_embd.weight') + len(b'token_embd.weight') + 4
    self.gguf_refused(
      data[:axis] + count(2**61) + data[axis + 8 :], 'token_embd', 'ends at'
    )

  def test_a_tensor_type_is_unknown(self):
    data = self.good()
    kind = data.index(b'token_embd.weight') + len(b'token_embd.weight') + 20
    for number, name in ((10, 'Q2_K'), (999, 'number 999')):
      self.gguf_refused(
        data[:kind] + struct.pack('<I', number) + data[kind + 4 :],
        'token_embd.weight',
        name,
        'Q4_K',
      )

  def test_a_tensor_is_unknown(self):
    data = self.good().replace(b'blk.0.ffn_up.weight', b'blk.0.ffn_xy.weight')
    self.gguf_refused(data, 'blk.0.ffn_xy.weight', 'llama')

  @parameterized.parameters(
    ({'architecture': 'mamba'}, "'mamba'", 'llama, qwen2, qwen3, gemma3'),
    ({'rope_scaling': 'longrope'}, "'longrope'", 'none, linear, yarn'),
    ({'pre': 'gpt-99'}, "'gpt-99'", 'qwen2'),
    (
      {'tokens': [*tiny_files.BYTES, tiny_files.END]},
      'tokenizer.ggml.merges do not fit',
    ),
    ({'pre': 'qwen2', 'tokens': ['a']}, 'tokenizer.ggml.'),
  )
  def test_what_the_file_says(self, changes, *fragments):
    self.gguf_refused(self.good(**changes), *fragments)

  def test_a_weight_is_not_finite(self):
    weights = tiny_files.tensors(tiny_files.CONFIG)
    weights[UP] = weights[UP].copy()
    weights[UP][0, 0] = np.nan
    self.gguf_refused(self.good(weights=weights), 'ffn_up')


if __name__ == '__main__':
  absltest.main()

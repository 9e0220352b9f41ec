"""Converted models load as themselves, tokenizer included."""

import contextlib
import io
import json
import pathlib
import re
import tempfile
from unittest import mock

import jax
import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import convert, generate, script
from experiments.run_flags import FLAG_GROUPS
from specjax import tokenizer_files, tokenizers
from specjax.models import load
from specjax.models.checkpoints import orbax
from tests.experiments import tiny_files

TEXT = 'def f(a, b):\n  return "é 漢 🙂"  # a  ' + tiny_files.END
TEMPLATE = '{% for m in messages %}{{ m.content }}{% endfor %}'


def run(of, groups, *argv):
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    code = script.run_main(of.main, groups, [*map(str, argv)])
  # What is shown while a machine is slow is no error.
  shown = r'^(loading|writing|compiling|decoding).* \.\.\. \d+\.\d s\n'
  return code, out.getvalue(), re.sub(shown, '', err.getvalue(), flags=re.M)


class ConvertTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.out = self.folder / 'new' / 'model.orbax'

  def convert(self, model, *flags):
    return run(
      convert,
      convert.FLAG_GROUPS,
      f'--model={model}',
      f'--out={self.out}',
      *flags,
    )

  def hugging_face(self):
    model = tiny_files.write_folder(self.folder / 'model')
    (model / 'chat_template.jinja').write_text(TEMPLATE)
    settings = {
      'eos_token': tiny_files.END,
      'bos_token': {'content': tiny_files.END},
      'add_bos_token': True,
    }
    (model / 'tokenizer_config.json').write_text(json.dumps(settings))
    (model / 'generation_config.json').write_text('{"eos_token_id": [257, 3]}')
    return model

  def gguf(self):
    return tiny_files.write_gguf(self.folder / 'model.gguf')

  @parameterized.product(
    kind=('hugging_face', 'gguf'), dtype=('float32', 'bfloat16')
  )
  def test_round_trip(self, kind, dtype):
    model = getattr(self, kind)()
    code, out, err = self.convert(model, f'--dtype={dtype}')
    self.assertEqual((code, err), (0, ''))
    before = load.load(str(model), dtype)
    after = load.load(str(self.out), dtype)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(before.params))
    self.assertEqual(out, f'{self.out}: {num_params:,} parameters in {dtype}\n')
    self.assertEqual(after.model, before.model)
    self.assertEqual(after.stop_ids, before.stop_ids)
    self.assertEqual(after.config, before.config)
    self.assertEqual(
      jax.tree.structure(after.params), jax.tree.structure(before.params)
    )
    for ours, theirs in zip(
      jax.tree.leaves(after.params), jax.tree.leaves(before.params)
    ):
      self.assertEqual(ours.dtype, theirs.dtype)
      np.testing.assert_array_equal(ours, theirs)
    self.assert_same_tokenizer(after.tokenizer, before.tokenizer)
    self.assertEqual([*self.out.parent.iterdir()], [self.out])

  def assert_same_tokenizer(self, ours, theirs):
    self.assertEqual(ours.content(), theirs.content())
    for name in ('bos_id', 'eos_id', 'stop_ids', 'chat_template'):
      self.assertEqual(getattr(ours, name), getattr(theirs, name), name)
    for add_special in (False, True):
      ids = ours.encode(TEXT, add_special=add_special)
      self.assertEqual(ids, theirs.encode(TEXT, add_special=add_special))
      self.assertEqual(ours.decode(ids), theirs.decode(ids))
    for i in range(ours.vocab_size):
      self.assertEqual(ours.is_special(i), theirs.is_special(i))
      self.assertEqual(ours.token_bytes(i), theirs.token_bytes(i))

  def test_a_converted_model_can_be_converted_and_run(self):
    self.convert(self.hugging_face())
    first = self.out
    self.out = self.folder / 'again'
    self.assertEqual(self.convert(first)[0], 0)
    code, text, err = run(
      generate,
      FLAG_GROUPS,
      f'--target={self.out}',
      f'--draft={first}',
      '--prompt=a',
      '--max_new_tokens=8',
      '--ignore_eos',
    )
    self.assertEqual(code, 0, err)
    self.assertNotEmpty(text)
    self.assertIn('block efficiency 4.00', err)  # 5 and 3: all accepted.

  @parameterized.parameters('hugging_face', 'gguf')
  def test_int8(self, kind):
    model = getattr(self, kind)()
    code, out, err = self.convert(model, '--quantize=int8')
    self.assertEqual((code, err), (0, ''))
    before = load.load(str(model), 'bfloat16', 'int8')
    after = load.load(str(self.out), 'bfloat16', 'int8')
    # The scales are not counted.
    plain = jax.tree.leaves(load.load(str(model), 'float32').params)
    num_params = sum(leaf.size for leaf in plain)
    self.assertEqual(out, f'{self.out}: {num_params:,} parameters in int8\n')
    self.assertEqual(after.model, before.model)
    self.assertEqual(after.model.quantize, 'int8')
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)

  def test_an_empty_folder_is_taken(self):
    self.out.mkdir(parents=True)
    self.assertEqual(self.convert(self.gguf())[0], 0)
    load.load(str(self.out), 'float32')

  def refused(self, model, *fragments, flags=()):
    before = sorted(self.folder.rglob('*'))
    code, out, err = self.convert(model, *flags)
    self.assertEqual((code, out), (2, ''), err)
    self.assertRegex(err, r'^convert\.py: [^\n]+\.\n$')
    for fragment in fragments:
      self.assertIn(fragment, err)
    self.assertEqual(sorted(self.folder.rglob('*')), before)

  def test_a_folder_that_holds_something_is_left_alone(self):
    self.out.mkdir(parents=True)
    (self.out / 'thesis.txt').write_text('mine')
    with mock.patch.object(load, 'load') as loads:
      self.refused(self.gguf(), str(self.out), 'absent or empty')
    loads.assert_not_called()

  def test_a_model_of_bytes(self):
    code, out, err = self.convert('demo:draft')
    self.assertEqual(code, 0, err)
    self.assertEqual(load.load(str(self.out), 'bfloat16').stop_ids, (256,))

  def test_what_cannot_be_converted(self):
    self.refused('/no/such', "'/no/such'")
    self.refused('', '--model must be given')
    self.refused(self.gguf(), "'int4'", 'bfloat16', flags=('--dtype=int4',))

  def test_a_failure_leaves_nothing(self):
    model = self.gguf()
    before = sorted(self.folder.rglob('*'))
    with mock.patch.object(
      tokenizer_files, 'save_tokenizer', side_effect=OSError(28, 'full', 'x')
    ):
      code, _, err = self.convert(model)
    self.assertEqual((code, err), (2, "convert.py: cannot open 'x': full.\n"))
    self.out.parent.rmdir()  # It was made, and is empty.
    self.assertEqual(sorted(self.folder.rglob('*')), before)

  def test_a_folder_of_another_kind_is_refused(self):
    self.convert(self.gguf())
    path = self.out / orbax.SETTINGS_FILE
    good = json.loads(path.read_text())
    first = self.out
    self.out = self.folder / 'again'
    for changes, *fragments in (
      ({'version': 99}, 'version 1', '99'),
      ({'format': 'other'}, "'specjax checkpoint'"),
      ({'config': 5}, 'config'),
      ({'vocab_size': 'x'}, 'vocab_size'),
      ({'vocab_size': 10**6}, 'vocab_size'),
      ({'stop_ids': 5}, 'stop_ids'),
      ({'config': {**good['config'], 'hidden_size': 32}}, '(258, 32)'),
      ({'config': {**good['config'], 'num_hidden_layers': 2}}, 'layers.1'),
    ):
      with self.subTest(changes):
        path.write_text(json.dumps({**good, **changes}))
        self.refused(first, *fragments)
    for data in ('', '[1]', '{"a"', '[' * 100_000):
      path.write_text(data)
      self.refused(first, orbax.SETTINGS_FILE)
    path.unlink()
    self.refused(first, 'config.json')
    path.write_text(json.dumps(good))
    weights = sorted((first / 'params').rglob('*'))
    for file in weights:
      if file.is_file() and file.stat().st_size > 5000:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    self.refused(first, 'params')
    for file in weights:
      if file.is_file():
        file.unlink()
    self.refused(first, 'params')


class SaveTokenizerTest(absltest.TestCase):
  def sentencepiece(self, **changes):
    import tokenizers as library
    from tokenizers import models, normalizers

    pieces = [
      '<unk>',
      '<s>',
      '</s>',
      '  ',
      *(f'<0x{i:02X}>' for i in range(256)),
    ]
    pieces += ['\u2581', 'a', 'b', 'ab', '\u2581ab']
    backend = library.Tokenizer(
      models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[('a', 'b'), ('\u2581', 'ab')],
        unk_token='<unk>',
        byte_fallback=True,
      )
    )
    backend.normalizer = normalizers.Sequence(
      [normalizers.Prepend('\u2581'), normalizers.Replace(' ', '\u2581')]
    )
    backend.add_special_tokens(pieces[:3])
    backend.add_tokens([library.AddedToken('  ', normalized=False)])
    pieces[3] = '\u2581\u2581'
    return tokenizers.LibraryTokenizer(
      backend=backend,
      tokens=tuple(pieces),
      added_ids=frozenset(range(4)),
      special_ids=frozenset(range(3)),
      is_byte_level=False,
      has_space_prefix=True,
      **{
        'prefix_ids': (1,),
        'suffix_ids': (2, 2),
        'bos_id': 1,
        'eos_id': 2,
        'stop_ids': (2, 0),
        'chat_template': TEMPLATE,
        **changes,
      },
    )

  def test_sentencepiece(self):
    tokenizer = self.sentencepiece()
    with tempfile.TemporaryDirectory() as folder:
      tokenizer_files.save_tokenizer(folder, tokenizer)
      again = tokenizers.from_tokenizer_json(folder)
      import tokenizers as library

      other = library.Tokenizer.from_file(f'{folder}/tokenizer.json')
    text = 'ab é  ab</s>b'
    ids = tokenizer.encode(text, add_special=True)
    self.assertEqual((ids[0], *ids[-2:]), (1, 2, 2))
    self.assertEqual(again.encode(text, add_special=True), ids)
    self.assertEqual(again.content(), tokenizer.content())
    self.assertEqual(again.stop_ids, (2, 0))
    # Other programs read it the same way.
    self.assertEqual(other.encode(text).ids, ids)
    self.assertEqual(
      other.decode(tokenizer.encode('ab é', add_special=True)), 'ab é'
    )

  def test_what_the_files_cannot_hold_is_refused(self):
    with tempfile.TemporaryDirectory() as folder:
      tokenizer = self.sentencepiece()
      twins = (*tokenizer.tokens[:-1], 'a')
      for changed, fragment in (
        (self.sentencepiece(stop_ids=(10**6,)), 'stop_ids'),
        (
          tokenizers.LibraryTokenizer(**{**vars(tokenizer), 'tokens': twins}),
          'its tokens would be read back differently',
        ),
      ):
        with self.assertRaisesRegex(ValueError, fragment):
          tokenizer_files.save_tokenizer(folder, changed)


if __name__ == '__main__':
  absltest.main()

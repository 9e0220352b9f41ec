"""Drafts with another vocabulary, from the command line."""

import contextlib
import io
import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import generate, script
from experiments.run_flags import FLAG_GROUPS
from tests.experiments import tiny_files


class OtherVocabularyTest(parameterized.TestCase):
  """A byte-level BPE target; the demo draft has bytes for ids."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(
      cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    cls.target = tiny_files.write_folder(cls.folder / 'target')

  def run_script(self, *flags):
    """Exit code, what went to stderr, and the result if there is one."""
    json_out = self.folder / 'result.json'
    argv = (
      f'--target={self.target}',
      '--prompt=a ba',
      '--max_new_tokens=12',
      '--dtype=float32',
      '--ignore_eos',
      '--num_draft_tokens=2',
      f'--json_out={json_out}',
      *flags,
    )
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      code = script.run_main(generate.main, FLAG_GROUPS, argv)
    result = json.loads(json_out.read_text()) if json_out.exists() else None
    json_out.unlink(missing_ok=True)
    return code, err.getvalue(), result

  def test_the_text_is_that_of_plain_decoding(self):
    flags = ('--temperature=0.8', '--verify=coupled')
    code, err, plain = self.run_script('--proposer=none', *flags)
    self.assertEqual(code, 0, err)
    for proposer in ('tli', 'slem'):
      with self.subTest(proposer):
        code, err, drafted = self.run_script(
          f'--proposer={proposer}', '--draft=demo:draft', *flags
        )
        self.assertEqual(code, 0, err)
        self.assertEqual(
          drafted['requests'][0]['tokens'], plain['requests'][0]['tokens']
        )
        self.assertGreater(drafted['aggregate']['num_drafted'], 0)

  @parameterized.parameters(
    (('--draft=demo:draft',), 'must have the same vocabulary, but id'),
    (('--proposer=tli',), '--proposer=tli needs --draft.'),
    (
      ('--proposer=slem', '--draft=demo:draft', '--stop_rule=acceptance'),
      '--stop_rule=fixed.',
    ),
  )
  def test_refusals(self, flags, fragment):
    code, err, result = self.run_script(*flags)
    self.assertEqual(code, script.BAD_INPUT)
    self.assertIn(fragment, err)
    self.assertIsNone(result)


if __name__ == '__main__':
  absltest.main()

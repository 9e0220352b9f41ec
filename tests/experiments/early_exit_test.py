"""Early exit from the command line: plain decoding's text, and refusals."""

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

LAYERS = 3


class EarlyExitTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(
      cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    changes = {'num_hidden_layers': LAYERS}
    cls.target = tiny_files.write_folder(
      cls.folder / 'target',
      weights=tiny_files.tensors({**tiny_files.CONFIG, **changes}),
      **changes,
    )

  def run_script(self, *flags):
    """Exit code, what went to stderr, and the result if there is one."""
    json_out = self.folder / f'{self.id()}.json'
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

  @parameterized.parameters('--temperature=0', '--temperature=0.8')
  def test_the_text_is_that_of_plain_decoding(self, temperature):
    flags = (temperature, '--verify=coupled')
    code, err, plain = self.run_script('--proposer=none', *flags)
    self.assertEqual(code, 0, err)
    code, err, early = self.run_script(
      '--proposer=early_exit', '--exit_layer=2', *flags
    )
    self.assertEqual(code, 0, err)
    self.assertEqual(
      early['requests'][0]['tokens'], plain['requests'][0]['tokens']
    )
    self.assertEqual(early['config']['exit_layer'], 2)
    self.assertGreater(early['aggregate']['num_drafted'], 0)

  @parameterized.parameters(0, -1, LAYERS, 100)
  def test_an_exit_that_is_not_there(self, layer):
    code, err, result = self.run_script(
      '--proposer=early_exit', f'--exit_layer={layer}'
    )
    self.assertEqual((code, result), (2, None))
    self.assertIn(
      f"exit_layer must be at least 1 and below {LAYERS}, the target's number "
      f'of layers, got {layer}.\n',
      err,
    )


if __name__ == '__main__':
  absltest.main()

"""What narrow weights cost: the table against sums made in NumPy."""

import contextlib
import io
import json
import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

import tests.setup_jax  # noqa: F401
from experiments import conversions, precision, script
from tests.experiments import tiny_files


class PrecisionTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(
      cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    cls.target = tiny_files.write_folder(cls.folder / 'target')
    cls.texts = ['a ba ab', 'a b', 'b a b a b a b a b a b a b a b a b a']
    cls.prompts = cls.folder / 'prompts.jsonl'
    cls.prompts.write_text(
      ''.join(json.dumps({'prompt': text}) + '\n' for text in cls.texts)
    )

  def run_script(self, *flags):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      code = script.run_main(precision.main, precision.FLAG_GROUPS, flags)
    return code, out.getvalue(), err.getvalue()

  def test_the_table(self):
    json_out = self.folder / 'found.json'
    code, out, err = self.run_script(
      f'--target={self.target}',
      f'--draft={self.target}',
      f'--prompts_jsonl={self.prompts}',
      '--length=64',
      f'--json_out={json_out}',
    )
    self.assertEqual(code, 0, err)
    self.assertIn('| target | int8, int8 cache |', out)
    rows = {
      (row['model'], row['scheme']): row
      for row in json.loads(json_out.read_text())['rows']
    }
    self.assertLen(rows, 6)
    # The draft is the target: what is alike in both accepts all.
    target = rows['target', 'bfloat16']
    self.assertEqual(target['same_best'], 1.0)
    self.assertAlmostEqual(target['acceptance']['bfloat16'], 1.0, places=5)
    self.assertLess(target['acceptance']['int8'], 1.0)
    self.assertGreater(target['acceptance']['int8'], 0.9)
    self.assertEqual(
      target['perplexity'], rows['draft', 'bfloat16']['perplexity']
    )

    loaded = conversions.load_model(str(self.target), 'bfloat16', 'none', None)
    total, num = 0.0, 0
    for text in self.texts:
      ids = loaded.tokenizer.encode(text, add_special=True)
      padded_L = np.zeros(64, np.int32)
      padded_L[: len(ids)] = ids
      log_p_LV = precision.laws(
        loaded.model, loaded.params, jnp.asarray(padded_L)
      )
      for i in range(len(ids) - 1):
        total -= float(log_p_LV[i, ids[i + 1]])
        num += 1
    self.assertAlmostEqual(
      target['perplexity'], np.exp(total / num), delta=1e-3
    )

  def test_a_text_longer_than_the_context(self):
    code, _, err = self.run_script(
      f'--target={self.target}',
      f'--draft={self.target}',
      f'--prompts_jsonl={self.prompts}',
      '--length=65',
    )
    self.assertEqual(code, 2)
    self.assertIn('--length must be at most 64', err)

  def test_what_is_missing(self):
    code, _, err = self.run_script('--target=x')
    self.assertEqual(code, 2)
    self.assertIn('--draft must be given', err)


if __name__ == '__main__':
  absltest.main()

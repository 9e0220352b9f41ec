"""Pictures of recorded runs."""

import contextlib
import importlib.util
import io
import pathlib
import tempfile
import warnings

import numpy as np
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import draw, script, trace_file
from specjax import ByteTokenizer
from specjax.state import ACCEPTED, BONUS, CORRECTION


def recorded(**about) -> trace_file.TraceFile:
  """Two requests of an alphabet of four; 'ab' and a correction, then 'a'."""
  p = np.array([[0.5, 0.3, 0.2], [0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [1, 0, 0]])
  q = np.array([[0.5, 0.3, 0.2], [0.3, 0.6, 0.1], [0.6, 0.1, 0.3], [1, 0, 0]])
  with np.errstate(divide='ignore'):
    law_p, law_q = np.log(p), np.log(q)
  values = {
    'prompt_length': [1, 1],
    'prompt_token': [97, 97],
    'num_tokens': [3, 1],
    'seed': [0, 1],
    'temperature': [1, 1],
    'max_new_tokens': [3, 1],
    'is_stopped': [False, False],
    'token': [97, 98, 97, 97],
    'step': [0, 0, 0, 0],
    'source': [ACCEPTED, ACCEPTED, CORRECTION, BONUS],
    'num_draft': [3, 0, 0, 0],
    **dict.fromkeys(
      ('chosen_p', 'chosen_q', 'entropy_p', 'entropy_q'), np.zeros(4)
    ),
    'tail_p': np.zeros(4),
    'tail_q': np.zeros(4),
    'law_id': np.tile([97, 98, 99], (4, 1)),
    'law_p': law_p,
    'law_q': law_q,
    'step_request': [1, 0],
    'step_index': [0, 0],
    'drafted': [0, 3],
    'accepted': [0, 2],
    'emitted': [1, 3],
    'seconds': [0, 0],
    'draft': np.zeros((2, 3)),
  }
  options = {'temperature': 1.0}
  return trace_file.TraceFile(
    about={
      'config': {'target': 'demo:target'},
      'environment': {},
      'vocab_size': 257,
      'num_draft_tokens': 3,
      'verify': 'rejection',
      'options': [options, options],
      **about,
    },
    arrays={
      name: np.asarray(x, trace_file.DTYPES[name]) for name, x in values.items()
    },
  )


def needs_matplotlib(test):
  has_it = importlib.util.find_spec('matplotlib') is not None
  return absltest.skipUnless(has_it, 'matplotlib is not installed')(test)


class DrawTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)
    trace_file.save(str(self.folder / 'run.npz'), recorded())

  def run_script(self, *flags):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      code = script.run_main(draw.main, draw.FLAG_GROUPS, flags)
    return code, out.getvalue(), err.getvalue()

  @needs_matplotlib
  def test_figures_hold_what_was_recorded(self):
    trace, tokenizer = recorded(), ByteTokenizer()
    patches = draw.heat_map(trace, tokenizer).axes[0].patches
    widths = [patch.get_width() for patch in patches]
    overlap = [bar / cell for cell, bar in zip(widths[::2], widths[1::2])]
    np.testing.assert_allclose(overlap, [1.0, 0.6, 0.5], atol=1e-4)
    figure = draw.laws(trace, tokenizer)
    bars = {b.get_label(): b for b in figure.axes[0].containers}
    shared = [bar.get_height() for bar in bars['min(p, q): accepted']]
    # At the correction, the likeliest ids first.
    np.testing.assert_allclose(shared, [0.1, 0.1, 0.3], atol=1e-4)
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    self.assertEqual(labels, ["'a'", "'b'", "'c'"])
    marks = draw.timeline(trace, draft_cost=0.1).axes[0].get_lines()
    marks = {line.get_label(): len(line.get_xdata()) for line in marks}
    self.assertEqual(marks, {'accepted': 2, 'rejected': 1, "target's own": 1})

  @needs_matplotlib
  def test_the_script_writes_three_pictures(self):
    trace = f'--trace={self.folder / "run.npz"}'
    with warnings.catch_warnings():
      warnings.simplefilter('error')  # As of what does not fit or has no glyph.
      code, out, err = self.run_script(
        trace, f'--out={self.folder}', '--request=1'
      )
    self.assertEqual(code, 0, err)
    names = [pathlib.Path(line).name for line in out.splitlines()]
    self.assertEqual(names, ['heat_map.png', 'timeline.png', 'laws.png'])
    for name in names:
      data = (self.folder / name).read_bytes()
      self.assertStartsWith(data.decode('latin1'), '\x89PNG')
    self.assertEmpty(list(self.folder.glob('.*')))

  @parameterized.parameters(
    (('--out=X',), '--trace must be given'),
    (('--trace=X/run.npz',), '--out must be given'),
    (('--trace=X/no.npz', '--out=X'), 'no.npz'),
    (('--trace=X/run.npz', '--out=X/no'), '--out must be an existing folder'),
    (
      ('--trace=X/run.npz', '--out=X', '--request=2'),
      '--request must be in 0..1, got 2',
    ),
    (
      ('--trace=X/run.npz', '--out=X', '--draft_cost=-1'),
      '--draft_cost must be in .0, 1e6., got -1',
    ),
    (
      ('--trace=X/run.npz', '--out=X', '--tokenizer=demo:x'),
      "no such demo model 'demo:x'",
    ),
  )
  @needs_matplotlib
  def test_bad_input(self, flags, message):
    flags = [flag.replace('X', str(self.folder)) for flag in flags]
    code, out, err = self.run_script(*flags)
    self.assertEqual((code, out), (2, ''), err)
    self.assertRegex(err, rf'(?m)^draw\.py: .*{message}.*[.?]$')
    self.assertEmpty(list(self.folder.glob('*.png')))


if __name__ == '__main__':
  absltest.main()

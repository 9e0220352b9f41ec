"""What all scripts share on the host: flags, errors, files, progress."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import common


def define_model_flags(values):
  flags.DEFINE_string(
    'target', 'demo:target', 'Model that decides.', flag_values=values
  )
  flags.DEFINE_boolean(
    'stream', False, 'Print as it comes.', flag_values=values
  )


def define_sampling_flags(values):
  flags.DEFINE_float(
    'temperature', 0.0, 'Softness.', lower_bound=0.0, flag_values=values
  )
  flags.DEFINE_multi_string('stop', [], 'Stop text.', flag_values=values)


FLAG_GROUPS = (
  ('Model', define_model_flags),
  ('Sampling', define_sampling_flags),
)


def run(main, *argv):
  """The exit code and what went to stdout and stderr."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    code = common.run_main(main, FLAG_GROUPS, argv)
  return code, out.getvalue(), err.getvalue()


def echo(values):
  print(values.target, values.temperature, values.stop, values.stream)


def raising(error):
  def main(values):
    raise error

  return main


class RunMainTest(parameterized.TestCase):
  def test_flags_reach_main_and_are_fresh_in_each_run(self):
    argv = ('--target=x', '--temperature', '0.5', '--stop=a', '--stop=b')
    self.assertEqual(
      run(echo, *argv, '--stream'), (0, "x 0.5 ['a', 'b'] True\n", '')
    )
    self.assertEqual(run(echo), (0, 'demo:target 0.0 [] False\n', ''))

  @parameterized.parameters(
    (('--temprature=1',), 'unknown flag --temprature; did you mean --temp'),
    (('--xyz',), 'unknown flag --xyz; --help lists all.'),
    (('stray', '--stream'), "unexpected argument 'stray'; flags are written"),
    (
      ('--temperature=warm',),
      "--temperature must be a non-negative number, got 'warm'.",
    ),
    (
      ('--temperature=-1',),
      "--temperature must be a non-negative number, got '-1'.",
    ),
    (('--stream=maybe',), "--stream must be true or false, got 'maybe'."),
    (('--target',), 'Missing value for flag --target.'),
    (('--target=\udcff',), 'argument 1 is not valid UTF-8.'),
  )
  def test_bad_flags_are_one_sentence_and_exit_code_2(self, argv, message):
    code, out, err = run(echo, *argv)
    self.assertEqual((code, out), (2, ''))
    self.assertStartsWith(err, f'common_test.py: {message}')
    self.assertRegex(err, r'^[^\n]+[.?]\n$')

  @parameterized.parameters(
    (ValueError('top_p must be > 0,\n  got 0'), 'top_p must be > 0, got 0.'),
    (
      FileNotFoundError(2, 'No such file or directory', 'a.gguf'),
      "cannot open 'a.gguf': no such file or directory.",
    ),
    (
      PermissionError(13, 'Permission denied', 'a.gguf'),
      "cannot open 'a.gguf': permission denied.",
    ),
    (
      UnicodeDecodeError('utf-8', b'ab\xff', 2, 3, 'invalid start byte'),
      'the input is not valid UTF-8: byte 0xff at 2.',
    ),
    (ValueError(), 'ValueError.'),
  )
  def test_bad_input_is_one_sentence_and_exit_code_2(self, error, message):
    self.assertEqual(
      run(raising(error)), (2, '', f'common_test.py: {message}\n')
    )

  def test_exit_code_of_main_is_kept(self):
    self.assertEqual(run(lambda values: 1)[0], 1)

  @parameterized.parameters(KeyError('k'), TypeError('t'), RuntimeError('r'))
  def test_bugs_are_raised_on(self, error):
    with self.assertRaises(type(error)):
      run(raising(error))

  @parameterized.named_parameters(
    ('passed_through_jit', lambda v: jax.jit(lambda x: x.reshape(7))(v)),
    ('raised_by_jax', lambda v: jax.tree.map(max, [1], [1, 2])),
  )
  def test_value_errors_from_jax_are_bugs(self, fail):
    with self.assertRaises((ValueError, TypeError)):
      run(lambda values: fail(jnp.zeros(3)))

  def test_value_error_in_a_tree_walk_is_bad_input(self):
    def main(values):
      jax.tree.map(raising(ValueError('layer 3 has a NaN.')), [1])

    self.assertEqual(run(main), (2, '', 'common_test.py: layer 3 has a NaN.\n'))

  def test_help_lists_own_flags_by_group(self):
    code, out, err = run(raising(AssertionError()), '--help')
    self.assertEqual((code, err), (0, ''))
    self.assertEqual(
      out,
      textwrap.dedent("""\
        What all scripts share on the host: flags, errors, files, progress.

        Model:
          --target=...
              Model that decides. (default demo:target)
          --[no]stream
              Print as it comes.

        Sampling:
          --temperature=X
              Softness. (default 0.0)
          --stop=...
              Stop text.
        """),
    )

  def test_as_a_process(self):
    with tempfile.TemporaryDirectory() as folder:
      script = pathlib.Path(folder, 'script.py')
      script.write_text(
        textwrap.dedent(f"""\
          import sys

          sys.path.insert(0, {str(common.ROOT)!r})

          from experiments import common


          def main(values):
            raise KeyError('bug')


          if __name__ == '__main__':
            sys.exit(common.run_main(main, ()))
          """),
        encoding='utf-8',
      )

      def start(*argv):
        return subprocess.run(
          (sys.executable, str(script), *argv), capture_output=True, text=True
        )

      bug, unknown = start(), start('--nope')
    self.assertEqual(bug.returncode, 1)
    self.assertStartsWith(bug.stderr, 'Traceback')
    self.assertEqual(
      (unknown.returncode, unknown.stderr),
      (2, 'script.py: unknown flag --nope; --help lists all.\n'),
    )


class ParseTest(parameterized.TestCase):
  @parameterized.parameters(
    ('', ()), ('7', (7,)), ('1, 2,3', (1, 2, 3)), ('2147483647', (2**31 - 1,))
  )
  def test_ids(self, text, expected):
    self.assertEqual(common.parse_ids(text, '--stop_ids'), expected)

  @parameterized.parameters('-1', '1,,2', '1.5', 'a', '2147483648', '٣', '1,')
  def test_bad_ids(self, text):
    with self.assertRaisesRegex(
      ValueError, '^--stop_ids must be token ids joined by commas'
    ):
      common.parse_ids(text, '--stop_ids')

  def test_logit_bias(self):
    self.assertEqual(common.parse_logit_bias(''), ())
    self.assertEqual(
      common.parse_logit_bias('5:-1.5, 7:2e1'), ((5, -1.5), (7, 20.0))
    )

  @parameterized.parameters(
    '5', '5:', ':1', '5:nan', '5:inf', '-5:1', '5:1,5:2'
  )
  def test_bad_logit_bias(self, text):
    with self.assertRaisesRegex(ValueError, '^--logit_bias must be ID:X,ID:X'):
      common.parse_logit_bias(text)


@dataclasses.dataclass(frozen=True)
class Config:
  name: str
  sizes: tuple[int, ...]


class FilesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)
    self.path = str(self.folder / 'result.json')

  def names(self):
    return sorted(p.name for p in self.folder.iterdir())

  def test_write_json_accepts_what_results_hold(self):
    common.write_json(
      self.path,
      {
        'config': Config(name='é', sizes=(1, 2)),
        'nan': float('nan'),
        'inf': [np.float32('inf'), 1.5],
        'int': np.int64(3),
        'flag': np.bool_(True),
        'array': np.arange(4).reshape(2, 2),
        'jax': jnp.array([0.5, jnp.nan]),
        'half': jnp.array(0.5, jnp.bfloat16),
        'path': self.folder,
        'none': None,
        3: 'key',
      },
    )
    with open(self.path, encoding='utf-8') as file:
      self.assertEqual(
        json.load(file),
        {
          'config': {'name': 'é', 'sizes': [1, 2]},
          'nan': None,
          'inf': [None, 1.5],
          'int': 3,
          'flag': True,
          'array': [[0, 1], [2, 3]],
          'jax': [0.5, None],
          'half': 0.5,
          'path': str(self.folder),
          'none': None,
          '3': 'key',
        },
      )
    self.assertEqual(self.names(), ['result.json'])

  def test_a_failed_write_leaves_the_old_file_and_nothing_else(self):
    common.write_json(self.path, {'old': 1})
    with self.assertRaisesRegex(TypeError, 'object cannot be written'):
      common.write_json(self.path, {'new': object()})
    with absltest.mock.patch.object(os, 'replace', side_effect=OSError('full')):
      with self.assertRaisesRegex(OSError, 'full'):
        common.write_json(self.path, {'new': 2})
    self.assertEqual(common.read_text(self.path), '{\n  "old": 1\n}\n')
    self.assertEqual(self.names(), ['result.json'])

  def test_a_link_stays_a_link_and_a_pipe_a_pipe(self):
    link = self.folder / 'link.json'
    link.symlink_to('result.json')
    common.write_json(str(link), 1)
    self.assertTrue(link.is_symlink())
    self.assertEqual(common.read_text(self.path), '1\n')
    common.write_json(os.devnull, 1)
    self.assertFalse(os.path.isfile(os.devnull))

  def test_check_writable_creates_nothing(self):
    common.check_writable(self.path)
    common.check_writable(os.devnull)
    self.assertEqual(self.names(), [])
    common.write_json(self.path, 1)
    common.check_writable(self.path)

  def test_check_writable_refuses(self):
    common.write_json(self.path, 1)
    for path, reason in (
      ('', 'the path is empty'),
      (str(self.folder), 'it is a folder'),
      (str(self.folder / 'no' / 'x'), 'is not an existing folder'),
      (self.path + '/x', 'is not an existing folder'),
    ):
      with self.subTest(path), self.assertRaisesRegex(ValueError, reason):
        common.check_writable(path)
    with absltest.mock.patch.object(os, 'access', return_value=False):
      with self.assertRaisesRegex(ValueError, 'cannot write .*read-only'):
        common.check_writable(self.path)
      with self.assertRaisesRegex(ValueError, 'folder .* is read-only'):
        common.check_writable(str(self.folder / 'new'))

  def test_read_text_names_file_and_byte(self):
    pathlib.Path(self.path).write_bytes(b'abc\xff')
    with self.assertRaisesRegex(ValueError, 'json. is not valid .* 0xff at 3'):
      common.read_text(self.path)


class EnvironmentTest(absltest.TestCase):
  def test_names_versions_device_and_revision(self):
    found = common.environment()
    self.assertEqual(found['jax'], jax.__version__)
    self.assertEqual(found['platform'], 'cpu')
    self.assertEqual(found['device_count'], 8)
    json.dumps(found, allow_nan=False)

  def test_without_git(self):
    with absltest.mock.patch.object(subprocess, 'run', side_effect=OSError):
      found = common.environment()
    self.assertIsNone(found['git_revision'])
    self.assertIsNone(found['git_clean'])

  def test_inside_a_foreign_repository(self):
    with tempfile.TemporaryDirectory() as folder:
      subprocess.run(('git', 'init', '-q', folder), check=True)
      inner = pathlib.Path(folder, 'inner')
      inner.mkdir()
      with absltest.mock.patch.object(common, 'ROOT', inner.resolve()):
        self.assertIsNone(common.environment()['git_revision'])


class Terminal(io.StringIO):
  def isatty(self):
    return True


class ProgressTest(absltest.TestCase):
  def test_on_a_terminal_one_line_is_rewritten(self):
    stream = Terminal()
    with common.Progress('loading', stream) as progress:
      progress.update('12 of 28')
      time.sleep(0.3)
      progress.update('')
    text = stream.getvalue()
    self.assertRegex(text, r'^\rloading 12 of 28 \.\.\. 0\.\d s\r')
    self.assertRegex(text, r'\rloading \.\.\. 0\.\d s {9}\n$')

  def test_elsewhere_short_work_is_silent(self):
    stream = io.StringIO()
    with common.Progress('loading', stream):
      time.sleep(0.05)
    self.assertEqual(stream.getvalue(), '')

  def test_elsewhere_long_work_is_plain_lines(self):
    stream = io.StringIO()
    with common.Progress('loading', stream):
      time.sleep(1.2)
    self.assertRegex(
      stream.getvalue(), r'^loading \.\.\. 1\.\d s\nloading \.\.\. 1\.\d s\n$'
    )


if __name__ == '__main__':
  absltest.main()

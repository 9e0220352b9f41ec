"""Flags, help, and bad input in one sentence."""

import contextlib
import io
import pathlib
import subprocess
import sys
import tempfile
import textwrap

import jax
import jax.numpy as jnp
from absl import flags
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import script, surroundings


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
    code = script.run_main(main, FLAG_GROUPS, argv)
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
    self.assertStartsWith(err, f'script_test.py: {message}')
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
      run(raising(error)), (2, '', f'script_test.py: {message}\n')
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

    self.assertEqual(run(main), (2, '', 'script_test.py: layer 3 has a NaN.\n'))

  def test_help_lists_own_flags_by_group(self):
    code, out, err = run(raising(AssertionError()), '--help')
    self.assertEqual((code, err), (0, ''))
    self.assertEqual(
      out,
      textwrap.dedent("""\
        Flags, help, and bad input in one sentence.

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
      path = pathlib.Path(folder, 'script.py')
      path.write_text(
        textwrap.dedent(f"""\
          import sys

          sys.path.insert(0, {str(surroundings.ROOT)!r})

          from experiments import script


          def main(values):
            raise KeyError('bug')


          if __name__ == '__main__':
            sys.exit(script.run_main(main, ()))
          """),
        encoding='utf-8',
      )

      def start(*argv):
        return subprocess.run(
          (sys.executable, str(path), *argv), capture_output=True, text=True
        )

      bug, unknown = start(), start('--nope')
    self.assertEqual(bug.returncode, 1)
    self.assertStartsWith(bug.stderr, 'Traceback')
    self.assertEqual(
      (unknown.returncode, unknown.stderr),
      (2, 'script.py: unknown flag --nope; --help lists all.\n'),
    )


if __name__ == '__main__':
  absltest.main()

"""Several processes: the same text, one voice, and an end when one is lost."""

import os
import signal
import subprocess
import sys
import tempfile
import time

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import processes
from tests.experiments import mesh_runs

PAIR = ['--target=demo:target', '--draft=demo:draft']
LAUNCH = str(mesh_runs.ROOT / 'experiments' / 'launch_local.sh')
LOST = 'ended early: it or another process was killed, failed, or could not be'


def launch(*argv: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [LAUNCH, *argv],
    env={**os.environ, 'PYTHON': sys.executable},
    capture_output=True,
    text=True,
    timeout=300,
  )


class TextTest(absltest.TestCase):
  def test_processes_and_devices_do_not_change_the_text(self):
    mesh = ('--mesh=data:2,model:4', '--draft_mesh=model:2')
    one_device = mesh_runs.tokens(PAIR, 1, 1)
    self.assertLen(one_device, 8)
    self.assertLen(one_device[7], 16 - 7)
    self.assertEqual(mesh_runs.tokens([*PAIR, *mesh], 2, 4), one_device)
    self.assertEqual(mesh_runs.tokens([*PAIR, *mesh], 1, 8), one_device)


class LostProcessTest(parameterized.TestCase):
  @parameterized.parameters(0, 1)
  def test_a_killed_process_ends_the_other(self, victim):
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    prompts = f'{folder.name}/prompts.jsonl'
    mesh_runs.write_prompts(prompts, 100, 4000)  # Minutes of work.
    argv = [PAIR[0], '--mesh=data:2,model:2', *mesh_runs.flags(prompts)]
    running = mesh_runs.start(argv, 2, 2)
    try:
      for line in running[0].stderr:
        if line.startswith('decoding batch'):
          break
      self.assertEqual([p.poll() for p in running], [None, None])
      running[victim].send_signal(signal.SIGKILL)
      out, err = running[1 - victim].communicate(timeout=60)
    finally:
      for process in running:
        process.kill()
        process.communicate()
    self.assertNotEqual(running[1 - victim].returncode, 0)
    self.assertEqual(out, '')
    who = f'process {1 - victim} of 2'
    self.assertRegex(err, rf'(?m)^generate\.py: {who} {LOST} .*\.$')

  def test_who_comes_alone_does_not_wait_for_ever(self):
    seconds = time.monotonic()
    program = (
      'import sys; from experiments import processes as p; sys.argv = ["x.py"];'
      f'p.JOIN_SECONDS = 2; p.joined("127.0.0.1:{mesh_runs.free_port()}", 2, '
    )
    for i in (0, 1):
      with self.subTest(process=i):
        found = subprocess.run(
          [sys.executable, '-c', f'{program}{i}).__enter__()'],
          env={**os.environ, 'PYTHONPATH': str(mesh_runs.ROOT)},
          capture_output=True,
          text=True,
          timeout=60,
        )
        self.assertEqual(found.returncode, 1)
        self.assertRegex(
          found.stderr,
          rf'^x\.py: process {i} of 2 waited 2 s at 127\.0\.0\.1:\d+ and the '
          r'others did not all come\.\n$',
        )
    self.assertLess(time.monotonic() - seconds, 60)


class SameTest(absltest.TestCase):
  def test_processes_with_different_prompts_are_refused(self):
    argv = ['--target=demo:target', '--mesh=model:2', '--max_new_tokens=4']
    running = mesh_runs.start(argv, 2, 1, own=(['--prompt=a'], ['--prompt=b']))
    for process in running:
      out, err = process.communicate(timeout=100)
      self.assertEqual((process.returncode, out), (2, ''), err)
      self.assertIn(
        'all processes must have the same flags and prompts, process 1 has '
        'others than process 0.',
        err,
      )


class LaunchTest(parameterized.TestCase):
  def test_the_first_process_speaks_for_all(self):
    with tempfile.TemporaryDirectory() as folder:
      found = launch(
        '2',
        '2',
        '--target=demo:target',
        '--mesh=model:4',
        '--prompt=def ',
        '--max_new_tokens=8',
        f'--json_out={folder}/x.json',
      )
      self.assertEqual(os.listdir(folder), ['x.json'])
    self.assertEqual(found.returncode, 0, found.stderr)
    self.assertNotEmpty(found.stdout)
    self.assertNotIn('Gloo', found.stdout)
    self.assertIn('[0] 8 tokens in 8 steps', found.stderr)
    self.assertNotIn('[1]', found.stderr)

  @parameterized.parameters(
    (('2', '1', '--temprature=1'), 'unknown flag --temprature'),
    (
      ('2', '1', '--mesh=model:2', '--target=x.gguf', '--prompt=a'),
      "no such model 'x.gguf'",
    ),
    (
      ('2', '1', '--target=demo:target', '--prompt=a'),
      '--mesh must use devices of every process, 2 in all, got data:1,model:1.',
    ),
    (('0', '1'), "N must be in 1..9999, got '0'."),
    (('2',), 'usage: launch_local.sh N DEVICES_PER_PROCESS'),
  )
  def test_an_error_ends_all(self, argv, message):
    found = launch(*argv)
    self.assertEqual((found.returncode, found.stdout), (2, ''), found.stderr)
    self.assertIn(message, found.stderr)


class CheckTest(parameterized.TestCase):
  def test_all_three_or_none(self):
    processes.check(None, None, None)
    processes.check('host:1234', 2, 1)
    processes.check('[::1]:1234', 1, 0)

  @parameterized.parameters(
    (('h:1', None, None), 'got no --num_processes, --process_id'),
    ((None, 2, 0), 'got no --coordinator'),
    (('host', 2, 0), "coordinator must be HOST:PORT, got 'host'"),
    (('host:99999', 2, 0), 'HOST:PORT'),
    ((':1', 2, 0), 'HOST:PORT'),
    (('h:1', 0, 0), r'num_processes must be in 1\.\.4096, got 0'),
    (('h:1', 2, 2), r'process_id must be in 0\.\.1, got 2'),
    (('h:1', 2, -1), r'process_id must be in 0\.\.1, got -1'),
  )
  def test_bad(self, given, message):
    with self.assertRaisesRegex(ValueError, message):
      processes.check(*given)


if __name__ == '__main__':
  absltest.main()

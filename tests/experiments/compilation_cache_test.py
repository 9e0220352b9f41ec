"""Compiled programs are kept where the user keeps caches, and found again."""

import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
from unittest import mock

from absl.testing import absltest

import tests.setup_jax  # noqa: F401
from experiments import compilation_cache, surroundings

SCRIPT = f"""\
  import sys

  sys.path.insert(0, {str(surroundings.ROOT)!r})

  from experiments import compilation_cache, script, surroundings

  compilation_cache._MIN_SECONDS = 0


  def main(values):
    import jax
    import jax.numpy as jnp

    hits = []
    jax.monitoring.register_event_listener(
      lambda event, **_: hits.append(event.endswith('cache_hits'))
    )
    f = jax.jit(lambda x: jnp.sin(x) @ x)
    print(float(f(jnp.ones((3, 3)))[0, 0]), sum(hits) > 0)


  if __name__ == '__main__':
    sys.exit(script.run_main(main, ()))
  """


class CompilationCacheTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.script = self.root / 'script.py'
    self.script.write_text(textwrap.dedent(SCRIPT), encoding='utf-8')
    self.folder = self.root / 'cache' / 'specjax' / 'compiled'

  def run_script(self, *argv, **settings):
    environment = {
      **os.environ,
      'XDG_CACHE_HOME': str(self.root / 'cache'),
      'JAX_PLATFORMS': 'cpu',
      **settings,
    }
    if 'JAX_ENABLE_COMPILATION_CACHE' not in settings:
      del environment['JAX_ENABLE_COMPILATION_CACHE']
    ran = subprocess.run(
      [sys.executable, str(self.script), *argv],
      capture_output=True,
      env=environment,
      text=True,
      timeout=120,
    )
    return ran.returncode, ran.stdout, ran.stderr

  def test_the_second_start_finds_the_same_program(self):
    first = self.run_script()
    self.assertEqual(first[0], 0, first)
    self.assertRegex(first[1], r'^[0-9.]+ False\n$')
    self.assertEqual(first[2], '')
    self.assertNotEmpty(list(self.folder.iterdir()))
    again = self.run_script()
    self.assertEqual(again, (0, first[1].replace('False', 'True'), ''))

  def test_what_jax_was_told_wins(self):
    own = self.root / 'own'
    code, out, _ = self.run_script(JAX_COMPILATION_CACHE_DIR=str(own))
    self.assertEqual((code, out[-6:]), (0, 'False\n'))
    code, out, _ = self.run_script(JAX_ENABLE_COMPILATION_CACHE='false')
    self.assertEqual((code, out[-6:]), (0, 'False\n'))
    self.assertFalse(self.folder.exists())

  def test_a_folder_that_cannot_be_made_is_no_error(self):
    (self.root / 'cache').write_text('a file')
    code, out, err = self.run_script()
    self.assertEqual((code, out[-6:]), (0, 'False\n'))
    self.assertRegex(
      err, r'^script\.py: compiled programs are not kept: cannot [^\n]+\.\n$'
    )

  def test_a_broken_entry_is_compiled_anew(self):
    _, want, _ = self.run_script()
    for file in self.folder.iterdir():
      file.write_bytes(file.read_bytes()[:50])
    self.assertEqual(self.run_script()[:2], (0, want))

  def test_bad_flags_and_help_make_no_folder(self):
    self.assertEqual(self.run_script('--nope')[0], 2)
    self.assertEqual(self.run_script('--help')[0], 0)
    self.assertFalse(self.folder.exists())

  def test_where(self):
    home = str(self.root / 'home')
    for cache, want in (
      (str(self.root), self.root / 'specjax' / 'compiled'),
      ('', pathlib.Path(home, '.cache', 'specjax', 'compiled')),
      ('relative', pathlib.Path(home, '.cache', 'specjax', 'compiled')),
    ):
      settings = {'XDG_CACHE_HOME': cache, 'HOME': home}
      with mock.patch.dict(os.environ, settings):
        self.assertEqual(compilation_cache.folder(), want)

  def test_tests_leave_the_users_folder_alone(self):
    self.assertEqual(os.environ['JAX_ENABLE_COMPILATION_CACHE'], 'false')


if __name__ == '__main__':
  absltest.main()

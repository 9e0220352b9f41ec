"""What the documents say can be typed, and no file leads out of the folder."""

import pathlib
import re
import shlex
import subprocess
import sys

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCUMENTS = ('README.md', 'CONTRIBUTING.md', 'BUILD_NOTES.md')

# Folders of one machine. (Placeholders such as ~ or $HOME are fine.)
MACHINE_PATH = re.compile(r'(?<![\w.~$}/-])/(?:home|root|Users|work|tmp|mnt)\b')
# The CI script alone may look beside the repository for its model files.
MAY_LEAD_OUT = ('.ci/run',)


def commands(text: str) -> list[list[str]]:
  """The words of each command in the shell blocks of a document."""
  found = []
  for block in re.findall(r'^```(?:sh|bash)\n(.*?)^```', text, re.M | re.S):
    for line in block.replace('\\\n', ' ').splitlines():
      words = shlex.split(line, comments=True)
      if words:
        found.append(words)
  return found


def leads_out(text: str, depth: int) -> list[str]:
  """Paths that climb above the repository, and folders of one machine."""
  climbs = re.findall(r'(?:\.\./)+', text)
  return [
    *(climb for climb in climbs if climb.count('../') > depth),
    *MACHINE_PATH.findall(text),
  ]


def own_files() -> list[str] | None:
  """Names of the files that are, or could next be, committed."""
  listing = subprocess.run(
    ('git', 'ls-files', '--cached', '--others', '--exclude-standard'),
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  return listing.stdout.splitlines() if listing.returncode == 0 else None


class DocsTest(parameterized.TestCase):
  def test_commands_exist(self):
    makefile = (ROOT / 'Makefile').read_text(encoding='utf-8')
    targets = re.findall(r'^([a-z]+):', makefile, re.M)
    flags = {}  # Of each script, from its help.
    for document in DOCUMENTS:
      text = (ROOT / document).read_text(encoding='utf-8')
      for words in commands(text):
        with self.subTest(document, command=' '.join(words)):
          if words[0] == 'make':
            goals = [word for word in words[1:] if '=' not in word]
            self.assertContainsSubset(goals, targets)
          scripts = [w for w in words if re.fullmatch(r'experiments/.*\.py', w)]
          for script in scripts:
            if script not in flags:
              flags[script] = self.flags_of(script)
            used = [
              word.split('=')[0] for word in words if word.startswith('--')
            ]
            self.assertContainsSubset(used, flags[script])

  def flags_of(self, script: str) -> list[str]:
    help_run = subprocess.run(
      (sys.executable, str(ROOT / script), '--help'),
      capture_output=True,
      text=True,
    )
    self.assertEqual(help_run.returncode, 0, help_run.stderr)
    plain = re.findall(r'^ +(--\w+)=.*$', help_run.stdout, re.M)
    booleans = re.findall(r'^ +--\[no\](\w+)$', help_run.stdout, re.M)
    negated = [f'--no{name}' for name in booleans]
    return plain + negated + [f'--{name}' for name in booleans]

  def test_first_screen(self):
    readme = (ROOT / 'README.md').read_text(encoding='utf-8')
    first = '\n'.join(readme.splitlines()[:45])
    self.assertIn('make demo', first)
    self.assertIn('make test', first)

  def test_smoke_set_exists(self):
    makefile = (ROOT / 'Makefile').read_text(encoding='utf-8')
    (names,) = re.findall(
      r'^SMOKE_TESTS := (.*)', makefile.replace('\\\n', ' '), re.M
    )
    for name in names.split():
      self.assertTrue((ROOT / name).exists(), name)

  def test_no_file_names_a_machine_path(self):
    names = own_files()
    if names is None:
      self.skipTest('Outside a git checkout nothing says what is ours.')
    for name in names:
      path = ROOT / name
      if name in MAY_LEAD_OUT or not path.is_file():
        continue
      try:
        text = path.read_text(encoding='utf-8')
      except UnicodeDecodeError:
        continue  # Weights and pictures.
      with self.subTest(name):
        self.assertEqual(leads_out(text, name.count('/')), [])

  @parameterized.parameters(
    ('see ../x', 0, ['../']),
    ('see ' + 2 * '../' + 'x', 1, [2 * '../']),
    ('see ../x', 1, []),
    ("open('/" + "home/me/x')", 0, ['/' + 'home']),
    ('https://example.org/home/x', 0, []),
    ('~/.cache/specjax', 0, []),
  )
  def test_leaving_the_folder_is_seen(self, text, depth, expected):
    # Two paths are put together above, lest this file accuse itself.
    self.assertEqual(leads_out(text, depth), expected)


if __name__ == '__main__':
  absltest.main()

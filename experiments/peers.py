"""Another program on the same weights and prompts, in a process of its own.

It speaks JSON, one object a line: it is sent the job, answers {"ready": ...},
and for every {"round": n} it times all its modes on all prompts and answers
{"about": ..., "modes": [{"mode", "num_draft_tokens", "seconds"}, ...]}, with
the seconds of each prompt. {"error": sentence} ends it. Between rounds it waits
and uses no processor, so its repeats alternate with ours. What it has to say to
people goes to stderr.
"""

import importlib.util
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

PROGRAMS = {'transformers': 'peer_transformers.py'}
_NEEDS = {'transformers': ('torch', 'transformers', 'accelerate')}


def check(name: str, target: str, draft: str | None):
  """Raises ValueError unless the peer could run these models here."""
  for package in _NEEDS[name]:
    if importlib.util.find_spec(package) is None:
      raise ValueError(
        f'--peers={name} needs the package {package}: pip install '
        "'specjax[peers]'."
      )
  for model in filter(None, (target, draft)):
    path = pathlib.Path(model)
    is_file = path.suffix == '.gguf' and path.is_file()
    is_folder = (path / 'config.json').is_file()
    if not (is_file or is_folder or model.startswith('hf:')):
      raise ValueError(
        f'--peers={name} needs models in a .gguf file, a folder with '
        f'config.json, or hf:ORG/NAME, got {model!r}.'
      )


class Peer:
  """The program, from its start to its end.

  with Peer('transformers', job) as peer:
    answer = peer.round()
  """

  def __init__(
    self, name: str, job: dict[str, Any], command: Sequence[str] | None = None
  ):
    """Starts it and waits until it is ready.

    Args:
      name: a key of `PROGRAMS`.
      job: what it is told.
      command: what to run, if not the program of that name.

    Raises:
      ValueError: what the program says is wrong, or that it ended.
    """
    self._name = name
    if command is None:
      script = pathlib.Path(__file__).with_name(PROGRAMS[name])
      command = (sys.executable, str(script))
    self._process = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      encoding='utf-8',
    )
    self._num_rounds = 0
    try:
      self._ask(job)
    except BaseException:
      self._end()
      raise

  def __enter__(self) -> 'Peer':
    return self

  def __exit__(self, *exc_info):
    self._end()

  def round(self) -> dict[str, Any]:
    """Times everything once more."""
    self._num_rounds += 1
    return self._ask({'round': self._num_rounds})

  def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
    try:
      self._process.stdin.write(json.dumps(message) + '\n')
      self._process.stdin.flush()
    except BrokenPipeError:
      pass  # It has ended; what it wrote before says why.
    line = self._process.stdout.readline()
    if not line:
      code = self._process.wait()
      raise ValueError(
        f'the peer {self._name} ended with exit code {code} before it answered.'
      )
    try:
      answer = json.loads(line)
    except ValueError:
      answer = None
    if not isinstance(answer, dict):
      raise ValueError(f'the peer {self._name} answered {line!r:.80}.')
    if 'error' in answer:
      raise ValueError(f'the peer {self._name}: {answer["error"]}')
    return answer

  def _end(self):
    """Its input ends, and so does it."""
    try:
      self._process.stdin.close()
    except BrokenPipeError:
      pass
    try:
      self._process.wait(timeout=5)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    self._process.stdout.close()

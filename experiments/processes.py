"""Several processes that run one program on the devices of all of them.

JAX does the work: `jax.distributed.initialize` lets them find each other, and
watches over them. Here is what people see: process 0 alone writes, and when a
process dies, the others end with a sentence instead of waiting.
"""

import contextlib
import hashlib
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import jax
import numpy as np
from absl import flags
from jax.experimental import multihost_utils

from experiments.progress import Progress

MAX_PROCESSES = 4096
JOIN_SECONDS = 25  # For all processes to appear.
# A silent peer is given up after this; one that died is noticed at once.
HEARTBEAT_SECONDS = 20
SHUTDOWN_SECONDS = 20  # For all to be done; they end together.
_LOST = re.compile('Gloo|NCCL|[Cc]oordination|[Hh]eartbeat|[Cc]onnection')


def define_flags(values: flags.FlagValues):
  flags.DEFINE_string(
    'coordinator',
    None,
    'HOST:PORT on which process 0 waits for the others.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'num_processes',
    None,
    'How many run this command, with --process_id counted from 0. They read '
    'the same files; process 0 alone prints and writes.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'process_id', None, 'Which of them this is.', flag_values=values
  )


def check(
  coordinator: str | None, num_processes: int | None, process_id: int | None
):
  """Raises ValueError unless all three are given and fit, or none is.

  >>> check('10.0.0.1:1234', 2, 2)
  Traceback (most recent call last):
  ...
  ValueError: process_id must be in 0..1, got 2.
  """
  given = [coordinator, num_processes, process_id]
  if given == [None] * 3:
    return
  if None in given:
    named = {
      '--coordinator': coordinator,
      '--num_processes': num_processes,
      '--process_id': process_id,
    }
    missing = ', '.join(name for name, x in named.items() if x is None)
    raise ValueError(
      '--coordinator, --num_processes and --process_id go together, got no '
      f'{missing}.'
    )
  host, _, port = coordinator.rpartition(':')
  if not host or not re.fullmatch('[0-9]{1,5}', port) or int(port) > 65535:
    raise ValueError(f'coordinator must be HOST:PORT, got {coordinator!r}.')
  if not 1 <= num_processes <= MAX_PROCESSES:
    raise ValueError(
      f'num_processes must be in 1..{MAX_PROCESSES}, got {num_processes}.'
    )
  if not 0 <= process_id < num_processes:
    raise ValueError(
      f'process_id must be in 0..{num_processes - 1}, got {process_id}.'
    )


@contextlib.contextmanager
def joined(
  coordinator: str | None, num_processes: int | None, process_id: int | None
) -> Iterator[None]:
  """Within it, the devices of all processes are there; stdout is process 0's.

  Nothing may have used a device before. With None for all three, nothing is
  done. A process that is lost ends the others with exit code 1, or 134 where
  JAX itself ends them, and one sentence behind whatever JAX had to say.

  Raises:
    ValueError: process 0 cannot listen on the coordinator's port.
  """
  if coordinator is None:
    yield
    return
  who = f'process {process_id} of {num_processes}'
  lost = _last_words(
    f'{who} ended early: it or another process was killed, failed, or could '
    'not be reached any more.'
  )
  Progress.is_silent = process_id > 0
  _join(coordinator, num_processes, process_id, who, lost)
  with _own_stdout(process_id == 0):
    try:
      yield
    except jax.errors.JaxRuntimeError as error:
      if not _LOST.search(str(error)):
        raise
      sys.stdout.flush()
      # Not the ordinary way out: that would wait for those who are gone.
      os._exit(1)
    except BaseException:
      _silence(lost)  # Whoever catches it says what is wrong.
      raise
    jax.distributed.shutdown()
  _silence(lost)


def check_same(what: object):
  """Raises ValueError, everywhere, unless all processes have an equal value.

  Processes that decode different prompts would write a mixture of texts.

  Args:
    what: anything whose `repr` says all of it.
  """
  if jax.process_count() == 1:
    return
  digest = hashlib.sha256(repr(what).encode()).digest()
  own = np.frombuffer(digest, np.uint32)
  everyones = multihost_utils.process_allgather(own)
  others = np.flatnonzero(np.any(everyones != everyones[0], axis=1))
  if len(others):
    raise ValueError(
      'all processes must have the same flags and prompts, '
      f'process {others[0]} has others than process 0.'
    )


def leave(code: int):
  """`sys.exit` for a program that may have been `joined`.

  An error ends this process without waiting for the others, who may know
  nothing of it; they notice.
  """
  if code and jax.distributed.is_initialized():
    sys.stdout.flush()
    sys.stderr.flush()
    if jax.process_index() == 0:
      # When the coordinator goes, JAX ends the others, whatever they are
      # about to say.
      time.sleep(1)
    os._exit(code)
  sys.exit(code)


def _last_words(sentence: str) -> subprocess.Popen:
  """A process that says the sentence once this one has died.

  JAX ends a process from a thread of its own when the coordinator is gone, in
  which no Python runs any more; and a killed process cannot speak.
  """
  sentence = f'{os.path.basename(sys.argv[0])}: {sentence}'
  return subprocess.Popen(
    ('sh', '-c', f'read -r _ || echo {shlex.quote(sentence)} >&2'),
    stdin=subprocess.PIPE,
    stdout=subprocess.DEVNULL,
    start_new_session=True,  # Ctrl-C is not for it.
  )


def _silence(lost: subprocess.Popen):
  with contextlib.suppress(BrokenPipeError):
    lost.communicate(b'\n')


def _join(
  coordinator: str,
  num_processes: int,
  process_id: int,
  who: str,
  lost: subprocess.Popen,
):
  def give_up():
    # JAX would end the process with a stack of C++ calls.
    print(
      f'{os.path.basename(sys.argv[0])}: {who} waited {JOIN_SECONDS} s at '
      f'{coordinator} and the others did not all come.',
      file=sys.stderr,
      flush=True,
    )
    _silence(lost)
    os._exit(1)

  timer = threading.Timer(JOIN_SECONDS, give_up)
  timer.daemon = True
  timer.start()
  # Programs that run side by side on CPU devices may send in another order
  # in each process, and then wait for each other for ever.
  jax.config.update('jax_cpu_enable_async_dispatch', False)
  # It would catch SIGTERM, which is meant to end a process.
  jax.config.update('jax_enable_preemption_service', False)
  try:
    jax.distributed.initialize(
      coordinator,
      num_processes,
      process_id,
      cluster_detection_method='deactivate',
      initialization_timeout=2 * JOIN_SECONDS,
      heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
      shutdown_timeout_seconds=SHUTDOWN_SECONDS,
    )
  except jax.errors.JaxRuntimeError as error:
    _silence(lost)
    reason = str(error).splitlines()[0]
    raise ValueError(
      f'{who} cannot use --coordinator={coordinator}: {reason}.'
    ) from None
  finally:
    timer.cancel()


@contextlib.contextmanager
def _own_stdout(is_first: bool) -> Iterator[None]:
  """Python's stdout of process 0 alone, without what libraries print.

  (Gloo tells stdout about its connections.)
  """
  sys.stdout.flush()
  own = os.dup(1)
  nothing = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nothing, 1)
  try:
    with (
      os.fdopen(own if is_first else nothing, 'w', closefd=False) as out,
      contextlib.redirect_stdout(out),
    ):
      yield
  finally:
    os.dup2(own, 1)
    os.close(own)
    os.close(nothing)

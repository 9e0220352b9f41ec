"""Compiled programs are kept from one start to the next, in the user's cache.

JAX does the work; here it is told where. Its own settings win: a folder in
JAX_COMPILATION_CACHE_DIR, or JAX_ENABLE_COMPILATION_CACHE=false. Entries are
found by program, compiler flags, versions and device, and never change a
result; deleting the folder is always safe.
"""

import os
import pathlib

import jax

# Programs that compile faster are not worth a file: on a CPU, the decode loop
# of a model of two layers takes a second.
_MIN_SECONDS = 0.5


def folder() -> pathlib.Path:
  """$XDG_CACHE_HOME/specjax/compiled, or ~/.cache/specjax/compiled."""
  cache = os.environ.get('XDG_CACHE_HOME', '')
  # The XDG specification: a relative path is to be ignored.
  if not os.path.isabs(cache):
    cache = os.path.expanduser('~/.cache')
  return pathlib.Path(cache, 'specjax', 'compiled')


def use():
  """Turns it on for this process, before anything is compiled.

  Raises:
    OSError: the folder cannot be made or is closed; nothing is turned on.
  """
  is_wanted = jax.config.jax_enable_compilation_cache
  if not is_wanted or jax.config.jax_compilation_cache_dir is not None:
    return
  path = folder()
  path.mkdir(parents=True, exist_ok=True)
  if not os.access(path, os.W_OK | os.X_OK):
    raise PermissionError(13, 'Permission denied', str(path))
  jax.config.update('jax_compilation_cache_dir', str(path))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', _MIN_SECONDS)

"""What pytest does between two test files."""

import gc
import pathlib

import jax
import pytest

# Every compiled program takes eight or so of the 65,530 memory maps that Linux
# allows a process; without a free one the compiler crashes.
_MANY_MAPS = 15_000


@pytest.fixture(scope='module', autouse=True)
def forget_compiled_programs():
  """Drops what earlier files have compiled once it takes much room."""
  yield
  maps = pathlib.Path('/proc/self/maps')
  if maps.exists() and maps.read_bytes().count(b'\n') > _MANY_MAPS:
    jax.clear_caches()
    gc.collect()

"""What a result depends on besides its configuration."""

import datetime
import os
import pathlib
import platform
import subprocess
from typing import Any

import flax
import jax
import jaxlib
import numpy as np

import specjax

ROOT = pathlib.Path(__file__).resolve().parents[1]


def environment() -> dict[str, Any]:
  """Versions, device, commit and time."""
  device = jax.devices()[0]
  revision, is_clean = _git()
  return {
    'specjax': specjax.__version__,
    'python': platform.python_version(),
    'jax': jax.__version__,
    'jaxlib': jaxlib.__version__,
    'flax': flax.__version__,
    'numpy': np.__version__,
    'platform': device.platform,
    'device_kind': device.device_kind,
    'device_count': jax.device_count(),
    'cpu_count': os.cpu_count(),
    'git_revision': revision,
    'git_clean': is_clean,
    'date': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
  }


def _git() -> tuple[str | None, bool | None]:
  """Revision and whether nothing is changed; (None, None) outside git."""

  def git(*command: str) -> str:
    return subprocess.run(
      ('git', '-C', str(ROOT), *command),
      capture_output=True,
      check=True,
      text=True,
      timeout=10,
    ).stdout.strip()

  try:
    # An unpacked archive inside another repository has no revision of its own.
    if pathlib.Path(git('rev-parse', '--show-toplevel')).resolve() != ROOT:
      return None, None
    return git('rev-parse', 'HEAD'), not git('status', '--porcelain')
  except (OSError, subprocess.SubprocessError):
    return None, None

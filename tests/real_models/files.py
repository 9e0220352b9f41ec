"""Where the tests look for real models, and how they say what is missing."""

import os
import pathlib
import sys
import unittest

SMOLLM2 = 'smollm2-135m-instruct-q4_1.gguf'
GEMMA = 'gemma-3-270m-q4_k_m.gguf'
QWEN_DRAFT = 'qwen2.5-coder-0.5b-instruct-q4_k_m.gguf'
QWEN_TARGET = 'qwen2.5-coder-1.5b-instruct-q4_k_m.gguf'


def find(name: str) -> str:
  """Path of a model file; skips the test, loudly, if it is not there."""
  folder = pathlib.Path(
    os.environ.get('SPECJAX_MODELS') or '~/.cache/specjax/models'
  ).expanduser()
  path = folder / name
  if not path.exists():
    message = f'{name} is not in {folder} (SPECJAX_MODELS)'
    print(f'\n!!!! SKIPPED: {message}', file=sys.stderr)
    raise unittest.SkipTest(message)
  return str(path)

"""What specjax is called, what it needs, and what may be added to it."""

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent

MODELS = ['safetensors', 'tokenizers', 'gguf', 'jinja2', 'huggingface_hub']


def version() -> str:
  """The version, read as text: importing it would need the dependencies."""
  text = (ROOT / 'specjax' / '__init__.py').read_text(encoding='utf-8')
  return re.search(r"^__version__ = '([^']+)'$", text, re.MULTILINE).group(1)


setuptools.setup(
  name='specjax',
  version=version(),
  description='A laboratory for speculative decoding in JAX.',
  long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  python_requires='>=3.11',
  # Given by name, the folder itself goes on the path of an editable install,
  # and `from experiments import common` works in scripts as in tests.
  package_dir={'': '.'},
  packages=setuptools.find_packages(include=['specjax', 'specjax.*']),
  # 0.10.2 is the last jax for Python 3.11; BUILD_NOTES.md has what was tried.
  install_requires=[
    'jax>=0.10.2',
    'flax>=0.12.8',
    'optax>=0.2.8',
    'orbax-checkpoint>=0.12.8',
    'numpy>=2.0',
    'absl-py>=2.1',
  ],
  extras_require={
    'models': MODELS,
    # ruff is held to one series: another one may format differently.
    'test': ['pytest>=8.4', 'pytest-xdist', 'ruff==0.17.*', *MODELS],
    'notebooks': ['jupyterlab', 'matplotlib'],
    # Compiles for TPUs without one; keep it out of the test environment.
    'tpu-aot': ['jax[tpu]>=0.10.2'],
    'plots': ['matplotlib'],
    # What experiments/benchmark.py times beside specjax.
    'peers': ['torch', 'transformers', 'accelerate'],
  },
)

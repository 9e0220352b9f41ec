"""What specjax is called, what it needs, and what may be added to it.

Where a C++ compiler is found, specjax/kernels/products.cc is compiled. It is
optional: whatever goes wrong with it, the install goes on, and XLA does the
products instead.
"""

import importlib.metadata
import pathlib
import re
import shutil
import sys
import sysconfig

import setuptools

ROOT = pathlib.Path(__file__).parent

HEADERS = ('products', 'products_avx2', 'products_avx512')
JAX = 'jax>=0.10.2'
PLOTS = 'matplotlib>=3.8'
MODELS = ['safetensors', 'tokenizers', 'gguf', 'jinja2', 'huggingface_hub']


def version() -> str:
  """The version, read as text: importing it would need the dependencies."""
  text = (ROOT / 'specjax' / '__init__.py').read_text(encoding='utf-8')
  return re.search(r"^__version__ = '([^']+)'$", text, re.MULTILINE).group(1)


def jaxlib() -> importlib.metadata.Distribution | None:
  """The jaxlib to compile for.

  That of the environment which specjax is installed into, also where pip
  hides its packages from the build; or else the build's own.
  """
  places = [sysconfig.get_path('platlib'), *sys.path]
  found = importlib.metadata.distributions(name='jaxlib', path=places)
  return next(iter(found), None)


def has_compiler() -> bool:
  return any(map(shutil.which, ('c++', 'g++', 'clang++')))


def kernels() -> list[setuptools.Extension]:
  """A plain shared library: it is loaded with ctypes, never imported."""
  library = jaxlib()
  if library is None or not has_compiler():
    return []
  return [
    setuptools.Extension(
      'specjax.kernels._products',
      sources=['specjax/kernels/products.cc'],
      depends=[f'specjax/kernels/{name}.h' for name in HEADERS],
      include_dirs=[str(library.locate_file('jaxlib/include'))],
      define_macros=[('JAXLIB_VERSION', f'"{library.version}"')],
      # Without contraction a float sum rounds alike in every copy of a loop;
      # integer sums wrap, as those of XLA do.
      extra_compile_args=[
        *('-std=c++17', '-O3', '-w', '-ffp-contract=off', '-fwrapv')
      ],
      extra_link_args=['-pthread'],
      language='c++',
      optional=True,
    )
  ]


setuptools.setup(
  name='specjax',
  version=version(),
  description='A laboratory for speculative decoding in JAX.',
  long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  python_requires='>=3.11',
  # Given by name, the folder itself goes on the path of an editable install,
  # and `from experiments import script` works in scripts as in tests.
  package_dir={'': '.'},
  packages=setuptools.find_packages(include=['specjax', 'specjax.*']),
  package_data={'specjax.models': ['demo/*', 'demo/*/*']},
  ext_modules=kernels(),
  # Asked for by pip before it builds: a fresh environment has no jaxlib yet,
  # and its headers are needed.
  setup_requires=[JAX] if has_compiler() and not jaxlib() else [],
  # 0.10.2 is the last jax for Python 3.11; BUILD_NOTES.md has what was tried.
  install_requires=[
    JAX,
    'flax>=0.12.8',
    'optax>=0.2.8',
    'orbax-checkpoint>=0.12.8',
    'numpy>=2.0',
    'absl-py>=2.1',
  ],
  extras_require={
    'models': MODELS,
    # ruff is held to one series: another one may format differently.
    'test': ['pytest>=8.4', 'pytest-xdist', 'ruff==0.17.*', PLOTS, *MODELS],
    # experiments/reference.py writes Markdown as this series reads it.
    'docs': ['pdoc==16.*'],
    'notebooks': ['jupyterlab', PLOTS],
    # Compiles for TPUs without one; keep it out of the test environment.
    'tpu-aot': ['jax[tpu]>=0.10.2'],
    'plots': [PLOTS],
    # What experiments/benchmark.py times beside specjax.
    'peers': ['torch', 'transformers', 'accelerate'],
  },
)

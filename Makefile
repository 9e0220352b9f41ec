# Everything here needs python3 (3.11 or newer), make and git only.
#   make PYTHON=python3.12 test      another interpreter
#   make TEST_JOBS=1 test            tests in one process
PYTHON ?= python3
TEST_JOBS ?= 2

VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

# The smoke set: one file per part, run on the newest jax as well.
SMOKE_TESTS := tests/layers_test.py tests/noise_test.py tests/sampling_test.py \
  tests/verify/chain_test.py tests/models/transformer_test.py \
  tests/models/checkpoints/gguf_test.py tests/decode_test.py \
  tests/experiments/script_test.py
SMOKE_PYTHON ?= $(shell ./.ci/find_python 3.12)

# What needs torch or real model files.
PARITY_TESTS := $(sort $(shell find tests -name '*parity_test.py' -o \
  -path 'tests/real_models/*_test.py'))

# What an environment is made anew for: a dependency may have changed, or what
# is compiled.
BUILT_FROM := setup.py pyproject.toml $(wildcard specjax/kernels/*.cc \
  specjax/kernels/*.h)

SAY := @printf '\n== %s\n'
VERSIONS := import importlib.metadata as m, platform; \
  found = {d.name: d.version for d in m.distributions()}; \
  print('python', platform.python_version(), *(f'{n} {found[n]}' for n in \
  ('jax', 'jaxlib', 'flax', 'numpy', 'torch', 'transformers') if n in found))

.PHONY: help setup demo test lint doctest docs unit certify parity smoke aot clean
.NOTPARALLEL:

help:
	@echo 'make demo     set up, then watch a draft propose and a target verify'
	@echo 'make test     set up, then format, lint, doctests, docs, tests, certificate'
	@echo 'make setup    only the virtual environment $(VENV)'
	@echo 'make lint     only format and lint'
	@echo 'make doctest  only the examples in docstrings'
	@echo 'make docs     the API reference, into build/docs'
	@echo 'make unit     only the test suite'
	@echo 'make certify  the full certificate (make test runs the quick one)'
	@echo 'make parity   compare with transformers (downloads torch), real models'
	@echo 'make smoke    a few tests on the newest jax under Python 3.12'
	@echo 'make aot      compile for TPU slices that are not here (hours, 1 GB)'
	@echo 'make clean    remove the virtual environments and caches'

setup: $(READY)

$(READY): $(BUILT_FROM)
	$(SAY) 'Setting up $(VENV) with $(PYTHON) (once; a minute or two)'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo '$(PYTHON) must be Python 3.11 or newer, got:' \
	    "$$($(PYTHON) --version)." >&2; exit 1; }
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install -qq --disable-pip-version-check -e '.[test,docs]'
	@touch $@
	@$(RUN) -c "$(VERSIONS)"

demo: $(READY)
	@$(RUN) experiments/demo.py

test: lint doctest docs unit
	$(SAY) 'Certificate, quick'
	@$(RUN) experiments/certify.py --quick

lint: $(READY)
	$(SAY) 'Format and lint'
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check .

doctest: $(READY)
	$(SAY) 'Doctests'
	@$(RUN) -m pytest -q --doctest-modules specjax experiments

docs: $(READY)
	$(SAY) 'API reference'
	@rm -rf build/docs
	@$(RUN) experiments/reference.py --out=build/docs

unit: $(READY)
	$(SAY) 'Tests'
	@$(RUN) -c "$(VERSIONS)"
	@# A file stays in one process: its tests share what they have compiled.
	@$(RUN) -m pytest --ignore=tests/real_models \
	  $(if $(filter-out 1,$(TEST_JOBS)),-n $(TEST_JOBS) --dist=loadfile)

certify: $(READY)
	@$(RUN) experiments/certify.py

# torch comes first: transformers adapts to the one it finds.
.venv-peers/.ready: $(BUILT_FROM)
	$(SAY) 'Setting up .venv-peers with torch and transformers (minutes)'
	@rm -rf .venv-peers
	@$(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install -qq --disable-pip-version-check \
	  torch==2.13.0
	@.venv-peers/bin/python -m pip install -qq --disable-pip-version-check \
	  -e '.[test,peers]'
	@touch $@

parity: .venv-peers/.ready
	$(if $(PARITY_TESTS),,$(error there are no parity tests))
	$(SAY) 'Parity with transformers, and real models'
	@.venv-peers/bin/python -c "$(VERSIONS)"
	@# A process for each: two files together would hold four models at once.
	@set -e; for file in $(PARITY_TESTS); do \
	  .venv-peers/bin/python -m pytest -s "$$file"; done

.venv-312/.ready: $(BUILT_FROM)
	@test -n '$(SMOKE_PYTHON)' || \
	  { echo 'make smoke needs Python 3.12: set SMOKE_PYTHON.' >&2; exit 1; }
	$(SAY) 'Setting up .venv-312 with $(SMOKE_PYTHON)'
	@rm -rf .venv-312
	@$(SMOKE_PYTHON) -m venv .venv-312
	@.venv-312/bin/python -m pip install -qq --disable-pip-version-check \
	  -e '.[test]'
	@touch $@

smoke: .venv-312/.ready
	$(SAY) 'Smoke set on the newest jax'
	@.venv-312/bin/python -c "$(VERSIONS)"
	@.venv-312/bin/python -m pytest $(SMOKE_TESTS)

# libtpu holds the compiler for TPUs; it must not meet the tests, which run on
# CPU, so it has an environment of its own.
.venv-tpu/.ready: $(BUILT_FROM)
	$(SAY) 'Setting up .venv-tpu with libtpu (minutes)'
	@rm -rf .venv-tpu
	@$(PYTHON) -m venv .venv-tpu
	@.venv-tpu/bin/python -m pip install -qq --disable-pip-version-check \
	  -e '.[tpu-aot]'
	@touch $@

# AOT_ONLY=qwen3 compiles a few rows of the table.
aot: .venv-tpu/.ready
	@.venv-tpu/bin/python experiments/compile_table.py --only='$(AOT_ONLY)'

clean:
	rm -rf .venv .venv-peers .venv-312 .venv-tpu .pytest_cache .ruff_cache \
	  *.egg-info build specjax/kernels/*.so

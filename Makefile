# make all: kernels -> mla_rt/code_objects/<arch>/<stem>.co    make demo | test | peers | examples | docs | performance | lint | wheel | clean
# Needs python3 (3.10 or newer, with venv) and make. Everything else is installed into .venv.

PYTHON ?= python3
ARCHES ?= gfx950
# The batch that `make demo` decodes. If none is named and this one is not there, the demo makes its own.
ifeq ($(origin BATCH),undefined)
BATCH  := $(wildcard ../shared/data/minilm_mla_layer5.npz)
endif

PY      := .venv/bin/python
STAMP   := .venv/installed
KERNELS := $(wildcard src/hip/*.hip)
OBJECTS := $(foreach arch,$(ARCHES),$(KERNELS:src/hip/%.hip=mla_rt/code_objects/$(arch)/%.co))
# Left over from kernels that are gone: the wheel would carry them.
STALE   := $(filter-out $(OBJECTS),$(foreach arch,$(ARCHES),$(wildcard mla_rt/code_objects/$(arch)/*.co)))

.DELETE_ON_ERROR:
.PHONY: all demo test peers examples docs performance lint wheel clean remove-stale

all: $(OBJECTS) $(if $(STALE),remove-stale)

define code_objects_of
mla_rt/code_objects/$(1)/%.co: src/hip/%.hip $$(wildcard src/hip/*.h) scripts/build_kernels.py $(STAMP)
	@$(PY) scripts/build_kernels.py --arch $(1) --out-dir $$(@D) $$<
endef
$(foreach arch,$(ARCHES),$(eval $(call code_objects_of,$(arch))))

remove-stale:
	rm -f $(STALE)

# --clear: neither what an older pyproject.toml asked for nor the links of another Python may linger.
$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: no '$(PYTHON)' found: install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and "make: Python 3.10 or newer is needed, $(PYTHON) is %d.%d; name another: make PYTHON=python3.12" % v[:2])'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: $(PYTHON) has no venv module (Debian, Ubuntu: apt install python3-venv), or name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Installing Python packages into .venv (about 150 MB to download, once)"
	@$(PYTHON) -m venv --clear .venv
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: all
	@$(PY) -m mla_rt demo $(BATCH)

# The probe first: on a GPU, nothing else can be trusted where it contradicts what the kernels assume.
test: all
	$(PY) -m mla_rt probe
	$(PY) -m pytest -n auto

# AMD's own kernels on the emulator. They are fetched (40 MB, once); without the package registry the tests skip.
peers: all
	$(PY) -m pytest -m peers tests/peers
	@cat build/peers/report.txt 2>/dev/null || true

# JAX as another owner of arrays. It is fetched (125 MB, once); everything else of examples/ is run by `make test`.
examples: all
	$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[examples]'
	JAX_PLATFORMS=cpu $(PY) -m pytest -k jax tests/test_interop_consumers.py tests/test_examples.py

# The pages of docs/ and the docstrings as a site, build/site/index.html; a warning is an error. Sphinx is fetched (10 MB, once).
docs: $(STAMP)
	@rm -rf build/site
	$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	$(PY) -m sphinx --quiet --fail-on-warning --fresh-env --builder html --doctree-dir build/doctrees docs build/site

# docs/kernels.md and docs/performance.md: ours and AMD's kernels under the model. About ten minutes the first time, for counting AMD's.
performance: all
	$(PY) scripts/write_kernels.py
	$(PY) scripts/write_performance.py

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m mypy

# SOURCE_DATE_EPOCH: the files in the wheel bear one date (1980, the first that zip knows), so that equal contents give equal bytes.
wheel: all
	@rm -rf build/lib build/bdist.* dist
	SOURCE_DATE_EPOCH=315532800 $(PY) -m build --wheel --no-isolation

# Keeps .venv, which is a download.
clean:
	rm -rf build dist mla_rt/code_objects mla_rt.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find mla_rt tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

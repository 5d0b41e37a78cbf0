# Two commands on a fresh machine: `make run` and `make test`. Each makes .venv first.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# Real data for tests and benchmarks, where there is some; they skip with a reason, or use embedded data, where not.
PACELINE_DATA ?= $(abspath $(wildcard ../shared/data))
export PACELINE_DATA
# Compiled modules are kept, as by default: hundreds of programs that tests start would each compile them anew.
unexport PYTHONDONTWRITEBYTECODE
# A file's tests in one process, as they share runs; the longest files first, in the order of tests/conftest.py. Three for two
# cores, as tests wait for each other's processes a third of their time.
ON_TWO_CORES := -n 3 --dist loadfile --no-loadscope-reorder
# NumPy's threads spin while they wait for each other: beside other processes, tests/algorithms/topology takes 9 s for 2 s of work.
test quick test-integrations test-versions soak: export OPENBLAS_NUM_THREADS := 1
# PyTorch's threads spin, too, in programs that have one for each core as by default: asleep they wait as well.
test quick test-integrations test-versions soak: export OMP_WAIT_POLICY := passive

.PHONY: help run test quick test-integrations test-versions test-wheel soak soak-integrations lint bench gpu docs clean

help:
	@echo "make run    install into .venv, train digits with six algorithms, compare them; then one slow worker, next to DDP"
	@echo "make test   every test, in some thirty minutes on two cores"
	@echo "make quick  all but contracts, docs and tests in processes: some twenty minutes"
	@echo "make test-integrations  Lightning, Accelerate, Ray, Spark, notebooks, TensorBoard, in an environment of their own"
	@echo "make test-versions      with the oldest and the newest PyTorch and NumPy; writes docs/tested_versions.md"
	@echo "make test-wheel         builds the wheel, and uses it in an empty environment"
	@echo "make soak   marathons: workers killed again and again, command lines drawn by the thousand"
	@echo "make lint   ruff, pyright, import-linter"
	@echo "make docs   the documentation's site, in site/index.html; a warning is an error"
	@echo "make gpu    tests and speeds on this machine's GPUs; writes benchmarks/results/gpu.md"
	@echo "make bench  speed against plain PyTorch loops, as ratios"
	@echo "make clean  remove .venv, runs, the site and caches"

run: $(VENV)/installed
	@rm -rf runs/first
	$(BIN)/paceline compare --task digits-mlp --workers 2 --out runs/first \
	  --algorithm "sequential,lockstep,locked(kind=mutex),locked(kind=rwlock),hogwild,leashed"
	$(BIN)/python benchmarks/head_to_head.py --small

test: $(VENV)/installed
	$(BIN)/python -m pytest -m "not soak" $(ON_TWO_CORES)

quick: $(VENV)/installed
	$(BIN)/python -m pytest -m "not soak" $(ON_TWO_CORES) \
	  --ignore tests/contracts --ignore tests/documentation --ignore tests/processes

# With the real packages, in an environment of their own, which sees those of .venv: users of Paceline alone need none of them.
test-integrations: $(VENV)-integrations/installed
	$(VENV)-integrations/bin/python -m pytest tests/integrations -m "not soak"

$(VENV)-integrations/installed: pyproject.toml constraints.txt $(VENV)/installed
	test -x $(VENV)-integrations/bin/pip || $(BIN)/python -m venv --clear $(VENV)-integrations
	site='import sysconfig; print(sysconfig.get_path("purelib"))' && \
	  $(BIN)/python -c "$$site" > "$$($(VENV)-integrations/bin/python -c "$$site")/packages_of_venv.pth"
	$(VENV)-integrations/bin/python -m pip install --constraint constraints.txt --editable ".[lightning,notebook,spark,tensorboard]" \
	  "ray[train]" "pyspark[connect]" accelerate nbclient ipykernel
	touch $@

# VERSIONS="3.12-newest 3.13-newest" chooses some of the environments.
test-versions:
	$(PYTHON) .ci/test_versions.py $(VERSIONS)

test-wheel:
	$(PYTHON) .ci/test_wheel.py

soak: $(VENV)/installed
	PACELINE_SOAK_RESULTS=$(abspath benchmarks/results) $(BIN)/python -m pytest -m soak --timeout 3600 -v

# Spark with executors of its own, and what else takes long there.
soak-integrations: $(VENV)-integrations/installed
	$(VENV)-integrations/bin/python -m pytest tests/integrations -m soak

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo

gpu: $(VENV)/installed
	$(BIN)/python benchmarks/gpu.py

bench: $(VENV)/installed
	$(BIN)/python benchmarks/shared_memory.py

docs: $(VENV)/installed
	$(BIN)/python -m sphinx --fail-on-warning --nitpicky --fresh-env -b html docs site

# bin/pip is what a half-made environment lacks (Debian without python3-venv).
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV) || python3 -m venv --clear $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-integrations runs site docs/cards docs/generated docs/measured .pytest_cache .ruff_cache .hypothesis .import_linter_cache

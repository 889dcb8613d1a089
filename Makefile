# Every target does its own set-up first, and the second time that takes no time: see scripts/setup.py.
# PYTHON=... chooses the Python to build on; ARGS=... is passed on to the program that a target runs.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
# mypy refuses a folder without Python files.
TYPED := $(patsubst %/,%,$(sort $(dir $(wildcard tests/*.py examples/*.py benchmarks/*.py scripts/*.py docs/*.py))))

.DEFAULT_GOAL := help
.PHONY: help setup demo test pytest chaos lowest trainers wild lint docs bench bench-check bench-each clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## system packages, .venv and every extra (the other targets do it by themselves)
	@$(PYTHON) scripts/setup.py

demo: setup ## kill a training job in mid-epoch and continue it exactly; results in demo-output/
	PYTHONPATH=examples $(BIN)/python -m demo $(ARGS)

# Files go to the processes in the order of tests/conftest.py, the slowest first; a quarter of their time they wait,
# so three processes keep two cores busy.
test: setup ## ruff, mypy --strict and all tests, e.g. make test ARGS="-k sampler -x"
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=line lint pytest

# Tests start hundreds of interpreters, which need not compile midepoch each time.
test pytest chaos: export PYTHONDONTWRITEBYTECODE =

pytest: setup
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

chaos: setup ## the long forms of the tests too: whole matrices, many more kills and mutations
	MIDEPOCH_CHAOS=1 $(BIN)/python -m pytest $(ARGS)

# On x86_64, PyPI has torch 2.6 with CUDA alone: 3 GB, unless pip's settings name a place with the build for the CPU.
LOWEST := .venv/lowest
REQUIRED := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"])
LINKS := import midepoch, pathlib; print(pathlib.Path(midepoch.__file__).parents[1])

lowest: setup ## some tests on the lowest torch and numpy that pyproject.toml allows, in an environment of their own
	$(BIN)/python -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet $$($(BIN)/python -c '$(REQUIRED)' | sed 's/>=/==/g') \
	hypothesis pillow psutil pytest pytest-timeout scipy torchdata
	PYTHONPATH="$$($(BIN)/python -c '$(LINKS)')" $(LOWEST)/bin/python -m pytest \
	tests/unit/state/test_state.py tests/unit/order/test_order.py tests/unit/checkpoint/test_snapshot.py tests/backends/test_dataloader.py tests/unit/loader/test_iteration.py $(ARGS)

# Each list in scripts/$(1) into a folder of its own: without what its packages ask for, which is another torch for some.
define apart
@set -e; for list in scripts/$(1)/*.txt; do folder=.venv/$(1)/$$(basename $$list .txt); \
cmp -s $$list $$folder/installed.txt || { echo "installing $$folder"; rm -rf $$folder; \
$(BIN)/python -m pip install --quiet --no-deps --target $$folder -r $$list; cp $$list $$folder/installed.txt; }; done
endef

trainers: setup ## real runs of the trainers that have an environment of their own: Composer, Ray Train, torchtitan and others
	$(call apart,trainers)
	$(BIN)/python -m pytest tests/trainers/test_trainers.py $(ARGS)

wild: setup ## loaders of third-party packages, cut and continued: docs/sources.json
	$(call apart,wild)
	$(BIN)/python benchmarks/wild.py $(ARGS)

lint: setup ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/mypy -p midepoch
	$(BIN)/mypy $(filter-out scripts,$(TYPED))
	$(BIN)/mypy scripts

docs: setup ## the site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: setup ## midepoch beside its peers, and at scale: tables and plots into docs/benchmarks/
	$(BIN)/python benchmarks/compare.py $(ARGS)
	$(BIN)/python benchmarks/scale.py --json docs/benchmarks/scale.json

bench-check: setup ## whether a ratio has become more than 10 % worse than that in docs/benchmarks/
	$(BIN)/python benchmarks/compare.py --check $(ARGS)

bench-each: setup ## what each backend costs by itself: every other script in benchmarks/, one after the other
	set -e; for script in $$(grep -l __main__ benchmarks/*.py | grep -v -e compare.py -e peers.py -e scale.py -e wild); \
	do echo "== $$script"; $(BIN)/python $$script; done

clean: ## remove all that the set-up, the builds and the demonstration made
	rm -rf .venv build dist demo-output .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis

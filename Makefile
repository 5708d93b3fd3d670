# Every target works in a fresh checkout: scripts/setup makes .venv first and is a matter of
# milliseconds when nothing has changed since.

# The interpreter to make .venv with; python3.11, else python3, when it is left empty.
PYTHON ?=
export PYTHON

PY := .venv/bin/python
# More arguments for the command: make test ARGS="-k plan", make demo ARGS="--requests 8".
ARGS ?=

.PHONY: demo test check format bench bench-report setup clean

demo: setup
	$(PY) -m neuron_push.cli demo $(ARGS)

test: setup
	$(PY) -m pytest $(ARGS)

check: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench:
	@scripts/setup --bench
	$(PY) -m neuron_push.cli bench $(ARGS)

bench-report:
	@scripts/setup --bench
	scripts/bench-report $(ARGS)

setup:
	@scripts/setup

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist out
	rm -rf *.egg-info accel/*/*.egg-info accel/*/build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

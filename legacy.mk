# speculators 0.3.0 on vLLM 0.16: an environment of its own (8 GB, about 5 minutes) and the tests that run in it.
LEGACY_PYTHON ?= python3.11

.PHONY: .venv-legacy test-legacy
.venv-legacy: .venv-legacy/installed

.venv-legacy/installed: requirements-legacy.txt
	$(LEGACY_PYTHON) -m venv --clear .venv-legacy
	TMPDIR="$(CURDIR)/.venv-legacy" .venv-legacy/bin/pip install --quiet --no-deps -r requirements-legacy.txt
	touch $@

test-legacy: .venv-legacy/installed
	.venv-legacy/bin/python -m pytest tests/legacy --confcutdir=tests/legacy -o norecursedirs= -o "pythonpath=. tests"

# Short names for the commands of .ci/run, in the environment that is active.
.PHONY: check test docs

check:
	ruff check .
	ruff format --check .
	mypy
	lint-imports

test:
	pytest

docs:
	mkdocs build --strict -f docs/site/mkdocs.yml

.PHONY: check test bench docs format

check: ## lint, format, types, import law, generated docs
	.ci/check

test: ## every test, warnings as errors, coverage
	pytest --cov --cov-report=term

bench: ## one script for each claim of the README
	for script in benchmarks/*.py; do echo "== $$script"; python $$script || exit 1; done

docs: ## write the generated tables and help texts again
	python scripts/docs.py

format: ## what ruff can mend by itself
	ruff check --fix .
	ruff format .

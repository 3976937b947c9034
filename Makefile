.PHONY: setup check test sanitize tiles bench docs site wheel format

setup: ## the commit-msg hook, in this clone and its worktrees
	git config core.hooksPath .githooks

check: ## lint, format, types, import law, generated docs, circles between files, prose
	.ci/check

test: ## every test, warnings as errors, coverage
	pytest --cov --cov-report=term

sanitize: ## the kernels' tests under AddressSanitizer
	python scripts/kernel_builds.py sanitize

tiles: ## the AMX kernels' tests on emulated tiles
	python scripts/kernel_builds.py tiles

bench: ## the scripts that the README and its results name for their claims
	for module in $$(grep -oh 'benchmarks\.[a-z0-9_]*\.[a-z0-9_]*' README.md $(wildcard docs/results.md) | sort -u); do echo "== $$module"; python -m $$module || exit 1; done

docs: ## write the generated tables and help texts again
	python scripts/docs.py
	python scripts/rooms.py

site: ## the static site in build/site, by MkDocs Material; a broken link is an error
	mkdocs build --strict

wheel: ## a wheel in dist/ with the kernels for this torch, for machines without a compiler; needs the extra `wheel`
	python scripts/wheel.py

format: ## what ruff can mend by itself
	ruff check --fix .
	ruff format .

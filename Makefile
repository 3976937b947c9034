.PHONY: check test sanitize tiles bench docs format

check: ## lint, format, types, import law, generated docs
	.ci/check

test: ## every test, warnings as errors, coverage
	pytest --cov --cov-report=term

sanitize: ## the kernels' tests under AddressSanitizer
	python scripts/kernel_builds.py sanitize

tiles: ## the AMX kernels' tests on emulated tiles
	python scripts/kernel_builds.py tiles

bench: ## one script for each claim of the README
	for name in bundled_lm door outside ladder vision_cpu llm_cpu quantization numpy_kmeans; do echo "== $$name"; python benchmarks/$$name.py || exit 1; done

docs: ## write the generated tables and help texts again
	python scripts/docs.py

format: ## what ruff can mend by itself
	ruff check --fix .
	ruff format .

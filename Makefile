# The two commands of the README, and what a contributor runs. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUST := pyproject.toml Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name '*.toml')
SOURCES := $(RUST) $(shell find python kernels -name '*.py')

# Tests start hundreds of processes. Where this variable is set, each would compile the package's files again, a quarter of their CPU time.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# A CUDA device, as the NVIDIA driver shows it; on WSL it is /dev/dxg.
CUDA := $(wildcard /dev/nvidiactl /dev/dxg)

.PHONY: serve
serve: $(firstword $(wildcard $(VENV)/.developing) $(VENV)/.installed) ## set everything up and serve the default model at http://127.0.0.1:8000/v1 (ARGS="--port 9000" adds flags)
	$(BIN)/chairlift serve $(ARGS)

# Three processes: a test uses less than one core on average. ARGS="-n 0" runs all tests in one.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile

.PHONY: test
test: $(VENV)/.developing ## set everything up and pass every test
	cargo test --workspace
	SESSION_TURNS=all cargo test --workspace --test examples --quiet
	$(PYTEST) $(ARGS)

.PHONY: test-fast
test-fast: $(VENV)/.developing ## pass the Python tests that take little CPU time (without the marker `slow`)
	$(PYTEST) -m "not slow" $(ARGS)

.PHONY: property
property: ## run the scheduler's property test with a million cases (CASES=5000000 runs more)
	PROPERTY_CASES=$(or $(CASES),1000000) cargo test --release -p chairlift-core --test model

.PHONY: fuzz
fuzz: ## fuzz the scheduler for a minute (SECONDS=3600 for an hour)
	mkdir -p rust/core/fuzz/corpus
	cd rust/core/fuzz && cargo run --release -- corpus -max_total_time=$(or $(SECONDS),60) -max_len=4096

.PHONY: fuzz-files
fuzz-files: $(VENV)/.developing ## damage model files of each kind for a minute and read them (SECONDS=3600 for an hour each)
	FUZZ_SECONDS=$(or $(SECONDS),60) $(BIN)/python -m pytest --timeout 0 -s tests/checkpoint/test_damaged_files.py $(ARGS)

.PHONY: loom
loom: ## model-check the CPU kernels' thread pool with loom
	RUSTFLAGS="--cfg loom" cargo test --target-dir target/loom -p chairlift-cpu --lib loom_tests

.PHONY: miri
miri: ## run the CPU kernels' shared memory and KV cache tests under Miri (needs a nightly toolchain)
	@cargo +nightly miri --version >/dev/null 2>&1 || { \
	  echo "make miri needs a nightly toolchain with Miri: rustup toolchain install nightly --component miri" >&2; exit 1; }
	cargo +nightly miri test -p chairlift-cpu --lib -- aligned unsafe_slice cache

.PHONY: amx
amx: ## run the CPU kernels' tests on an emulated processor with AMX (Debian; more than an hour, ARGS="attention" runs some)
	rust/cpu/tests/amx.sh $(ARGS)

.PHONY: batch-kills
batch-kills: $(VENV)/.developing ## kill a server five times while it runs a batch of 10,000 requests
	BATCH_REQUESTS=10000 BATCH_KILLS=5 $(BIN)/python -m pytest -s --timeout 3000 tests/faults/test_batches.py -k kills $(ARGS)

.PHONY: disconnects
disconnects: $(VENV)/.developing ## let ten thousand clients leave a server, at any time and in any way (the tests: 1,000)
	DISCONNECTS=10000 $(BIN)/python -m pytest tests/faults/test_disconnects.py $(ARGS)

.PHONY: hostile
hostile: $(VENV)/.developing ## send every hostile and every wrong body to every route (minutes; the tests send a sample)
	HOSTILE=1 $(BIN)/python -m pytest tests/server/test_event_loop.py tests/server/test_confused_bodies.py $(ARGS)

.PHONY: schema-fuzz
schema-fuzz: $(VENV)/.developing ## run schemathesis against every route of a server with a scripted engine (EXAMPLES=15, minutes)
	test -x .venv-schemathesis/bin/schemathesis || { $(PYTHON) -m venv .venv-schemathesis && \
	  .venv-schemathesis/bin/pip install --quiet --disable-pip-version-check 'schemathesis==4.32.5'; }
	$(BIN)/python tests/conformance/schema_fuzz.py .venv-schemathesis/bin/schemathesis $(or $(EXAMPLES),15)

COMPILE_TESTS := $(addprefix tests/kernels/test_compile_,attention.py layers.py recurrent.py sampling.py)
INTERPRETED_TESTS := tests/kernels/test_interpreted.py tests/runner/test_cuda_graphs.py $(addprefix tests/benches/test_,equal_tokens.py gpu_dry.py)
LAUNCH_TESTS := $(addprefix tests/kernels/test_,cached_launch.py sampling_launch.py compile_watch.py) tests/runner/test_launcher.py

# Another Triton for these two, beside the installed one.
OTHER = $(abspath $(VENV))/triton-$(or $(TRITON),newest)
define OTHER_TRITON
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(OTHER) triton$(TRITON:%===%)
	PYTHONPATH=$(OTHER) $(BIN)/python -c "import triton; print('Triton', triton.__version__)"
endef

.PHONY: compile-gate
compile-gate: $(VENV)/.developing ## compile the GPU kernels for all head sizes, dtypes and devices, interpret all cases of their checks (no GPU needed; TRITON=3.4.0 compiles with that version)
	$(if $(TRITON),$(OTHER_TRITON))
	COMPILE_GATE=full $(if $(TRITON),PYTHONPATH=$(OTHER)) $(BIN)/python -m pytest $(COMPILE_TESTS) $(if $(TRITON),,$(INTERPRETED_TESTS)) $(ARGS)

.PHONY: compile-sample
compile-sample: $(VENV)/.developing ## compile a sample of them, and launch some, with another Triton (TRITON=3.4.0, by default the newest)
	$(OTHER_TRITON)
	PYTHONPATH=$(OTHER) $(BIN)/python -m pytest $(COMPILE_TESTS) $(LAUNCH_TESTS) $(ARGS)

.PHONY: check
check: check-rust check-python ## formatting, lints and types of both languages

.PHONY: check-rust
check-rust:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

.PHONY: check-python
check-python: $(VENV)/.developing
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

.PHONY: format
format: $(VENV)/.developing ## format all sources
	cargo fmt --all
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

.PHONY: bench
bench: $(VENV)/.developing ## time the scheduler and write benches/results/scheduler.md
	$(BIN)/python benches/scheduler.py

.PHONY: soak
soak: $(VENV)/.developing ## run honest tenants beside hostile ones for an hour and write benches/results/soak.md (SECONDS=60 for a minute)
	$(BIN)/python benches/soak.py --seconds $(or $(SECONDS),3600) $(ARGS)

.PHONY: conformance
conformance: $(VENV)/.developing ## run other projects' clients, unmodified, against the server (ARGS="openai llm" runs some)
	$(BIN)/python tests/conformance/run.py $(ARGS)

.PHONY: files
files: $(VENV)/.developing ## compare published vocabularies and tiny models with llama.cpp and transformers (downloads 37 MB once; minutes)
	$(BIN)/python tests/published/run.py
	$(BIN)/python tests/published/models.py $(ARGS)

.PHONY: docs-reference
docs-reference: $(VENV)/.developing ## write docs/reference, the table of docs/models.md and the chart of speed from code and results
	$(BIN)/python docs/generators/reference.py
	$(BIN)/python docs/generators/speed_chart.py
	$(BIN)/python docs/models_page.py

.PHONY: docs-pictures
docs-pictures: $(VENV)/.developing ## take the pictures of docs from real runs, with chromium (minutes; ARGS=FOLDER: the dashboard at each size)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check playwright
	$(BIN)/python docs/generators/dashboard_picture.py $(ARGS)
	$(if $(ARGS),,$(BIN)/python docs/generators/recording.py)

.PHONY: docs
docs: $(VENV)/.documenting ## build the documentation's site into site/ and check its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: wheel
wheel: $(BIN)/python ## build the wheel into dist/
	$(NEEDS_RUST)
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

.PHONY: lock
lock: ## renew the versions that the image installs, packaging/*.lock (PYTHON=python3.13, as in the image, on x86-64 Linux)
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet --disable-pip-version-check 'pip-tools>=7.5'
	.venv-lock/bin/python packaging/lock.py

.PHONY: clean
clean: ## remove what was built, and the virtual environments
	rm -rf $(VENV) .venv-conformance .venv-lock .venv-schemathesis dist site target python/chairlift/_core.abi3.so

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# As the extra `docs` says; without the package, which need not be compiled for it.
$(VENV)/.documenting: $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check 'mkdocs-material>=9.6,<10'
	touch $@

# An old version is refused by cargo itself, with the version that it needs.
define NEEDS_RUST
	@command -v cargo >/dev/null || { \
	  echo "Rust is not installed: curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh, then open a new shell" >&2; exit 1; }
endef

# A plain install for users, without torch where there is no CUDA device; an editable one, with the tools, for those who change things.
$(VENV)/.installed: $(BIN)/python $(SOURCES) packaging/cpu_wheel.py
	$(NEEDS_RUST)
	rm -rf $(VENV)/wheels
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(VENV)/wheels .
	$(if $(CUDA),,$(BIN)/python packaging/cpu_wheel.py $(VENV)/wheels/chairlift-*.whl)
	$(BIN)/pip uninstall --quiet --quiet --disable-pip-version-check --yes chairlift chairlift-cpu
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(echo $(VENV)/wheels/chairlift$(if $(CUDA),,_cpu)-*.whl)[gguf]"
	touch $@

$(VENV)/.developing: $(BIN)/python $(RUST)
	$(NEEDS_RUST)
	$(BIN)/pip uninstall --quiet --quiet --disable-pip-version-check --yes chairlift-cpu
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev]'
	touch $@

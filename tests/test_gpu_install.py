"""`make setup-gpu` as far as a CPU can test it: its steps, the Dockerfile, and a build without nvcc or headers."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.checkout import ROOT

DOCKERFILE = ROOT / "docker" / "Dockerfile"


def load_build_te() -> ModuleType:
    """tools/ is no package."""
    spec = importlib.util.spec_from_file_location("build_te", ROOT / "tools" / "build_te.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_te"] = module
    spec.loader.exec_module(module)
    return module


build_te = load_build_te()


def steps(target: str, tmp_path: Path) -> list[str]:
    """The commands that make would run for `target` on a machine without any environment."""
    done = subprocess.run(
        ["make", "-n", target, f"GPU_VENV={tmp_path}/venv"], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False, env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if not line.startswith(("touch", "echo"))]


def test_packages_are_the_lock_without_the_extension_and_never_a_cpu_build(tmp_path: Path) -> None:
    (packages,) = [line for line in steps("gpu-packages", tmp_path) if "gpu.lock" in line]
    command = packages.partition(" | ")[0]
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    lock = (ROOT / "requirements" / "gpu.lock").read_text().splitlines()
    installed = done.stdout.splitlines()
    assert [line for line in lock if line not in installed] == [
        "torch==2.13.0",
        next(line for line in lock if line.startswith("transformer-engine-torch==")),
    ]
    assert "torch===2.13.0" in installed and len(installed) == len(lock) - 1


def test_every_step_of_the_image_is_a_step_of_make(tmp_path: Path) -> None:
    """The image runs the steps in make's order, with the files that each needs, and ends with all of them done."""
    lines = DOCKERFILE.read_text().splitlines()
    targets = [line.removeprefix("RUN make ") for line in lines if line.startswith("RUN make ")]
    assert targets == ["gpu-packages", "gpu-te", "gpu-kernels", "setup-gpu"]
    whole = steps("setup-gpu", tmp_path)
    ordered = list(dict.fromkeys(step for target in targets for step in steps(target, tmp_path)))
    assert ordered == whole
    copied: list[str] = []
    for line in lines:
        if line.startswith("COPY "):
            *sources, place = line.split()[1:]
            copied += [source for source in sources if place in ("./", f"{Path(source).parent}/")]
        if line == "RUN make gpu-packages":
            assert copied == ["Makefile", "requirements/gpu.lock"]
        if line == "RUN make gpu-te":
            assert "tools/build_te.py" in copied
    assert all((ROOT / source).exists() for source in copied)


def write_site(site: Path, release: str | None = "13.0") -> None:
    """Write what requirements/gpu.lock installs of CUDA, as far as the build looks."""
    for header in ("cu13/include/cuda_runtime.h", "cudnn/include/cudnn.h", "nccl/include/nccl.h"):
        (site / "nvidia" / header).parent.mkdir(parents=True, exist_ok=True)
        (site / "nvidia" / header).touch()
    if release:
        write_nvcc(site / "nvidia" / "cu13", release)


def write_nvcc(home: Path, release: str) -> None:
    (home / "bin").mkdir(parents=True)
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(f'#!/bin/sh\n[ "$1" = -V ] && echo "Cuda compilation tools, release {release}, V{release}.88"\n')
    nvcc.chmod(0o755)


def test_the_build_uses_the_locked_packages(tmp_path: Path) -> None:
    write_site(tmp_path)
    added = build_te.build_environment(tmp_path, {"PATH": os.environ["PATH"], "CPATH": "/mine"}, 16, 10.0)
    nvidia = tmp_path / "nvidia"
    assert added["CUDA_HOME"] == str(nvidia / "cu13") and added["CUDNN_PATH"] == str(nvidia / "cudnn")
    assert added["CPATH"].split(":") == [str(nvidia / "cudnn" / "include"), str(nvidia / "nccl" / "include"), "/mine"]
    assert added["MAX_JOBS"] == "2"  # of 16 cores: 10 GiB
    assert added["NVTE_PYTORCH_FORCE_BUILD"] == "TRUE" and added["NVTE_WITH_NCCL_EP"] == "0"


def test_cuda_home_is_respected_if_it_is_cuda_13(tmp_path: Path) -> None:
    write_site(tmp_path)
    write_nvcc(tmp_path / "own", "13.2")
    write_nvcc(tmp_path / "old", "12.8")
    find = lambda home: build_te.find_nvcc(tmp_path, {"CUDA_HOME": str(tmp_path / home), "PATH": ""})  # noqa: E731
    assert find("own") == build_te.Nvcc(tmp_path / "own", "13.2")
    assert find("old").home == tmp_path / "nvidia" / "cu13"


def test_without_nvcc_of_the_right_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message says where it was looked for. An nvcc that this machine has counts as one of CUDA 12."""
    real = build_te._release
    monkeypatch.setattr(build_te, "_release", lambda nvcc: "12.8" if real(nvcc) else None)
    write_nvcc(tmp_path / "toolkit", "12.8")
    write_site(tmp_path, release=None)
    with pytest.raises(build_te.MissingPartError) as caught:
        build_te.build_environment(tmp_path, {"PATH": "", "CUDA_HOME": str(tmp_path / "toolkit")}, 2, 8.0)
    message = str(caught.value)
    assert "package nvidia-cuda-nvcc: no nvcc" in message and "Fix: pip install" in message
    assert f"CUDA_HOME: CUDA 12.8 at {tmp_path / 'toolkit'}" in message


@pytest.mark.parametrize("package", ["cudnn", "nccl"])
def test_a_missing_header_names_its_package(package: str, tmp_path: Path) -> None:
    write_site(tmp_path)
    shutil.rmtree(tmp_path / "nvidia" / package)
    with pytest.raises(build_te.MissingPartError, match=f"install nvidia-{package}-cu13"):
        build_te.build_environment(tmp_path, dict(os.environ), 2, 8.0)


def test_without_a_compiler_or_pythons_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_site(tmp_path)
    with pytest.raises(build_te.MissingPartError, match=r"apt-get install g\+\+"):
        build_te.build_environment(tmp_path, {"PATH": ""}, 2, 8.0)
    paths = {**sysconfig.get_paths(), "include": str(tmp_path / "none")}
    monkeypatch.setattr(build_te.sysconfig, "get_paths", lambda: paths)
    with pytest.raises(build_te.MissingPartError, match="python3-dev"):
        build_te.build_environment(tmp_path, dict(os.environ), 2, 8.0)


@pytest.mark.parametrize(("cuda", "message"), [(None, "built for CPUs"), ("12.8", "built for CUDA 12.8")])
def test_another_build_of_torch_is_refused(cuda: str | None, message: str) -> None:
    with pytest.raises(build_te.MissingPartError, match=message):
        build_te.check_torch(cuda)
    build_te.check_torch("13.0")


def test_on_this_environment_the_script_says_that_torch_is_a_cpu_build() -> None:
    import torch

    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "build_te.py"), "--print"], capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    if torch.version.cuda is None:
        assert done.returncode == 2 and "built for CPUs" in done.stderr and "Traceback" not in done.stderr
    else:
        assert "transformer-engine-torch==" in done.stdout

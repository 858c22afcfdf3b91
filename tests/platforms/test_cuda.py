"""The settings of a rank with a GPU, and their order, on a machine without one."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl import platforms
from megarl.platforms import Platform, platform
from megarl.platforms import platform as cuda
from tests.support.checkout import environment


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings that torch's allocator gets, with no variable of the user set."""
    for name in cuda.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    given: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    return given


def test_the_device_is_chosen_before_transformer_engine_is_imported(
    monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    """Transformer Engine makes a context on the current device when it is imported, by then this rank's own."""
    order: list[Any] = []
    monkeypatch.setattr(platform, "current", lambda: Platform(torch.device("cuda"), True, "nccl"))
    monkeypatch.setattr(torch.cuda, "set_device", order.append)
    monkeypatch.setattr(os, "environ", {"OWN": "1"})
    monkeypatch.setattr(platform, "_make_megatron_usable", lambda: order.append("imports"))
    platforms.activate(3)
    assert order == [3, "imports"] and settings == [cuda.EXPANDABLE_SEGMENTS]
    assert os.environ == {"OWN": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no pool of compilers in each rank


def test_without_cuda_nothing_is_set(monkeypatch: pytest.MonkeyPatch, settings: list[str]) -> None:
    monkeypatch.setattr(platform, "current", lambda: Platform(torch.device("cpu"), False, "gloo"))
    monkeypatch.setattr(platform, "_make_megatron_usable", lambda: None)
    platforms.activate(3)
    assert settings == []


@pytest.mark.parametrize("name", cuda.ALLOCATOR_VARIABLES)
def test_the_users_own_allocator_settings_stay(monkeypatch: pytest.MonkeyPatch, settings: list[str], name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    cuda.use_expandable_segments()
    assert settings == []


def test_this_torch_accepts_the_setting() -> None:
    code = "import torch; from megarl.platforms.platform import *; use_expandable_segments(); "
    code += "print(torch._C._accelerator_getAllocatorSettings())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == cuda.EXPANDABLE_SEGMENTS


def test_half_an_installation_of_transformer_engine_is_named(tmp_path: Path) -> None:
    """Its wheels alone lack the extension that has to be built, so the import raises FileNotFoundError."""
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("raise FileNotFoundError('Could not find shared object file: x.so')")
    code = "from megarl import platforms; platforms.activate()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(PYTHONPATH=f"{tmp_path}:{environment()['PYTHONPATH']}"),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "InstallationError" in last and "FileNotFoundError: Could not find" in last and "make setup-gpu" in last


def test_transformer_engine_finds_the_packages_libraries_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next to a CUDA toolkit it would load the toolkit's NVRTC and not the parts of cuDNN that its library needs."""
    files = ("cudnn/lib/libcudnn.so.9", "cudnn/lib/libcudnn_graph.so.9", "cu13/lib/libnvrtc.so.13")
    for file in (*files, "cu13/lib/libnvrtc-builtins.so.13.0"):
        (tmp_path / "nvidia" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "nvidia" / file).touch()
    engine = tmp_path / "transformer_engine" / "pytorch"
    engine.mkdir(parents=True)
    (engine.parent / "__init__.py").touch()
    (engine / "__init__.py").write_text("import ctypes; ctypes.CDLL('its own')")
    loaded: list[str] = []
    for name in [name for name in sys.modules if name.partition(".")[0] in ("nvidia", "transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", lambda library, mode=0: loaded.append(library))
    platform.check_transformer_engine()
    ours = [str(tmp_path / "nvidia" / file) for file in files]
    assert [each for each in loaded if each in ours] == ours and loaded[-1] == "its own"
    assert not any("builtins" in each for each in loaded)
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]

"""The public API: it is complete, documented and light, and the files around the package tell the same."""

import ast
import hashlib
import importlib
import re
import subprocess
import sys
import textwrap
import tomllib

import pytest
import yaml

import megarl
from tests.support.checkout import ROOT, environment

# Of the text at apache.org/licenses/LICENSE-2.0.txt.
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
HEAVY = ("torch", "ray", "vllm", "megatron", "transformers")


def test_every_name_is_the_object_of_its_module() -> None:
    modules = megarl._LIGHT | megarl._WITH_TORCH
    assert sorted(megarl.__all__) == sorted([*modules, "__version__"]) and set(megarl.__all__) <= set(dir(megarl))
    for name, module in modules.items():
        assert getattr(megarl, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="module 'megarl' has no attribute 'Nothing'"):
        vars(megarl)["__getattr__"]("Nothing")


def test_the_light_part_imports_no_heavy_library() -> None:
    names = ", ".join(megarl._LIGHT)
    script = f"import sys; from megarl import {names}; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120,
        check=True,
    )  # fmt: skip
    assert result.stdout.strip() == "[]"


def test_the_page_has_every_name_with_its_module() -> None:
    text = (ROOT / "docs" / "reference" / "api.md").read_text()
    light, _, with_torch = text.partition("| name, loads torch |")
    for part, modules in ((light, megarl._LIGHT), (with_torch, megarl._WITH_TORCH)):
        assert dict(re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", part, re.MULTILINE)) == modules


def test_the_example_of_the_page_is_a_reward_function() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "reference" / "api.md").read_text(), re.DOTALL)
    found: dict[str, object] = {}
    exec(code, found)
    score = found["short_and_right"]
    assert callable(score)
    sample = megarl.RewardInput("1+1=", " 2\n", token_ids=[5] * 10, answer="2")
    assert score(sample) == megarl.RewardResult(0.99, {"right": 1.0})


JOB = ROOT / "examples/rl/train_rl.py"  # no part that a user brings to it
# They show code for programs around a run, or of the package; docs/reference/api.md says that it may change.
NOT_FOR_RUNS = {ROOT / "docs" / name for name in ("reference/checkpoint-format.md", "observability.md")}
CLASS = r"megarl(?:\.\w+)+\.[A-Z]\w+"


def private_names(code: str) -> list[str]:
    """Names that Python code imports of the package, or has in its texts, and that are not public names of its top."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.startswith("megarl.")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "megarl":
            public = megarl.__all__ if node.module == "megarl" else []
            found += [f"{node.module}.{each.name}" for each in node.names if each.name not in public]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += re.findall(rf"\b{CLASS}", node.value)
    return found


def test_the_examples_use_the_public_api_only() -> None:
    files = [path for path in (ROOT / "examples").rglob("*.py") if path != JOB]
    found = {str(path.relative_to(ROOT)): private_names(path.read_text()) for path in files}
    assert len(files) >= 12 and {name: names for name, names in found.items() if names} == {}


def test_the_pages_show_the_public_api_only() -> None:
    found, blocks = {}, 0
    pages = {ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")}
    for page in pages - NOT_FOR_RUNS:
        codes = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        private = [name for code in codes for name in private_names(textwrap.dedent(code))]
        found[page.name] = private + re.findall(rf"`({CLASS})`", page.read_text())
        blocks += len(codes)
    assert blocks >= 8 and {name: names for name, names in found.items() if names} == {}


def test_a_name_that_is_not_public_is_found() -> None:
    top = "megarl"  # apart, because a module of the tests may name only what is there
    code = (
        f"from {top} import Turn, Own\nimport megarl, megarl.run.start.main\nfrom megarl.rewards.builtin import math\n"
    )
    text = '"""A `megarl.tools.tool.Tool`, for megarl.rewards.builtin.math."""\n'
    assert sorted(private_names(text + code)) == [
        f"{top}.Own", "megarl.rewards.builtin.math", "megarl.run.start.main", "megarl.tools.tool.Tool",
    ]  # fmt: skip
    assert private_names("from megarl import Turn, math\nimport megarl_tools.x\n'megarl.Turn'") == []


def test_the_version_has_one_source() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"] and "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "megarl.__version__"}
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == megarl.__version__
    assert "Unreleased" in (ROOT / "CHANGELOG.md").read_text()
    assert (ROOT / "megarl" / "py.typed").is_file() and "py.typed" in project["tool"]["setuptools"]["package-data"][
        "megarl"
    ]
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / ".github" / "workflows").iterdir()))
def test_a_workflow_calls_targets_that_exist(name: str) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    (job,) = workflow["jobs"].values()
    called = {step["run"].split()[1] for step in job["steps"] if step.get("run", "").startswith("make ")}
    assert set(job["strategy"]["matrix"]["target"]) <= targets and "setup" in called
    scripts = [word for step in job["steps"] for word in step.get("run", "").split() if word.startswith("tools/")]
    assert scripts and all((ROOT / script).is_file() for script in scripts)


NEEDS = " ".join(f"MEGARL_NEEDS_{what}=1" for what in ("CHROMIUM", "NODE", "FAULTS", "SANDBOX", "CLUSTER"))
AS_ROOT = f'sudo env "PATH=$PATH" {NEEDS} make ${{{{ matrix.target }}}}'


def test_every_target_of_tests_runs_for_each_change_or_every_night() -> None:
    """They run as root, so that faults of disks, users and hosts happen, and fail if what they need is not there."""
    called = {}
    for name in ("ci", "nightly"):
        workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
        (job,) = workflow["jobs"].values()
        assert job["steps"][-1]["run"].endswith(f" && {AS_ROOT}")
        called[name] = set(job["strategy"]["matrix"]["target"])
    makefile, run = (ROOT / "Makefile").read_text(), (ROOT / ".ci" / "run").read_text()
    assert called["ci"] == set(re.findall(r"^(test[a-z-]*):", makefile, re.MULTILINE)) | {"lint"}
    assert called["nightly"] == set(re.findall(r"^(nightly-[a-z-]+):", makefile, re.MULTILINE))
    assert workflow[True]["schedule"], "YAML reads the key `on` as true"
    (parts,) = re.findall(r"^nightly: (.*?)  ##", makefile, re.MULTILINE)
    assert set(parts.split()) == called["nightly"] - {"nightly-hosts", "nightly-slurm"}
    assert f"export {NEEDS}" in run and set(re.findall(r"^make (.+)$", run, re.MULTILINE)) == called["ci"] | {"setup"}

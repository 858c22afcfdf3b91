"""Examines this machine: packages, imports, devices, limits and network. Starts nothing but short imports."""

import os
from collections.abc import Iterator, Sequence

from megarl.cli.doctor import gpus, imports, machine, packages
from megarl.cli.doctor.report import Finding, Report


def examine(*, installation_only: bool = False, sandbox_users: Sequence[str] = ()) -> Report:
    """Return all findings of this machine. Imports torch; separate processes try the imports of a run.

    `installation_only`: only packages and imports, which do not depend on the machine's GPUs, limits and network.
    `sandbox_users`: the parts of a config that need the sandbox.
    """
    findings: list[Finding] = []
    cuda = built_for_cuda = False
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that torch needs is missing
        findings.append(Finding("fail", "torch", f"cannot be imported: {error}", "run make setup"))
    else:
        cuda = torch.cuda.is_available()
        built_for_cuda = torch.version.cuda is not None
        if not installation_only:
            findings += [*gpus.torch_findings(cuda), *_thread_findings(cuda)]
        if built_for_cuda and not cuda and not installation_only:
            detail = f"torch is built for CUDA {torch.version.cuda}, but this machine has no usable GPU"
            findings.append(Finding("fail", "CUDA", detail, "expected on a login node: run doctor on a node with GPUs"))
    findings += packages.package_findings(built_for_cuda)
    if built_for_cuda:
        findings.append(packages.kernel_finding())
    findings += imports.import_findings(cuda)
    if not installation_only:
        findings += [*machine.machine_findings(sandbox_users), *machine.network_findings(cuda)]
    return Report("cuda" if cuda else "cpu", tuple(findings))


def _thread_findings(cuda: bool) -> Iterator[Finding]:
    import torch

    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    detail = f"{threads} per process, {cores} cores, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}"
    crowded = not cuda and threads > 1 and "OMP_NUM_THREADS" not in os.environ
    yield Finding.warn_if(crowded, "threads", detail, "ranks and engines share the cores: export OMP_NUM_THREADS=1")

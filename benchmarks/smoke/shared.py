"""Step `shared`: the trainer's state parked and restored, an engine asleep, and a buffer relayed to another process.

Shape suffixes: B bytes of a buffer.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed import BroadcastOptions

from benchmarks.lib.report import Ratio
from benchmarks.smoke import models
from benchmarks.smoke.rows import Where, row
from benchmarks.smoke.state import trainer_tensors
from benchmarks.smoke.transfers import median_s

if TYPE_CHECKING:
    from megarl.trainer.policy import Policy
    from megarl.weights.group.relay import TrainerEnd, WorkerEnd
    from megarl.weights.group.store import SyncStore

CYCLES, PASSES = 100, 20
LIMIT_S = 60.0


def run(where: Where) -> tuple[list[Ratio], list[str]]:
    """Park and restore a policy, relay a buffer, and let an engine sleep where vLLM and a GPU are there."""
    sizes = {} if where.tiny else {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 8}
    with tempfile.TemporaryDirectory() as folder:
        models.write_config(Path(folder), {**models.SMALL, **sizes})
        models.join(models.free_address(), 0, 1)
        config = models.make_config(
            Path(folder), model={"path": folder, "load_weights": False}, trainer={"precision": "bf16"}
        )
        with models.built_policy(config) as policy:
            rows = _parking_rows(where, policy)
        rows += _relay_rows(where)
        if where.tiny or importlib.util.find_spec("vllm") is None:
            return rows, ["an engine that sleeps: it needs a GPU and vLLM"]
        return [*rows, _engine_row(folder)], []


def _parking_rows(where: Where, policy: Policy) -> list[Ratio]:
    """Park and restore everything, again and again."""
    from megarl.trainer.parking import EVERYTHING, NOTHING

    policy.update(models.make_samples(models.make_pairs(4, range(20, 24))))
    tensors, memory = trainer_tensors(policy), policy.memory
    before = {name: each.cpu().clone() for name, each in tensors.items()}
    homes = [torch.empty_like(each, pin_memory=not where.tiny) for each in before.values()]
    plain = median_s(where, lambda: [home.copy_(each, non_blocking=True) for home, each in
                                     zip(homes, tensors.values(), strict=True)])  # fmt: skip
    seconds: dict[str, list[float]] = {"park": [], "restore": []}
    held = []
    for _ in range(3 if where.tiny else CYCLES):
        for name, parts in (("park", NOTHING), ("restore", EVERYTHING)):
            started = time.perf_counter()
            memory.hold(parts)
            seconds[name].append(time.perf_counter() - started)
            if name == "park":
                held.append(0 if where.tiny else torch.cuda.memory_reserved())
    wrong = sum(not torch.equal(each.cpu(), before[name]) for name, each in tensors.items())
    state_B = sum(each.numel() * each.element_size() for each in tensors.values())
    slack = 1000.0 if where.tiny else 2.0  # the small state of a CPU does not hide fixed times
    return [
        row("tensors that differ after parking and restoring", float(wrong), 1.0, 0.0, ""),
        row("allocator's memory while parked / state", float(held[-1]), float(state_B), 0.05, "B"),
        row("the same, growth over the cycles", float(max(0, held[-1] - held[1])), 1.0, 0.0, "B"),
        *(row(f"{name} / plain copy to pinned host memory", sorted(each)[len(each) // 2], plain, slack, "s",
              {"bytes": state_B}) for name, each in seconds.items()),
    ]  # fmt: skip


def _relay_rows(where: Where) -> list[Ratio]:
    """Pass a buffer on to another process on the device, through CUDA IPC or a memfd."""
    from megarl.weights.group.store import SyncStore
    from megarl.weights.plan.digest import digest

    store = SyncStore("127.0.0.1", 0, server=True)
    nbytes = 2**20 if where.tiny else 2**29
    arguments = (store.port, store.key, where.device.type, nbytes)
    worker = torch.multiprocessing.spawn(_worker, arguments, nprocs=1, join=False)
    try:
        trainer = _join(store, 0, where.device)
        sent_B = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).to(where.device)
        started = time.perf_counter()
        for _ in range(PASSES):
            trainer.broadcast([sent_B], BroadcastOptions()).wait(timedelta(seconds=LIMIT_S))
        found = store.block("digest", LIMIT_S)
        seconds = (time.perf_counter() - started) / PASSES
        trainer.shutdown()
        if not worker.join(LIMIT_S):
            raise TimeoutError(f"waited {LIMIT_S:.0f} s for the process that a buffer was relayed to")
    finally:
        worker.processes[0].kill()
    copy_s = median_s(where, sent_B.clone)
    wrong = found != int(digest(sent_B, version=1, bucket=0))
    return [
        row("a relayed buffer has another digest", float(wrong), 1.0, 0.0, ""),
        row("relay of a buffer / two copies of it", seconds, 2 * copy_s, 1000.0 if where.tiny else 3.0, "s",
            {"bytes": nbytes}),
    ]  # fmt: skip


def _join(store: SyncStore, rank: int, device: torch.device) -> TrainerEnd | WorkerEnd:
    from megarl.weights.group import relay

    place = relay.MemberPlace(f"member {rank}", rank, 2, LIMIT_S, LIMIT_S, senders=1, store=store)
    return relay.join(place, relay.device_of(0 if device.type == "cuda" else -1), None)


def _worker(_: int, port: int, key: bytes, device_type: str, nbytes: int) -> None:
    """Receive every buffer, and write the digest of the last one to the store."""
    faulthandler.dump_traceback_later(LIMIT_S)
    from megarl.weights.group.store import SyncStore
    from megarl.weights.plan.digest import digest

    device, store = torch.device(device_type), SyncStore("127.0.0.1", port, key)
    got_B = torch.empty(nbytes, dtype=torch.uint8, device=device)
    end = _join(store, 1, device)
    for _ in range(PASSES):
        end.broadcast([got_B], BroadcastOptions()).wait(timedelta(seconds=LIMIT_S))
    store.put("digest", int(digest(got_B, version=1, bucket=0)))
    end.shutdown()


def _engine_row(folder: str) -> Ratio:
    """Let an engine sleep, and compare what it keeps with the plan."""
    from vllm import LLM

    from megarl.config.memory_plan.memory import ENGINE_OVERHEAD

    torch.cuda.empty_cache()
    free_before, _ = torch.cuda.mem_get_info()
    engine = LLM(folder, skip_tokenizer_init=True, load_format="dummy", enable_sleep_mode=True, max_model_len=512,
                 gpu_memory_utilization=0.3)  # fmt: skip
    engine.sleep(level=2)
    kept = free_before - torch.cuda.mem_get_info()[0]
    return row("memory of an engine that sleeps / plan", float(kept), float(ENGINE_OVERHEAD), 1.0, "B")

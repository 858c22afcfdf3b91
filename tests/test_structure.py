"""Folders are small, every wait of the package has a bound, slow tests run in one target, and names in text exist."""

import ast
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkout import ROOT
from tests.support.repository.references import files_with_references, unknown_references
from tests.support.repository.unbounded_waits import blocking_waits, unbounded_waits, wrong_numbers

PACKAGE = ROOT / "megarl"
_SLOW_PART = re.compile(r"^(nightly-\w+):.*\n\t\$\(PY\) -m pytest -m slow ((?:.*\\\n)*.*)$", re.MULTILINE)


def test_every_module_and_file_that_is_named_is_there() -> None:
    made_up = {Path(__file__), Path(__file__).with_name("test_fault_tables.py")}
    wrong = unknown_references(file for file in files_with_references() if file not in made_up)
    assert wrong == [], "\n".join(wrong)


MOST_MODULES = 12


def crowded(tree: Path) -> dict[str, int]:
    """The folders below `tree` with more than MOST_MODULES modules, without `__init__.py`; how many each has."""
    folders = Counter(path.parent for path in tree.rglob("*.py") if path.name != "__init__.py")
    return {str(folder.relative_to(tree)): count for folder, count in folders.items() if count > MOST_MODULES}


@pytest.mark.parametrize("tree", ["megarl", "tests/support", "benchmarks"])
def test_no_folder_has_too_many_modules(tree: str, tmp_path: Path) -> None:
    assert (ROOT / tree).is_dir() and crowded(ROOT / tree) == {}
    for number in range(MOST_MODULES):
        write(tmp_path / f"room/module_{number}.py", "")
    write(tmp_path / "room/__init__.py", "")
    assert crowded(tmp_path) == {}
    write(tmp_path / "room/one_more.py", "")
    assert crowded(tmp_path) == {"room": MOST_MODULES + 1}


def test_every_slow_test_is_run_by_one_nightly_target() -> None:
    """Those of tests/jobs are in nightly-hosts or nightly-slurm, by their names."""
    parts = {name: paths.split() for name, paths in _SLOW_PART.findall((ROOT / "Makefile").read_text())}
    wrong = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        inside = path.relative_to(ROOT)
        if inside.parts[1] != "jobs" and _has_slow_tests(path):
            runs_it = [name for name, paths in parts.items() if any(inside.is_relative_to(each) for each in paths)]
            if len(runs_it) != 1:
                wrong[str(inside)] = runs_it
    assert len(parts) >= 5 and wrong == {}


def _has_slow_tests(path: Path) -> bool:
    """A module that mentions `pytest.mark.slow`: in decorators, in `pytestmark`, or in `marks=`."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == "slow" and ast.unparse(node.value) == "pytest.mark"
        for node in ast.walk(ast.parse(path.read_text()))
    )


# The waits without a bound where they stand, and who bounds them.
BOUNDED_ELSEWHERE = {
    "rollout/engine/replica.py:EngineReplica.shutdown": "the sweep that the thread makes, half of timeouts.rpc_s",
    "rollout/orchestrator/controller.py:RolloutController.start": "the supervisor, timeouts.engine_start_s",
    "rollout/orchestrator/controller.py:RolloutController.shutdown": "the supervisor, timeouts.shutdown_s",
    "rollout/fleet/elastic_pool.py:ElasticPool._reserve": "whoever holds the lock, timeouts.rpc_s",
    "rollout/orchestrator/evaluator.py:evaluate_on_fleet.generate": "the evaluation's wait, timeouts.generate_s",
    "rollout/orchestrator/evaluator.py:Evaluator.run": "whoever waits for the evaluation, timeouts.generate_s",
    "rollout/agents/agent_loop.py:AgentContext._seen": "the threads, which decode images of bounded size",
    "rollout/agents/loop_run.py:RunningGroups.run": "no wait: whoever holds the lock only draws a prompt",
    "rollout/resume/journal.py:RolloutJournal.begin": "the trainer that begins, timeouts.engine_start_s and rpc_s",
    "rollout/resume/journal.py:RolloutJournal.candidates": "the trainer's set_version, timeouts.rpc_s",
    "rollout/resume/journal.py:RolloutJournal.write": "the trainer that begins or sets a version; else nobody waits for it",  # noqa: E501
    "rollout/resume/journal.py:RolloutJournal._take_grown": "nobody waits for it",
    "rollout/resume/journal.py:RolloutJournal._write_urgent": "`persist`, timeouts.rpc_s",
    "rollout/resume/journal.py:RolloutJournal.keep_up": "nobody waits for it",
    "rollout/resume/journal.py:RolloutJournal._tidy": "nobody waits for it",
    "rollout/orchestrator/prompt_groups.py:PromptGroups._settle_kept": "the trainer that waits for the batch, timeouts.generate_s",  # noqa: E501
    "rollout/engine/replica.py:EngineReplica.start": "the pool, timeouts.engine_start_s",
    "rollout/engine/replica.py:EngineReplica.sleep": "`put_to_sleep`, timeouts.rpc_s; engine_start_s with it",
    "rollout/engine/replica.py:EngineReplica._reported": "the fleet, timeouts.rpc_s after the report is due",
    "rollout/engine/image_inputs.py:ImageInputs._make": "`EngineRequests._check_silence`, timeouts.rpc_s",
    "rollout/transport/gather.py:BatchDecoder._decode": "`BatchDecoder.text`, timeouts.rpc_s",
    "rollout/transport/link.py:LinkServer.take": "whoever takes, timeouts.rpc_s after it is due",
    "rollout/transport/rpc.py:RpcClient.call": "`ReplicaClient.call`, the time limit of each call",
    "rollout/transport/link.py:LinkClient._take": "whoever gives the actor something to do, or closes the link",
    "rollout/transport/link.py:LinkClient._give": "whoever holds the lock, timeouts.rpc_s",
    "rollout/transport/link.py:LinkClient.drop": "whoever holds the lock, timeouts.rpc_s",
    "rollout/workers/agent_worker.py:AgentWorker.start": "the controller, timeouts.engine_start_s",
    "rollout/engine/teachers/teacher_client.py:_asking.ask": "TeacherClient.score, timeouts.generate_s",
    "rollout/engine/teachers/teacher_engine.py:TeacherEngine._ready": "timeouts.engine_start_s; later `_asking`",
    "rollout/workers/agent_worker.py:AgentWorker.shutdown": "the controller, a part of timeouts.shutdown_s",
    "rollout/workers/worker_pool.py:WorkerPool._run": "the group's deadline, without one the trainer; or its loss",
    "rollout/workers/worker_loops.py:WorkerRun.persist": "`RolloutJournal.persist`, timeouts.rpc_s",
    "rollout/workers/worker_loops.py:WorkerRun.generate": "the fleet in the controller, which has bounds of its own",
    "gateway/app.py:GatewayRoutes._stream": "the task, which was cancelled",
    "gateway/pool_client.py:ControllerClient.run": "nobody: it waits for the loss of the controller",
    "gateway/actor.py:GatewayActor.start": "the supervisor's gateway keeper, its time for a start",
    "gateway/actor.py:GatewayActor._find_controller": "`ControllerClient._connect`, timeouts.rpc_s",
    "gateway/text.py:ModelText._run": "the thread, which renders or reads one request of bounded size",
    "environments/env_client.py:EnvironmentClient.close": "the task, which was cancelled",
    "environments/env_client.py:EnvironmentClient._ask": "`health`, or the time limit of an attempt in the harness",
    "environments/env_client.py:EnvironmentServer.close": "the process, which was killed",
    "environments/env_client.py:EnvironmentServer._connected": "whoever holds the lock, START_S",
    "environments/env_client.py:EnvironmentServer._report_end": "nobody but `close`, which kills the process",
    "sandbox/runner.py:Sandbox.run": "the program, its time limit",
    "tools/http_tool.py:HttpTool._send": "`HttpTool.call`, the time limit of the call",
    "tools/process_tool.py:ProcessTool.close": "`ProcessTool._end`, CLOSE_S and JOIN_S",
    "tools/process_worker.py:_awaited": "the process that has called, which kills this one at the tool's time limit",
    "tools/python_tool.py:PythonTool.close": "the programs, which were killed",
}


# How many of them these functions have; the others have one.
SEVERAL_WAITS = {
    "gateway/actor.py:GatewayActor.start": 3,
    "environments/env_client.py:EnvironmentServer.close": 2,
    "rollout/orchestrator/controller.py:RolloutController.start": 2,
    "rollout/orchestrator/controller.py:RolloutController.shutdown": 2,
    "rollout/orchestrator/evaluator.py:Evaluator.run": 2,
    "rollout/engine/image_inputs.py:ImageInputs._make": 2,
    "rollout/resume/journal.py:RolloutJournal._write_urgent": 2,
    "rollout/orchestrator/prompt_groups.py:PromptGroups._settle_kept": 2,
    "rollout/workers/agent_worker.py:AgentWorker.shutdown": 2,
}


def test_every_wait_has_a_bound() -> None:
    """A new one gets its bound where it stands, or an entry that says whose bound ends it."""
    assert wrong_numbers(unbounded_waits(PACKAGE), BOUNDED_ELSEWHERE, SEVERAL_WAITS) == {}


# Likewise, of those that block a thread.
BLOCKING_BOUNDED_ELSEWHERE = {
    "checkpoint/convert/hf_to_megatron.py:HFToMegatron.write_unit": "the parent, which ends a worker that is silent",
    "checkpoint/convert/workers.py:_await": "no wait: the queue has a message, and the future is done",
    "checkpoint/save/writer.py:BackgroundWrite.finish": "no wait: what `WrittenItem` holds",
    "cluster/pool/actors.py:PoolActors._await": "no wait: `ray.wait` has found that it has ended",
    "cli/launch.py:run_script": "sbatch, and the user who ends it",
    "common/process/frames.py:_receive": "the caller, its deadline; without one nobody waits, and it dies with its parent",  # noqa: E501
    "models/hf/gather.py:Gather.done": "no wait, or the time-out of the process group",
    "models/hf/gather.py:GlooWaiter._run": "the time-out of the process group; whoever waits for the thread has a bound",  # noqa: E501
    "models/hf/gather_pairs.py:_exchange": "`connect`, which waits for its thread at most `timeout_s`",
    "queue/transfer.py:_start": "`start_queue`, timeouts.engine_start_s",
    "queue/transfer.py:_Client.call": "no wait: the future is done",
    "report/reading/metrics_file.py:metrics_of": "no wait: what `MetricsReader` has read",
    "rewards/builtin/code.py:CodeReward._of_pieces": "the program, which was cancelled, END_S of the sandbox",
    "rollout/engine/engine_requests.py:EngineRequests._part": "no wait: the task has ended",
    "rollout/engine/replica.py:EngineReplica.init_weight_transfer": "no wait: `WeightState.join` notes that a sync begins",  # noqa: E501
    "rollout/transport/rpc.py:RpcServer._ended": "no wait: the task has ended",
    "rollout/workers/worker_pool.py:RemoteRun._answer": "no wait: the task has ended",
    "run/loop/batches.py:BatchSource._await_next": "timeouts.generate_s of `BatchChannel.wait`, then timeouts.rpc_s",
    "telemetry/sinks/writer_thread.py:WriterThread._run": "nobody waits for it: it has nothing to write; `close` wakes it up",  # noqa: E501
    "weights/send/sender.py:WeightSender._join": "`await_members` and `EngineCalls.connect`, `timeout_s` of the join",
    "weights/receive/receiver.py:Receiver._receive_all": "`PendingBroadcast.wait`, the deadline of the sync",
    "weights/send/leader.py:call_all": "no wait: all calls have ended",
    "weights/send/leader.py:EngineCalls.after_failure": "each call to a replica, EXTRA_WAIT_S or timeouts.rpc_s",
    "weights/send/sender.py:WeightSender._outcome": "`publish`, the time limit of the sync",
    "weights/send/sync_attempt.py:SyncAttempt._await_broadcast": "`PendingBroadcast.wait`, the deadline of the sync",
    "weights/group/relay.py:TrainerEnd._drive": "nobody waits for it: it has nothing to pass on; `_close` wakes it up",
    "weights/group/relay.py:TrainerEnd._steps": "no wait: the broadcast among the ranks has ended",
    "weights/group/relay.py:join": "the time-out of the listener, the rest of `connect_s`",
    "weights/group/transport.py:Group._connect": "no wait: the call has ended",
    "weights/group/transport.py:Group.enter": "`StageWatch.join`, a bound of its own",
    "weights/group/transport.py:PendingBroadcast.wait": "no wait: the broadcast has ended",
}


SEVERAL_BLOCKING_WAITS = {
    "checkpoint/convert/workers.py:_await": 2,
    "models/hf/gather.py:Gather.done": 2,
    "rollout/transport/rpc.py:RpcServer._ended": 2,
}


def test_every_wait_that_blocks_a_thread_has_a_bound() -> None:
    found = blocking_waits(PACKAGE)
    assert wrong_numbers(found, BLOCKING_BOUNDED_ELSEWHERE, SEVERAL_BLOCKING_WAITS) == {}


# --- and that the lists can fail


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    "line",
    [
        "await self.changed.wait()", "await future", "await self.task", "await asyncio.wait(tasks)",
        "await asyncio.to_thread(read, path)", "x = await asyncio.gather(loop.run_in_executor(None, f))",
        "await lock.acquire()", "async with self.lock: pass", "async with limit, share.places: pass",
    ],
)  # fmt: skip
def test_a_wait_without_a_bound_is_found(tmp_path: Path, line: str) -> None:
    bounded = [
        "await asyncio.wait(tasks, timeout=3)", "await self._fleet.generate(group)", "await get(1)",
        "async with asyncio.timeout(3): await future", "async with asyncio.TaskGroup() as tasks: pass",
    ]  # fmt: skip
    good = "".join(f"    async def f{number}(self):\n        {each}\n" for number, each in enumerate(bounded))
    write(tmp_path / "rollout/one.py", f"class A:\n{good}    async def waits(self):\n        {line}\n")
    found = unbounded_waits(tmp_path / "rollout")
    assert list(found) == ["one.py:A.waits"]


@pytest.mark.parametrize(
    "line",
    [
        "self.thread.join()", "event.wait()", "event.wait(None)", "process.wait(timeout=None)", "work.get()",
        "lock.acquire()", "future.result()", "out, err = process.communicate()", "changed.wait_for(lambda: done)",
        "subprocess.run(['ls'], check=True)", "check(subprocess.check_output(['ls']))", "ray.get(reference)",
        "ready, _ = ray.wait([reference])", "connection.recv(4)", "peer, _ = server.accept()",
        "socket.create_connection((host, port))", "urllib.request.urlopen(url)",
    ],
)  # fmt: skip
def test_a_wait_without_a_bound_that_blocks_a_thread_is_found(tmp_path: Path, line: str) -> None:
    good = """
        thread.join(3), event.wait(left), process.wait(timeout=1), ", ".join(names), found.get(name)
        future.result(0.1), process.communicate(timeout=1), changed.wait_for(lambda: done, 3), ray.get(one, timeout=3)
        subprocess.run(["ls"], timeout=3), socket.create_connection(place, 3), ray.wait([one], timeout=0)
        lock.acquire(False), wait()
    async def task(self):
        await event.wait()
        return task.result()
    """
    write(tmp_path / "rollout/one.py", f"class A:\n    def good(self):{good}\n    def waits(self):\n        {line}\n")
    found = blocking_waits(tmp_path / "rollout")
    assert list(found) == ["one.py:A.waits"]


@pytest.mark.parametrize("find", [unbounded_waits, blocking_waits])
def test_a_second_wait_in_a_function_that_is_listed_is_found(
    tmp_path: Path, find: Callable[[Path], dict[str, list[str]]]
) -> None:
    waits = {unbounded_waits: "await self.task", blocking_waits: "self.thread.join()"}[find]
    write(tmp_path / "rollout/one.py", f"async def two():\n    {waits}\n    {waits}\n")
    found, listed = find(tmp_path / "rollout"), {"one.py:two": "whoever waits"}
    assert list(wrong_numbers(found, listed, {})) == ["one.py:two"]
    assert wrong_numbers(found, listed, {"one.py:two": 2}) == {}
    assert wrong_numbers({}, listed, {}) == {"one.py:two": []}, "an entry without a wait"
    assert list(wrong_numbers(found, {}, {})) == ["one.py:two"], "a wait without an entry"

"""Exports a verifiers taskset as megarl data rows; run it with the environments' Python.

    .venv-environments/bin/python examples/rl/environments/export_tasks.py sums_tasks --count 500 --out sums.jsonl

Each row has the `prompt`, an empty `answer`, because the environment judges, and the whole task in `task_data`.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

from verifiers.v1.utils.loaders import load_taskset, taskset_config_type


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("taskset", help="its module")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--skip", type=int, default=0, help="number of tasks to skip, for a held-out set")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON of the taskset's config")
    asked = parser.parse_args()
    config = taskset_config_type(asked.taskset).model_validate({"id": asked.taskset, **asked.config})
    with asked.out.open("w") as file:
        for task in islice(load_taskset(config), asked.skip, asked.skip + asked.count):
            data = task.data.model_dump(mode="json")
            file.write(json.dumps({"prompt": task.data.prompt_text, "answer": "", "task_data": data}) + "\n")


if __name__ == "__main__":
    main()

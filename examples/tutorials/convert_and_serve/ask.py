"""Queries a model served by `megarl serve`, with OpenAI's client: `ask.py RUN_DIR QUESTION`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import openai


def main(run_dir: Path, question: str) -> None:
    """Print the answer to the question; the gateway's URL and token are in `run_dir`."""
    gateway = json.loads((run_dir / "gateway.json").read_text())
    token = Path(gateway["token_file"]).read_text().strip()
    with openai.OpenAI(base_url=gateway["base_url"], api_key=token, timeout=60) as client:
        (model, *_) = client.models.list()
        answer = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=24
        )
    print(f"{model.id}: {answer.choices[0].message.content}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

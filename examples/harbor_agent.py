"""Train on tasks of Harbor: each attempt is a trial of `harbor run`, in containers, whose verifier gives the reward.

    PYTHONPATH=examples HARBOR_TASKS=my-tasks etude train grpo model.path=Qwen3-4B \\
        agent.path=harbor_agent:agent data.train=[harbor_agent:tasks] reward=environment

Harbor is not installed beside Etude: it needs Python 3.12 and Docker, and its command `harbor` in the PATH. Its agent
`terminus-2` runs on this machine, where the model's address is, and only its commands run in the container. Each folder
in `HARBOR_TASKS` is a task, with its `task.toml`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import etude

agent = etude.command([sys.executable, __file__], timeout_s=1800, grace_s=60, max_concurrency=4)
"""This file as a program. Within `grace_s` Harbor removes the containers of an attempt that is stopped."""


def tasks() -> Iterator[dict[str, Any]]:
    """Yield a row for each task."""
    folder = Path(os.environ["HARBOR_TASKS"]).resolve()
    for file in sorted(folder.glob("*/task.toml")):
        yield {"path": str(file.parent), "prompt": (file.parent / "instruction.md").read_text()}


def harbor_command(task: Path, jobs: Path, environment: Mapping[str, str]) -> list[str]:
    """Return the command of one trial, which calls the model that the attempt's environment names."""
    return [
        "harbor",
        "run",
        f"--path={task}",
        f"--jobs-dir={jobs}",
        "--agent=terminus-2",
        f"--model=openai/{environment['ETUDE_MODEL']}",
        f"--base-url={environment['OPENAI_BASE_URL']}",
        "--api-key-name=OPENAI_API_KEY",
        "--api-format=openai_chat_completions",
        "--yes",
        "--quiet",
        *environment.get("HARBOR_OPTIONS", "").split(),
    ]


def read_rewards(jobs: Path) -> dict[str, float]:
    """Return the verifier's rewards by name. Raise the error of a trial that has none."""
    (file,) = jobs.glob("*/*/result.json")
    result = json.loads(file.read_text())
    if result["verifier_result"] is None or not result["verifier_result"]["rewards"]:
        raise RuntimeError(f"The trial has no reward: {result['exception_info']}")
    return result["verifier_result"]["rewards"]  # type: ignore[no-any-return]


def main() -> None:
    """Play one attempt, and print its reward."""
    task = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as jobs:
        subprocess.run(harbor_command(task["path"], Path(jobs), os.environ), check=True, stdout=sys.stderr)
        print(json.dumps({"reward": read_rewards(Path(jobs))}))


if __name__ == "__main__":
    main()

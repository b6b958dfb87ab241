"""Coding agents and the AI SDK run against the endpoint as their packages install them. Their page says what came out.

Each calls the model, the model calls one of its tools, and the next turn begins with the exact ids of the first.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.document import PAGE, label_program, label_sdk, row
from tests.clients.programs import PROGRAMS, MiniSweAgent, play_program
from tests.clients.suite import PATIENCE_S, PINNED, SDK_APIS, Outcome, judge_exact, play_ai_sdk
from tests.clients.thinking import LOOK, Calls, ThinkingWorld, ToolCall, thinking_world
from tests.components import require_clients, require_python_clients
from tests.house.documents import blocks

pytestmark = [pytest.mark.integration, pytest.mark.slow]
IN_SMOKE = ("claude_code", "codex")


def assert_on_page(label: str, outcome: Outcome) -> None:
    found = row(label, outcome)
    assert found in PAGE.read_text(encoding="utf-8").splitlines(), f"{found}\n`python -m tests.clients.document`"


def named(name: str) -> Any:
    """Return a parameter whose test is in a group of its own: each takes long, so several processes share them."""
    group = pytest.mark.xdist_group(f"client {name}")
    return pytest.param(name, marks=[group, pytest.mark.smoke] if name in IN_SMOKE else [group])


@pytest.mark.parametrize("name", [named(name) for name in PROGRAMS])
def test_a_program_does_what_its_page_says(name: str, tmp_path: Path) -> None:
    assert_on_page(label_program(name), play_program(PROGRAMS[name], tmp_path))


@pytest.fixture(scope="module")
def thinking() -> Iterator[ThinkingWorld]:
    """The endpoint of the AI SDK."""
    require_clients()
    with thinking_world(LOOK) as world:
        yield world


@pytest.mark.parametrize("api", SDK_APIS)
def test_the_ai_sdk_does_what_its_page_says(thinking: ThinkingWorld, api: str) -> None:
    assert_on_page(label_sdk(api), play_ai_sdk(thinking.world, api, require_clients()))


def test_the_agent_of_the_page_solves_a_task(tmp_path: Path) -> None:
    """A command of the model mends a repository, and the copy that the test command judges is the mended one."""
    (program,) = [code for code in blocks(PAGE.read_text(encoding="utf-8"), "py") if "minisweagent" in code]
    (tmp_path / "solve.py").write_text(program)
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "add.py").write_text("print(2)  # heliotrope\n")
    mends = ToolCall("bash", {"command": "sed -i s/2/3/ add.py; cat add.py"})
    ends = ToolCall("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})
    task = {"repository": str(repository), "issue": "It should print 3.", "test": 'test "$(python3 add.py)" = 3'}
    python = require_python_clients(PINNED)
    with thinking_world(Calls(mends, last=ends)) as thinking:
        claim = thinking.world.attempt()
        done = subprocess.run(
            [str(python), "solve.py"],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
                "OPENAI_BASE_URL": thinking.world.url,
                "OPENAI_API_KEY": claim.model_key,
                "ETUDE_MODEL": thinking.world.endpoint.model,
                **MiniSweAgent.settings,
            },
            cwd=tmp_path,
            input=json.dumps(task),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(done.stdout.splitlines()[-1]) == {"reward": 1.0}
        assert judge_exact(thinking.world, thinking.world.turns(claim.attempt_id)) == "yes"
    assert "2" in (repository / "add.py").read_text(), "the attempt had its own copy"

"""The demonstration of agents: its tasks, its report, and an agent that learns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.chat import ChatRenderer
from etude.cli import main
from etude.demo import agent as module
from etude.demo import storeroom_agent, storeroom_model
from etude.records import Message, Task, ToolCall

SHORT = ["steps=1", "collect.tasks=2", "collect.group_size=2", "evaluate.limit=4", "agent.runners=1"]


def demonstrated(words: list[str], directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """Return the demonstration's JSON report, and all its output."""
    threads = torch.get_num_threads()
    try:
        assert main(["demo", "agent", *words, f"directory={directory}", "--json"]) == 0
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    report: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return report, printed


def test_a_storeroom_answers_its_tools() -> None:
    for row in storeroom_agent.make_rows(0, 50, held_out=True):
        kind = next(kind for kind in storeroom_agent.KINDS if kind in row["question"])
        task = Task(0, row)
        shelf = storeroom_agent.call_tool(task, "find", json.dumps({"kind": kind}))
        assert storeroom_agent.call_tool(task, "count", json.dumps({"shelf": shelf})) == row["answer"]
        assert len(set(row["shelves"].values())) == len(storeroom_agent.KINDS), "one kind on each shelf"
    for nonsense in ("{", "3", "{}", '{"kind": "wings"}', '{"kind": ["figs"]}'):
        assert storeroom_agent.call_tool(task, "find", nonsense) == "?"


def test_held_out_storerooms_are_not_in_the_training_data() -> None:
    train, held_out = (storeroom_agent.make_rows(0, 200, held_out=held) for held in (False, True))
    assert not [row for row in held_out if row in train]
    assert (
        train == storeroom_agent.make_rows(0, 200, held_out=False) != storeroom_agent.make_rows(1, 200, held_out=False)
    )


def test_the_teachers_messages_equal_those_of_the_template(tmp_path: Path) -> None:
    """The teacher's messages are, token for token, the messages that the endpoint will show and read."""
    tokenizer = storeroom_model.make_tokenizer(tmp_path)
    chat = ChatRenderer(tokenizer)
    find, count = (
        ToolCall(id="1", name="find", arguments='{"kind": "figs"}'),
        ToolCall(id="2", name="count", arguments='{"shelf": "C"}'),
    )
    messages = [
        Message("user", storeroom_agent.question("figs")),
        Message("assistant", "", tool_calls=(find,)),
        Message("tool", "C", tool_call_id="1"),
        Message("assistant", "", tool_calls=(count,)),
        Message("tool", "7", tool_call_id="2"),
    ]
    shown = tokenizer.decode(chat.prompt_ids(messages), keep_special_tokens=True)
    example = storeroom_model.dialogue("figs", "C", "7", calls=2)
    assert "".join(text for text, _ in example[:-1]) == shown
    assert len(tokenizer.encode(shown)) < 40, "each piece is one token"


def test_without_the_client_the_error_names_the_package(tmp_path: Path) -> None:
    code = "import sys; sys.modules['openai'] = None\nfrom etude.cli import main; sys.exit(main(['demo', 'agent']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "pip install 'etude[agents]'" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "nothing was made"


def test_options_that_the_demonstration_sets_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("agent.path=mine.py:solve", "model.path=mine", "data.val=[x]", "reward=gsm8k"):
        assert main(["demo", "agent", option]) == 2
        assert "The demonstration brings its own agent" in capsys.readouterr().err


def test_it_shows_a_conversation_and_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storeroom_model, "STEPS", 60)
    report, printed = demonstrated([*SHORT, "agent.strategy=shm"], tmp_path / "run", capsys)
    for words in ("before", "after", "held-out accuracy", "conversations continued", "tokens", "time", "Try next:"):
        assert words in printed
    assert "find(kind=" in printed or "model" in printed
    assert report["rl_steps"] == 1 and report["rollouts"] == 4 and report["failed_attempts"] == 0
    assert report["turns"] >= 4 + 8 and report["tokens_written"] > 0 and report["continued_exactly"] in (0.0, 1.0)
    assert 0 < report["playing_seconds"] + report["learning_seconds"] < report["seconds"]
    assert (tmp_path / "run" / "plot.png").exists() and (tmp_path / "run" / "metrics.jsonl").exists()


def test_calls_of_the_model_are_shown_as_calls() -> None:
    def message(by: str, text: str) -> dict[str, str]:
        return {"by": by, "text": text}

    call = '<tool_call>\n{"name": "find", "arguments": {"kind": "figs"}}\n</tool_call>'
    played = module.ScoredTask(
        "?", "7", [message("model", call), message("tool", "C"), message("model", "7")], right=True
    )
    assert [(who, str(text)) for who, text in module.format_conversation(played)] == [
        ("model", "find(kind='figs')"),
        ("find", "shelf C"),
        ("model", "7"),
    ]
    assert played.calls == 1
    broken = module.ScoredTask("?", "7", [message("model", '<tool_call>\n{"name": "find"}\n</tool_call>')], right=False)
    assert [str(text) for _, text in module.format_conversation(broken)] == ["find()"]


@pytest.mark.soak
@pytest.mark.parametrize(("strategy", "seed"), [("cs", 0), ("shm", 0), ("cs", 1)])
def test_the_agent_learns_to_use_its_tools(
    strategy: str, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, _ = demonstrated([f"agent.strategy={strategy}", f"seed={seed}"], tmp_path / "run", capsys)
    assert report["accuracy_before"] < 0.5 and report["accuracy_after"] > 0.75
    assert report["calls_after"] > 2 * report["calls_before"] and report["continued_exactly"] > 0.99

"""The prompts that the pages show: the messages that the model saw, and never the fields of a task."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from etude.chat import ChatRenderer, Tokenizer
from etude.integrity import write_text
from etude.records import Completion, Message, Turn
from etude.store import RolloutQueued, RolloutsAdmitted, TaskIssued, open_store
from etude.tools.answers import load_answers
from tests.chat.made import CHATML, CHATML_ENDS, byte_level, save
from tests.view.made import Viewer, rollout_events

HIDDEN = "the hidden truth"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of an agent, whose tasks have no prompt and whose second rollout saw another one."""
    directory = tmp_path / "run"
    directory.mkdir()
    model = save(tmp_path / "model", byte_level(CHATML), CHATML, CHATML_ENDS)
    write_text(directory / "run.yaml", f"recipe: train\nmodel:\n  path: {model}\n")
    chat = ChatRenderer(Tokenizer.load(model))
    answer = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop", "Four.")
    with closing(open_store(directory / "journal.sqlite")) as store:
        store.append([TaskIssued(0, 0, "sums", {"question": "2 + 2", "answer": HIDDEN})])
        store.append([RolloutQueued(rollout, 0, rollout) for rollout in range(2)])
        for rollout, system in enumerate(("Be brief.", "Be kind.")):
            prompt = chat.render([Message("system", system), Message("user", "What is 2 + 2?")]).ids
            store.append(rollout_events(rollout, 1.0 - rollout, Turn(prompt, answer, 0)))
        store.append([RolloutsAdmitted(1, (0, 1), 1, 0)])
        store.append([TaskIssued(1, 1, "sums", {"question": "?", "answer": HIDDEN}), RolloutQueued(9, 1, 0)])
    return directory


def test_an_agents_prompt_has_its_messages_by_role_and_not_the_expected_answer(run: Path) -> None:
    viewer = Viewer(run)
    page = viewer.get("rollout", run="run", rollout=0)
    assert [(entry["by"], entry["text"]) for entry in page["conversation"]] == [
        ("system", "Be brief."),
        ("user", "What is 2 + 2?"),
        ("model", "Four."),
    ]
    assert page["fields"]["answer"] == HIDDEN
    group = viewer.get("group", run="run", task=0)
    assert group["prompt"] == page["conversation"][:2] and not group["same_prompt"]
    waiting = viewer.get("group", run="run", task=1)
    assert waiting["prompt"] == waiting["rollouts"][0]["conversation"] == [], "the model was not called yet"
    assert viewer.get("step", run="run", step=1)["groups"]["prompt"] == ["What is 2 + 2?"]


def test_answers_are_printed_after_the_messages_that_the_model_saw(run: Path) -> None:
    _, answers = load_answers(run)
    assert [[entry["by"] for entry in answer["prompt"]] for answer in answers] == [["system", "user"]] * 2
    assert HIDDEN not in str(answers)

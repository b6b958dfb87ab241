"""The queries of the viewer over whole, growing, moved and damaged runs; pages of steps, groups and rollouts."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import sqlite3
import struct
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.integrity import write_text
from etude.recipes.run.resume.session_log import record_session
from etude.records import Outcome
from etude.store import (
    AdvantagesEstimated,
    AttemptEnded,
    AttemptRewarded,
    AttemptStarted,
    RolloutQueued,
    RolloutsAdmitted,
    TaskIssued,
    TurnRecorded,
    open_store,
)
from etude.store.journal.journal import Journal
from etude.tools.doctor.run import examine
from etude.view.queries.options import compare_options, find_preset
from tests.view.made import (
    PHASES,
    Viewer,
    rollout_events,
    turn,
    write_collapse,
    write_journal,
    write_metrics,
    write_run,
)

HOSTILE = "<script>alert(1)</script>\x1b[2J\x1b]0;owned\x07</pre>\u2028=HYPERLINK(1)"


@pytest.fixture
def viewer(tmp_path: Path) -> Viewer:
    write_run(tmp_path / "first", steps=3)
    return Viewer(tmp_path)


def test_runs_are_listed_with_their_latest_values(tmp_path: Path) -> None:
    write_run(tmp_path / "sweep" / "0-seed-0", steps=3)
    write_metrics(tmp_path / "sweep" / "1-seed-1", 2)
    (tmp_path / "sweep" / "1-seed-1" / "checkpoints" / "inner").mkdir(parents=True)
    (tmp_path / ".hidden" / "run").mkdir(parents=True)
    write_metrics(tmp_path / ".hidden" / "run", 1)
    os.utime(tmp_path / "sweep" / "1-seed-1" / "metrics.jsonl", (5, 5))
    runs = Viewer(tmp_path).get("runs")
    assert runs["run"] == ["sweep/0-seed-0", "sweep/1-seed-1"]
    assert (runs["step"], runs["steps"], runs["model"]) == ([3, 2], [3, None], ["model", ""])
    assert runs["reward"] == [1.0, 1.0] and runs["score"] == [0.5, 0.5] and runs["status"] == ["done", "stopped"]


def test_a_run_that_has_just_begun_is_found_by_its_name(viewer: Viewer, tmp_path: Path) -> None:
    assert viewer.get("runs")["run"] == ["first"]
    write_metrics(tmp_path / "second", 1)
    assert viewer.get("curves", run="second")["curves"]["reward"]["values"] == [1.0]


def test_a_run_that_has_not_changed_is_not_read_again(
    viewer: Viewer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert viewer.get("runs")["step"] == [3]
    opened = list[Path]()
    real = Path.open

    def noted(path: Path, *given: Any, **named: Any) -> Any:
        opened.append(path)
        return real(path, *given, **named)

    monkeypatch.setattr(Path, "open", noted)
    assert viewer.get("runs")["step"] == [3] and not opened
    write_metrics(tmp_path / "first", 5, first=4)
    opened.clear()
    assert viewer.get("runs")["step"] == [5] and [path.name for path in opened] == ["metrics.jsonl"]


def test_a_single_run_is_its_own_root(tmp_path: Path) -> None:
    write_run(tmp_path / "mine", steps=1)
    assert Viewer(tmp_path / "mine").get("runs")["run"] == ["mine"]


def test_curves_are_chosen_by_name_and_long_ones_are_thinned_out(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", 5000)
    viewer = Viewer(tmp_path)
    curves = viewer.get("curves", run="run")
    assert "reward" in curves["curves"] and "time/collect" in curves["names"] and "time" not in curves["names"]
    assert set(curves["curves"]) == set(curves["default"]) == {"reward", "eval/mean@1", "loss", "time/step"}
    reward = curves["curves"]["reward"]
    assert len(reward["steps"]) == 2000 and np.all(np.diff(reward["steps"]) > 0)
    assert np.allclose(reward["values"], np.array(reward["steps"]) / 5000, atol=4e-4)
    chosen = viewer.get("curves", run="run", names="time/*,nothing")["curves"]
    assert list(chosen) == [*(f"time/{name}" for name in ["step", *PHASES])]


def test_the_time_of_a_step_is_split_in_its_order_without_a_rest_that_is_lost(viewer: Viewer, tmp_path: Path) -> None:
    times = viewer.get("times", run="first")
    assert times["step"] == [1, 2, 3] and times["collect"] == [1.0] * 3 and times["total"] == [2.0] * 3
    assert times["other"] == pytest.approx([2.0 - sum(PHASES.values())] * 3)
    write_metrics(
        tmp_path / "first", 4, first=4, **{"time/evaluate": 0.0, "time/a_phase": 0.0, "time/update/part": 0.1}
    )
    assert list(viewer.get("times", run="first")) == [
        *("step", "collect", "annotate", "update", "publish", "evaluate", "a_phase", "other", "total"),
    ]


def test_a_step_has_its_groups_and_the_reason_for_each_rollout(viewer: Viewer) -> None:
    page = viewer.get("step", run="first", step=2)
    assert (page["step"], page["steps"], page["version"]) == (2, [1, 3], 1) and page["metrics"]["loss"] == 0.1
    groups, rollouts = page["groups"], page["rollouts"]
    assert groups["task"] == [5, 6, 7, 8, 9] and groups["zero_variance"] == [False] * 4 + [True]
    assert groups["dropped"] == [""] * 4 + ["all rewards are equal"] and groups["prompt"][0] == "What is 5 + 1?"
    assert groups["in_batch"] == [2] * 4 + [0] and groups["tokens"] == [7] * 5 and groups["reward"][0] == 0.5
    assert rollouts["rollout"] == list(range(10, 20)) and rollouts["tokens"] == [3, 4] * 5
    assert rollouts["staleness"] == [0] * 8 + [None] * 2 and rollouts["reward/right"][:2] == [0.0, 1.0]
    assert rollouts["why"][0] == "" and rollouts["why"][9] == "Step 2 dropped its group: all rewards are equal."


def test_rollouts_have_their_answers_and_advantages_and_are_picked_by_reward(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    with closing(open_store(run / "journal.sqlite")) as store:
        ids = store.admitted()[2]
        store.append([AdvantagesEstimated(2, ids, tuple(0.5 - id % 2 for id in ids))])
        store.append([TaskIssued(90, 0, "", {}), RolloutQueued(900, 90, 0, "val")])
    viewer = Viewer(tmp_path)
    rollouts = viewer.get("step", run="run", step=2)["rollouts"]
    assert rollouts["answer"][:2] == ["answer 10", "answer 11"]
    assert rollouts["advantage"] == [0.5, -0.5] * 4 + [None] * 2, "the dropped group has none"
    assert viewer.get("step", run="run", step=1)["rollouts"]["advantage"] == [None] * 10
    page = viewer.get("rollout", run="run", rollout=10)
    assert (page["advantage"], page["before"], page["after"]) == (0.5, 9, 11)
    ends = [viewer.get("rollout", run="run", rollout=id) for id in (0, 19)]
    assert ends[0]["before"] is None and ends[1]["after"] is None, "900 scores the policy"
    assert viewer.get("group", run="run", task=5)["rollouts"][0]["advantage"] == -0.5
    picked = {pick: viewer.get("rollout", run="run", pick=pick) for pick in ("best", "worst", "random")}
    assert [picked[pick]["reward"] for pick in ("best", "worst")] == [1.0, 0.0]
    assert picked["random"]["step"] == 2 and viewer.get("rollout", run="run", step=1)["step"] == 1
    assert "no step 9 that trained" in viewer.ask("api/rollout?run=run&pick=best&step=9").json()["error"]


def test_curves_have_the_seconds_and_the_tokens_up_to_each_step(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=3)
    assert Viewer(tmp_path).get("curves", run="run")["axes"] == {"step": [1, 2, 3], "time": [2.0, 4.0, 6.0]}
    write_metrics(tmp_path / "run", first=4, steps=4, trained_tokens=9.0, tokens=99.0)
    axes = Viewer(tmp_path).get("curves", run="run")["axes"]
    assert axes["tokens"] == [0, 0, 0, 9.0] and axes["time"] == [2.0, 4.0, 6.0, 8.0]


def test_the_page_of_a_run_has_the_findings_of_the_doctor(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=10)
    viewer = Viewer(tmp_path)
    assert viewer.get("run", run="run")["findings"] == []
    (run / "metrics.jsonl").unlink()
    write_collapse(run)
    found = viewer.get("run", run="run")["findings"]
    assert found == [asdict(finding) for finding in examine(run).findings]
    assert (found[0]["rule"], found[0]["first"]) == ("reward collapsed", 4) and found[1]["cause"] == found[0]["rule"]


def test_a_run_that_ended_early_says_how_to_go_on(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3)
    viewer = Viewer(tmp_path)
    start = {"at": 5.0, "began": 0, "process": 1, "host": "far", "preset": "", "device": "", "versions": {}}
    for how, resume in (("done", ""), ("stopped", f"train --resume {run}"), ("failed", f"train --resume {run}")):
        lines = [start, {"at": 9.0, "ended": 1, "how": how, "message": ""}]
        (run / "sessions.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        found = viewer.get("run", run="run")["resume"]
        assert found.endswith(resume) and bool(found) == bool(resume)
    write_text(run / "run.yaml", "recipe: train\nagent:\n  path: 'given by a program: solve'\n  store: null\n")
    assert viewer.get("run", run="run")["resume"].endswith("`fit` with the directory " + f"{run}.")


def test_the_oldest_token_of_a_rollout_decides_its_staleness(tmp_path: Path) -> None:
    write_journal(tmp_path / "run", steps=4, lag=2)
    rollouts = Viewer(tmp_path).get("step", run="run", step=4)["rollouts"]
    assert rollouts["oldest_version"] == [1] * 10 and rollouts["staleness"][:8] == [2] * 8
    with closing(open_store(tmp_path / "run" / "journal.sqlite")) as store:
        store.append([TaskIssued(99, 0, "sums", {"prompt": "?"}), RolloutQueued(99, 99, 0), AttemptStarted(99, 0)])
        store.append([TurnRecorded(99, 0, turn(2, 1)), TurnRecorded(99, 0, replace(turn(2, 3), index=1))])
        store.append([AttemptRewarded(99, 0, 1.0), AttemptEnded(99, 0, Outcome.SUCCEEDED)])
        store.append([RolloutsAdmitted(5, (99,), 100, 4)])
    rollouts = Viewer(tmp_path).get("step", run="run", step=5)["rollouts"]
    assert (rollouts["oldest_version"], rollouts["staleness"], rollouts["turns"]) == ([1], [3], [2])


def test_an_open_step_is_read_on_while_the_run_goes_on(viewer: Viewer, tmp_path: Path) -> None:
    assert viewer.get("steps", run="first")["step"] == [1, 2, 3]
    with closing(open_store(tmp_path / "first" / "journal.sqlite")) as store:
        store.append([TaskIssued(15, 0, "sums", {"prompt": "?"}), *(RolloutQueued(30 + k, 15, k) for k in range(4))])
        store.append([*rollout_events(30, 1.0, turn(2, 3)), *rollout_events(31, None, turn(2, 3))])
        store.append([AttemptStarted(32, 0)])
        rows = viewer.get("group", run="first", task=15)["rollouts"]
        whys = [row["why"] for row in rows]
        assert rows[0]["rollout"] == 30, "those without a reward stand behind the others"
        assert [why.split(",")[0] for why in sorted(whys)] == [
            "It is finished",
            "It is finished",
            "It is not finished.",
            "It waits in the queue.",
        ]
        assert viewer.get("steps", run="first")["step"] == [1, 2, 3]
        store.append([AttemptEnded(32, 0, Outcome.CANCELLED, "enough"), AttemptStarted(33, 0)])
        store.append([AttemptEnded(33, 0, Outcome.INFRA_ERROR, "the engine died"), RolloutsAdmitted(4, (30,), 16, 3)])
        write_metrics(tmp_path / "first", 4, first=4)
        assert viewer.get("steps", run="first")["rollouts"] == [8, 8, 8, 1]
        page = viewer.get("step", run="first", step=4)["rollouts"]
        assert page["why"] == [
            "",
            "It ended as failed: the tool broke",
            "It ended as cancelled: enough",
            "It ended as infra_error: the engine died",
        ]
        assert page["in_batch"] == [True, False, False, False] and page["reward"][1] is None


def test_the_rollouts_of_a_group_stand_best_first_with_their_common_beginning(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=1, tokens=5)
    group = Viewer(tmp_path).get("group", run="run", task=0)
    assert [row["reward"] for row in group["rollouts"]] == [1.0, 0.0] and group["common"] == 5
    assert (
        group["prompt"][0]["text"] == "What is 0 + 1?" and group["fields"]["ground_truth"] == "1" and group["step"] == 1
    )
    assert [row["attempts"][0]["turns"][0]["tokens"] for row in group["rollouts"]] == [6, 5]
    assert group["rollouts"][0]["attempts"][0]["began"] == 101.0


def test_tokens_come_as_bytes_of_named_columns(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=1, tokens=5)
    reply = Viewer(tmp_path).ask("api/tokens?run=run&rollout=1&turn=0").content
    (size,) = struct.unpack_from("<I", reply)
    head, body = json.loads(reply[4 : 4 + size]), reply[4 + size :]
    assert (4 + size) % 8 == 0 and (head["rollout"], head["opened"], head["grammar"]) == (1, 0, None)
    columns = {
        name: np.frombuffer(body, part["type"], part["count"], part["offset"]) for name, part in head["columns"].items()
    }
    assert columns["ids"].tolist() == [0, 1, 2, 3, 4, 5] and columns["prompt"].tolist() == [0, 1, 2, 3]
    assert columns["logp"].tolist() == [-0.5] * 6 and columns["version"].tolist() == [0] * 6


def test_a_hostile_text_is_data_in_every_form(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=1, texts=[HOSTILE])
    with closing(open_store(tmp_path / "run" / "journal.sqlite")) as store:
        store.append([TaskIssued(9, 0, HOSTILE, {"prompt": HOSTILE}), RolloutQueued(99, 9, 0), AttemptStarted(99, 0)])
        store.append([AttemptEnded(99, 0, Outcome.FAILED, HOSTILE), RolloutsAdmitted(2, (), 10, 1)])
    viewer = Viewer(tmp_path)
    reply = viewer.ask("api/rollout?run=run&rollout=0")
    assert reply.headers["content-type"] == "application/json" and reply.content.isascii()
    assert b"\x1b" not in reply.content and b"\x07" not in reply.content
    assert json.loads(reply.content)["conversation"][1]["text"] == HOSTILE
    group = viewer.get("group", run="run", task=9)
    assert group["prompt"][0]["text"] == HOSTILE and group["rollouts"][0]["cause"] == HOSTILE


def test_a_table_as_csv_controls_neither_a_terminal_nor_a_spreadsheet(tmp_path: Path) -> None:
    write_journal(tmp_path / "run", steps=1)
    with closing(open_store(tmp_path / "run" / "journal.sqlite")) as store:
        store.append([TaskIssued(9, 0, "=1+1", {"prompt": HOSTILE}), RolloutQueued(99, 9, 0)])
        store.append([*rollout_events(99, -1.0, turn(1, 0)), RolloutsAdmitted(2, (99,), 10, 1)])
    reply = Viewer(tmp_path).ask("api/step?run=run&step=2&as=csv&table=groups")
    assert reply.headers["content-type"].startswith("text/csv") and b"\x1b" not in reply.content
    (row,) = csv.DictReader(io.StringIO(reply.text))
    assert row["source"] == "'=1+1" and row["reward"] == "-1.0" and r"\x1b[2J" in row["prompt"]


def test_a_moved_run_and_one_whose_parts_are_damaged_are_shown_as_far_as_they_are_whole(tmp_path: Path) -> None:
    write_run(tmp_path / "first", steps=2)
    moved = tmp_path / "elsewhere" / "moved"
    shutil.copytree(tmp_path / "first", moved)
    viewer = Viewer(tmp_path)
    assert viewer.get("step", run="elsewhere/moved", step=2)["groups"]["task"] == [5, 6, 7, 8, 9]
    (moved / "run.yaml").write_text("recipe: train\n")
    with (moved / "metrics.jsonl").open("a") as file:
        file.write("broken\n")
    with closing(sqlite3.connect(moved / "journal.sqlite")) as database:
        database.execute("UPDATE events SET body = replace(body, '42', '43') WHERE kind = 'rollouts_admitted'")
        database.execute("UPDATE events SET digest = digest + 1 WHERE kind = 'turn_recorded' AND rollout = 0")
        database.commit()
    page = viewer.get("run", run="elsewhere/moved")
    assert page["summary"]["step"] == 2 and page["options"]["option"] == [] and len(page["problems"]) == 3
    assert viewer.get("step", run="elsewhere/moved", step=2)["rollouts"]["tokens"] == [3, 4] * 5
    assert viewer.get("rollout", run="elsewhere/moved", rollout=1)["rollout"] == 1
    reply = viewer.ask("api/rollout?run=elsewhere/moved&rollout=0")
    assert reply.status_code == 422 and "does not match its checksum" in reply.json()["error"]


def test_a_journal_that_is_no_database_leaves_the_rest_of_the_page(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=2)
    (tmp_path / "run" / "journal.sqlite").write_bytes(b"nothing" * 1000)
    viewer = Viewer(tmp_path)
    page = viewer.get("run", run="run")
    assert page["rollouts"] is None and "journal.sqlite" in page["problems"][0]
    assert viewer.get("curves", run="run")["curves"]["reward"]["values"] == [0.5, 1.0]


def test_a_run_that_is_replaced_in_its_place_is_read_anew(viewer: Viewer, tmp_path: Path) -> None:
    assert viewer.get("steps", run="first")["step"] == [1, 2, 3]
    shutil.rmtree(tmp_path / "first")
    write_run(tmp_path / "first", steps=1)
    assert viewer.get("steps", run="first")["step"] == [1]
    assert viewer.ask("api/step?run=first&step=3").status_code == 404


def test_queries_read_by_index_and_not_the_whole_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run", steps=40)
    viewer = Viewer(tmp_path)
    viewer.get("run", run="run")
    events, states = list[int](), list[int]()
    read, load = Journal._pages, Journal.load_states

    def pages(self: Journal, *given: object) -> object:
        for page in read(self, *given):  # type: ignore[arg-type]
            events.append(page[0])
            yield page

    def loaded(self: Journal, kind: object, ids: list[int]) -> object:
        states.extend(ids)
        return load(self, kind, ids)  # type: ignore[type-var,arg-type]

    monkeypatch.setattr(Journal, "_pages", pages)
    monkeypatch.setattr(Journal, "load_states", loaded)
    for name, parameters, most_events, most_states in (
        ("run", {}, 0, 0),
        ("steps", {}, 0, 0),
        ("curves", {}, 0, 0),
        ("step", {"step": 20}, 2, 20),
        ("group", {"task": 99}, 10, 2),
        ("rollout", {"rollout": 200}, 5, 1),
    ):
        events.clear()
        states.clear()
        viewer.get(name, run="run", **parameters)
        assert len(events) <= most_events and len(states) <= most_states, name


def test_options_are_compared_with_the_defaults_of_their_choices() -> None:
    options = {
        "recipe": "train",
        "loss": {"name": "gspo", "clip_high": 0.5, "clip_low": 3e-4},
        "advantage": {"name": "grpo"},
        "kl": {"name": "somebody.module:KL"},
        "steps": 7,
        "unknown": 3,
    }
    table = compare_options(options)
    rows = {row[0]: row[1:] for row in zip(*table.columns.values(), strict=True)}
    assert rows["loss.name"][2] is False and rows["loss.clip_high"][2] is False
    assert rows["advantage.name"][:3] == ("grpo", "grpo", True) and rows["unknown"][:3] == (3, None, False)
    assert rows["kl.name"][0] == "somebody.module:KL"


def test_the_preset_that_a_run_was_started_from_is_named_though_options_differ(viewer: Viewer, tmp_path: Path) -> None:
    run = write_run(tmp_path / "second", options="recipe: train\nsteps: 3\ntrain:\n  learning_rate: 3.0\n")
    for preset in ("dapo", ""):  # a resumed run names none
        with record_session(run, lambda: 3, lambda: True, preset=preset):
            pass
    page = viewer.get("run", run="second")
    assert page["preset"] == "dapo" and page["sessions"][0]["versions"]["etude"]
    assert page["options"]["from_preset"] == [False, False, False]


def test_the_preset_of_a_run_is_the_one_whose_options_it_has() -> None:
    dapo: dict[str, Any] = {
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28, "reduction": "token-mean"},
        "overlong": {"max_length": 99},
        "collect": {"tasks": 32, "group_size": 16, "refill": 10},
        "train": {"learning_rate": 1e-6},
    }
    assert find_preset(dapo) == "dapo" and find_preset({"steps": 1}) == ""
    assert find_preset(dapo | {"loss": {**dapo["loss"], "clip_high": 0.3}}) != "dapo"

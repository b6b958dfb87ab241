"""`etude export rollouts`: data sets for `etude sft` and `etude dpo`, all data as lines, traces as OTLP."""

from __future__ import annotations

import base64
import json
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from etude.cli import main
from etude.data.samples import build_samples
from etude.integrity import write_text
from etude.recipes.run.directory import read_run
from etude.records import Completion, Outcome, Turn
from etude.store import (
    AttemptEnded,
    AttemptRewarded,
    AttemptStarted,
    Journal,
    NoteRecorded,
    RolloutQueued,
    RolloutsAdmitted,
    TaskIssued,
    TurnRecorded,
    open_store,
)
from etude.store.http import otlp
from etude.store.journal.sql import SqlJournal
from etude.tools.answers import load_answers
from etude.tools.rollout_reader import open_journal, read_rollouts, read_settled_groups
from etude.tools.rollouts import ExportOptions, export_rollouts
from etude.tools.rollouts import writers as files
from tests.alone import alone
from tests.recipes import players
from tests.recipes.players import TALKS
from tests.recipes.runs import Captured, refused, step_metrics, train
from tests.recipes.supervised_runs import learned, refusal
from tests.worlds import make_tokenizer

END = 1
"""The token that ends an answer."""


def journal(run: Path) -> Journal:
    return open_store(run / "journal.sqlite", read_only=True)


def written(run: Path, file: Path, *words: str) -> list[dict[str, Any]]:
    """Return the rows of an export."""
    assert main(["export", "rollouts", str(run), str(file), *words]) == 0
    if file.suffix == ".parquet":
        rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
        return rows
    return [json.loads(line) for line in file.read_text().splitlines()]


def totals(store: Journal) -> dict[int, float]:
    """Return the reward of every rollout."""
    return {
        state.id: state.last.total
        for state in store.rollouts()
        if state.last is not None and state.last.total is not None
    }


# -- data sets --------------------------------------------------------------------------------------------------------


def test_demonstrations_are_the_exact_tokens_of_rollouts_with_enough_reward(talked: Path, tmp_path: Path) -> None:
    with closing(journal(talked)) as store:
        enough = float(np.median(list(totals(store).values())))
        good = sorted(id for id, earned in totals(store).items() if earned >= enough)
        assert 0 < len(good) < 32, "some earn enough, and some do not"
        wanted = [sample for id in good for sample in build_samples(store.turns(id), id)]
        earned = totals(store)
    rows = written(talked, tmp_path / "good.parquet", "--as", "sft", "--min-reward", str(enough))
    assert [row["rollout"] for row in rows] == [sample.rollout for sample in wanted]
    for row, sample in zip(rows, wanted, strict=True):
        assert row["input_ids"] == sample.ids.tolist() and row["assistant_masks"] == sample.action.tolist()
        assert row["reward"] == earned[row["rollout"]] and row["step"] in (1, 2) and row["data_source"] == "sums"
    assert written(talked, tmp_path / "good.jsonl", "--as", "sft", "--min-reward", str(enough)) == rows


@pytest.mark.parametrize("form", ["ids", "text"])
def test_sft_trains_on_exported_demonstrations(form: str, supervised_world: Path, talked: Path, tmp_path: Path) -> None:
    rows = written(talked, tmp_path / "good.parquet", "--as", "sft", "--form", form)
    with closing(journal(talked)) as store:
        drawn = [turn.completion.ids.tolist() for id in totals(store) for turn in store.turns(id)]
    if form == "text":  # every answer ends, and an empty one is left out
        rows = [row for row in rows if row["completion"]]
        drawn = [[*(id for id in ids if id != END), END] for ids in drawn if ids != [END]]
    of = {"batch_size": len(rows), "steps": 1, "data__train": f"[{tmp_path / 'good.parquet'}]"}
    (step,) = step_metrics(learned("sft", supervised_world, tmp_path / "run", **of))
    assert np.isfinite(step["loss"]) and step["action_tokens"] == sum(map(len, drawn))


def test_only_turns_with_the_chosen_tags_are_exported(supervised_world: Path, talked: Path, tmp_path: Path) -> None:
    whole = written(talked, tmp_path / "whole.jsonl", "--as", "sft", "--form", "text")
    plans = written(talked, tmp_path / "plans.jsonl", "--as", "sft", "--form", "text", "--tags", "planner")
    assert len(whole) == 96 and len(plans) == 32
    assert all(len(row["prompt"]) == 4 and row["prompt"].endswith("=") for row in plans)
    exact = written(talked, tmp_path / "exact.jsonl", "--as", "sft", "--tags", "planner")
    assert [sum(row["assistant_masks"]) for row in exact] == [
        len(row["input_ids"]) - row["assistant_masks"].index(1) for row in exact
    ]
    file = f"[{tmp_path / 'exact.jsonl'}]"
    assert step_metrics(
        learned("sft", supervised_world, tmp_path / "run", data__train=file, data__train_on="last", steps=1)
    )


@pytest.mark.parametrize("recipe", ["dpo", "reward-model"])
def test_pairs_are_the_best_and_the_worst_of_a_group(
    recipe: str, supervised_world: Path, talked: Path, tmp_path: Path
) -> None:
    rows = written(talked, tmp_path / "pairs.parquet", "--as", "dpo", "--min-gap", "0.01")
    with closing(journal(talked)) as store:
        earned = totals(store)
        for row in rows:
            tries = [earned[id] for id in store.task(row["task"]).rollouts]
            assert row["chosen_reward"] == max(tries) > row["rejected_reward"] == min(tries)
            for side in ("chosen", "rejected"):
                wanted = build_samples(store.turns(row[f"{side}_rollout"]), 0)
                result = [(sample["input_ids"], sample["assistant_masks"]) for sample in row[f"{side}_tokens"]]
                assert result == [(sample.ids.tolist(), sample.action.tolist()) for sample in wanted]
    assert 4 <= len(rows) <= 8
    file = f"[{tmp_path / 'pairs.parquet'}]"
    (step,) = step_metrics(learned(recipe, supervised_world, tmp_path / "run", data__train=file, steps=1))
    assert np.isfinite(step["loss"]) and step["grad_norm"] > 0


def test_pairs_of_single_answers_are_exported_as_text(supervised_world: Path, trained: Path, tmp_path: Path) -> None:
    """Of a run whose rollouts come from an engine."""
    rows = written(trained, tmp_path / "pairs.jsonl", "--as", "dpo", "--form", "text")
    assert all(row["prompt"].endswith("=") and row["chosen"] != row["rejected"] for row in rows)
    assert step_metrics(
        learned("dpo", supervised_world, tmp_path / "run", data__train=f"[{tmp_path / 'pairs.jsonl'}]", steps=1)
    )


def test_ids_of_another_vocabulary_are_refused(talked: Path, tmp_path: Path, capsys: Captured) -> None:
    rows = written(talked, tmp_path / "good.jsonl", "--as", "sft")
    other = tmp_path / "other"
    make_tokenizer(other, "abc")
    file = f"[{tmp_path / 'good.jsonl'}]"
    model = {"model.tokenizer": other, "data.train": file}
    message = refusal(capsys, "sft", talked.parent, tmp_path / "run", **model, **{"model.path": _model(talked)})
    assert "has token ids of another vocabulary" in message and "--form text" in message
    for change, text in (
        ({"vocabulary": None, "input_ids": [10_000]}, "has 1 `input_ids` and"),
        ({"assistant_masks": "no"}, "that is not a list of whole numbers"),
        ({"vocabulary": None, "input_ids": [10_000] * len(rows[0]["input_ids"])}, "has the token id 10000"),
    ):
        (tmp_path / "good.jsonl").write_text(json.dumps(rows[0] | change) + "\n")
        assert text in refusal(
            capsys, "sft", talked.parent, tmp_path / "run", **{"data.train": file, "model.path": _model(talked)}
        )


def _model(run: Path) -> Path:
    result = read_run(run).model.path
    assert result is not None
    return result


# -- all data ---------------------------------------------------------------------------------------------------------


def test_lines_have_all_data_of_a_rollout(talked: Path, tmp_path: Path) -> None:
    lines = {line["rollout"]: line for line in written(talked, tmp_path / "all.jsonl", "--split", "all")}
    with closing(journal(talked)) as store:
        states = store.rollouts()
        assert lines.keys() == {state.id for state in states}
        for state in states:
            line = lines[state.id]
            (attempt,) = line["attempts"]
            assert line["fields"] == store.task(state.task).fields and line["status"] == "succeeded"
            assert (
                state.last is not None and attempt["total"] == state.last.total and attempt["parts"] == state.last.parts
            )
            assert (
                attempt["events"][-1]["name"] == "said"
                and attempt["began"] <= attempt["turns"][0]["at"] <= attempt["ended"]
            )
            for record, turn in zip(attempt["turns"], store.turns(state.id), strict=True):
                completion = turn.completion
                assert record["prompt_ids"] == turn.prompt.tolist() and record["ids"] == completion.ids.tolist()
                assert np.array_equal(np.array(record["logp"], np.float32), completion.logp)
                assert record["versions"] == completion.version.tolist() and record["tags"] == list(turn.tags)
                assert record["text"] == completion.text and record["reward"] == turn.reward and record["prompt"]


def test_numbers_that_json_lacks_are_null_in_a_line(tmp_path: Path) -> None:
    """A task or a note may hold such a number."""
    odd = {"best": float("nan"), "worst": [1, float("-inf")], "why": "x"}
    sent = {"name": "s", "trace_id": "0" * 31 + "1", "span_id": "0" * 15 + "1", "parent_span_id": "", "kind": 3}
    sent |= {"start_ns": 1, "end_ns": 2, "attributes": odd, "events": [], "status": {"code": 1, "message": ""}}
    made(
        tmp_path,
        1,
        notes=[NoteRecorded(0, 0, "seen", odd), NoteRecorded(0, 0, "span", sent | {"scope": "", "resource": {}})],
    )
    write_text(tmp_path / "run.yaml", "model: {path: nowhere, tokenizer: null}\n")
    (line,) = written(tmp_path, tmp_path / "lines.jsonl")
    first, _ = line["attempts"][0]["events"]
    assert first == {"name": "seen", "data": {"best": None, "worst": [1, None], "why": "x"}}
    (trace,) = written(tmp_path, tmp_path / "traces.jsonl", "--as", "otlp")
    read = ParseDict(in_base64(trace), ExportTraceServiceRequest()).resource_spans[0].scope_spans[1].spans[0]
    assert np.isnan(read.attributes[0].value.double_value)


# -- the rewards that counted -----------------------------------------------------------------------------------------


def test_failed_rollouts_are_exported_and_ranked_by_their_counted_reward(world: Path, tmp_path: Path) -> None:
    """The agent's earlier report does not count. Scoring rollouts are left out of no export."""
    fails = {
        "agent.path": f"{players.__name__}:late_failure",
        "agent.failed_reward": -1.0,
        "collect.retries": 0,
        "steps": 1,
    }
    scored = {"data.val": f"[{world / 'held_out.jsonl'}]", "evaluate.every": 1}
    run = train(world, tmp_path / "run", **TALKS | fails | scored)
    _, message = load_answers(run)
    assert len(message) == 16 and [line["reward"] for line in message if not line["parts"]].count(-1.0) == 8
    done = export_rollouts(ExportOptions(run, tmp_path / "pairs.jsonl", "dpo"))
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and all(row["rejected_reward"] == -1.0 and row["rejected_rollout"] % 2 for row in rows)
    assert not done["skipped"]


# -- traces -----------------------------------------------------------------------------------------------------------


def test_traces_are_readable_by_opentelemetry(talked: Path, tmp_path: Path) -> None:
    lines = written(talked, tmp_path / "traces.jsonl", "--as", "otlp")
    assert len(lines) == 32
    for line in lines:
        request = ParseDict(in_base64(line), ExportTraceServiceRequest())
        (resource,) = request.resource_spans
        rollout, attempt, *turns = resource.scope_spans[0].spans
        assert [rollout.name, attempt.name] == ["rollout", "attempt"] and len(turns) == 3
        assert {span.trace_id for span in (rollout, attempt, *turns)} == {rollout.trace_id} and len(
            rollout.trace_id
        ) == 16
        assert len({span.span_id for span in (rollout, attempt, *turns)}) == 5 and not rollout.parent_span_id
        assert attempt.parent_span_id == rollout.span_id and {t.parent_span_id for t in turns} == {attempt.span_id}
        times = [turn.end_time_unix_nano for turn in turns]
        assert rollout.start_time_unix_nano == attempt.start_time_unix_nano > 1.6e18 and times == sorted(times)
        assert attempt.start_time_unix_nano < times[0] and times[-1] <= attempt.end_time_unix_nano
        assert attempt.events[-1].name == "said"
    read = otlp.parse_spans(json.dumps(lines[0]).encode(), otlp.JSON)
    attributes = read[2].data["attributes"]
    with closing(journal(talked)) as store:
        turn = store.turns(read[0].data["attributes"]["etude.rollout"])[0]
    assert attributes["gen_ai.usage.output_tokens"] == len(turn.completion.ids) and attributes["etude.tags"] == [
        "planner"
    ]
    assert attributes["etude.text"] == turn.completion.text and attributes["etude.reward"] == turn.reward
    again = written(talked, tmp_path / "again.jsonl", "--as", "otlp")
    assert again == lines, "what is exported twice is the same trace"


def test_spans_that_an_agent_sent_are_passed_on(tmp_path: Path) -> None:
    sent = {
        "name": "search",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "span_id": "b7ad6b7169203331",
        "parent_span_id": "",
        "kind": 3,
        "start_ns": 1_700_000_000_000_000_001,
        "end_ns": 1_700_000_000_000_000_002,
        "attributes": {"query": "etude", "hits": [1, 2.5, True], "more": {"a": "b"}},
        "events": [{"name": "found", "time_ns": 5, "attributes": {}}],
        "status": {"code": 1, "message": ""},
    }
    forged = [{"name": "when", "attributes": {}}, {"name": "early", "time_ns": -1, "attributes": {}}, "an event"]
    noted = sent | {"scope": "mine", "resource": {}, "events": [*forged, *sent["events"]]}  # type: ignore[misc]
    made(tmp_path, 1, notes=[NoteRecorded(0, 0, "span", noted)])
    (line,) = written(tmp_path, tmp_path / "traces.jsonl", "--as", "otlp")
    spans = {span.data["name"]: span.data for span in otlp.parse_spans(json.dumps(line).encode(), otlp.JSON)}
    assert {name: spans["search"][name] for name in sent} == sent and spans["search"]["scope"] == "mine"
    assert spans["attempt"]["events"] == []


def in_base64(document: Any) -> Any:
    """Return the trace with its ids as protobuf's JSON has them."""
    if isinstance(document, list):
        return [in_base64(item) for item in document]
    if not isinstance(document, dict):
        return document
    return {
        name: base64.b64encode(bytes.fromhex(value)).decode() if name.endswith("Id") else in_base64(value)
        for name, value in document.items()
    }


# -- running runs, and large ones -------------------------------------------------------------------------------------


def made(run: Path, count: int, notes: list[NoteRecorded] | None = None) -> Path:
    """Write a journal of this many rollouts in groups of two, each of 400 tokens, the last group not yet admitted."""
    rng = np.random.default_rng(0)
    with closing(open_store(run / "journal.sqlite")) as store:
        for task in range(count // 2 or 1):
            store.append([TaskIssued(task, task, "s", {"prompt": "?"})])
            for id in (2 * task, 2 * task + 1)[:count]:
                ids = rng.integers(0, 9, 400).astype(np.int32)
                completion = Completion(ids, np.zeros(400, np.float32), np.zeros(400, np.int32), "stop", "words " * 60)
                story = [RolloutQueued(id, task, id % 2), AttemptStarted(id, 0, at=1.0), *(notes or [])]
                story += [
                    TurnRecorded(id, 0, Turn(np.arange(9, dtype=np.int32), completion, 0), 2.0),
                    AttemptRewarded(id, 0, float(id % 2)),
                ]
                store.append([*story, AttemptEnded(id, 0, Outcome.SUCCEEDED, at=3.0)])
            if task + 1 < count // 2:
                store.append([RolloutsAdmitted(task + 1, (2 * task, 2 * task + 1), end=0, version=0)])
    return run


def test_a_running_run_is_exported_so_far(world: Path, tmp_path: Path) -> None:
    made(tmp_path, 6)
    with closing(open_store(tmp_path / "journal.sqlite")) as writer:
        writer.append([TaskIssued(9, 9, "s", {}), RolloutQueued(99, 9, 0), AttemptStarted(99, 0, at=4.0)])
        model = ["--model", str(world / "model")]
        lines = written(tmp_path, tmp_path / "all.jsonl", *model)
        assert [line["status"] for line in lines] == ["succeeded"] * 6 + ["running"]
        assert len(written(tmp_path, tmp_path / "sft.jsonl", "--as", "sft", *model)) == 6
        pairs = written(tmp_path, tmp_path / "dpo.jsonl", "--as", "dpo", *model)
        assert [(row["chosen_rollout"], row["rejected_rollout"]) for row in pairs] == [(1, 0), (3, 2)], "those settled"
        writer.append([AttemptEnded(99, 0, Outcome.FAILED, "no", at=5.0)])


def peak(wanted: ExportOptions) -> int:
    """Return the peak of allocated bytes during an export in parts of a few rows."""
    files.MOST_ROWS = 16
    export_rollouts(wanted)
    wanted.to.unlink()
    tracemalloc.start()  # after the first export has loaded its libraries
    export_rollouts(wanted)
    return tracemalloc.get_traced_memory()[1]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "suffix"),
    [("sft", "parquet"), *(pytest.param(kind, "jsonl", marks=pytest.mark.soak) for kind in ("jsonl", "otlp"))],
)
def test_memory_does_not_grow_with_the_run(kind: str, suffix: str, world: Path, tmp_path: Path) -> None:
    model = None if kind == "otlp" else world / "model"
    peaks = []
    for count in (60, 240):
        (tmp_path / str(count)).mkdir()
        run = made(tmp_path / str(count), count)
        peaks.append(alone(peak, ExportOptions(run, run / f"all.{suffix}", kind, model=model)))
    assert peaks[1] < 1.5 * peaks[0], peaks


def test_rollouts_are_read_by_few_statements(tmp_path: Path) -> None:
    made(tmp_path, 80)
    statements: list[str] = []
    with open_journal(tmp_path) as store:
        assert isinstance(store, SqlJournal)
        connection: Any = store._connection.connection.driver_connection
        connection.set_trace_callback(statements.append)
        assert len(list(read_rollouts(store, "all", lambda _: None))) == 80
        assert len(statements) <= 8, statements
        statements.clear()
        assert len(list(read_settled_groups(store, lambda _: None))) == 39
        assert len(statements) <= 12, statements


# -- errors -----------------------------------------------------------------------------------------------------------


def test_an_impossible_export_is_reported_with_a_remedy(talked: Path, tmp_path: Path, capsys: Captured) -> None:
    def error_of(to: str, *words: str, run: Path = talked) -> str:
        return refused(capsys, "export", "rollouts", str(run), str(tmp_path / to), *words)

    assert "has no journal.sqlite" in error_of("a.jsonl", run=tmp_path)
    assert "writes .parquet or .jsonl files" in error_of("a.csv", "--as", "sft") and "a.parquet." in error_of(
        "a.csv", "--as", "sft"
    )
    assert "--tags is for `--as sft` and `--as dpo`" in error_of("a.jsonl", "--tags", "x")
    assert "--min-gap is for pairs" in error_of("a.parquet", "--as", "sft", "--min-gap", "1")
    assert "one rollout a task" in error_of("a.parquet", "--as", "dpo", "--split", "val")
    assert "needs none" in error_of("a.jsonl", "--as", "otlp", "--model", "m")
    assert "32 had a reward below 99. Loosen the options." in error_of("a.parquet", "--as", "sft", "--min-reward", "99")
    assert "has no rollout of the split 'val' yet" in error_of("a.jsonl", "--split", "val")
    assert "had several turns" in error_of("a.parquet", "--as", "dpo", "--form", "text")
    (tmp_path / "there.jsonl").write_text("mine")
    assert "exists already" in error_of("there.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.jsonl"], "nothing is left behind"


def test_the_help_has_examples(capsys: Captured) -> None:
    for words, text in (
        (["export", "--help"], "etude export rollouts --help"),
        (["export", "rollouts", "--help"], "good.parquet --as sft --min-reward 1"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert text in capsys.readouterr().out


def test_the_written_file_is_reported_with_the_next_command(talked: Path, tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "good.parquet"
    assert main(["export", "rollouts", str(talked), str(file), "--as", "sft", "--min-reward", "1.7", "--json"]) == 0
    out = capsys.readouterr().out
    data = json.loads(out.splitlines()[-1])
    assert data["rows"] == pq.read_table(file).num_rows and data["skipped"].keys() == {"had a reward below 1.7"}
    assert f"etude sft model.path=MODEL data.train=[{file}]" in out

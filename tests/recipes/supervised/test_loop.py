"""The promises of every supervised run: its order, its length, its resumption, and its files."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.checkpoint import CheckpointManager
from etude.cli import main
from etude.integrity import read_text, write_text
from etude.recipes.option_names.aliases import SUPERVISED_ALIASES
from etude.recipes.registry import RECIPES as ALL
from etude.recipes.registry import SUPERVISED
from etude.recipes.run.directory import read_recipe, with_absolute_paths
from etude.recipes.run.resume.session_log import read_sessions
from etude.recipes.supervised.builder import build
from etude.recipes.supervised.loop import SupervisedComponents, run_supervised_loop
from tests.house.documents import unexplained_metrics
from tests.option_lists import find_undocumented_fields, find_untyped_fields, list_options
from tests.recipes.runs import Captured, refused, same, step_metrics
from tests.recipes.supervised_runs import (
    RECIPES,
    Killed,
    began,
    dying,
    in_test,
    learned,
    options,
    refusal,
    run_of,
    stopping,
    sums,
    weights,
    write,
)

Finished = Callable[[str], Path]
EVERY = pytest.mark.parametrize("recipe", RECIPES)


# -- the options ------------------------------------------------------------------------------------------------------


@EVERY
def test_the_options_are_few_and_documented(recipe: str) -> None:
    kind = SUPERVISED[recipe]
    assert len(list_options(kind)) <= 88 and not find_untyped_fields(kind) and not find_undocumented_fields(kind)


@EVERY
def test_names_of_other_trainers_are_answered_with_existing_options(recipe: str, capsys: Captured) -> None:
    kind = SUPERVISED[recipe]
    for name in dict.fromkeys(kind.aliases.values()):
        inner: object = kind()
        for part in name.split("."):
            assert hasattr(inner, part), name
            inner = getattr(inner, part)
    assert not kind.aliases.keys() & kind.model_fields.keys() and SUPERVISED_ALIASES.keys() <= kind.aliases.keys()
    assert "here it is epochs" in refused(capsys, recipe, "num_train_epochs=3")


@EVERY
def test_paths_are_seen_from_anywhere(recipe: str, supervised_world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(supervised_world)
    run = with_absolute_paths(
        run_of(recipe, Path(), data__val="[held_out_shown.jsonl]", reference__path="m" if recipe == "dpo" else None)
    )
    assert run.model.path == supervised_world / "model" and run.data.val == (
        str(supervised_world / "held_out_shown.jsonl"),
    )
    for path in run.path_options.values():
        inner: Any = run
        for part in path.split("."):
            inner = getattr(inner, part)
        assert inner is None or inner.is_absolute(), path


@EVERY
def test_options_are_shown_and_read_back(recipe: str, tmp_path: Path, capsys: Captured) -> None:
    assert main(["config", "show", recipe, "batch_size=5", "--yaml"]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    assert main(["config", "show", recipe, "--config", str(tmp_path / "mine.yaml"), "--yaml"]) == 0
    assert capsys.readouterr().out == (tmp_path / "mine.yaml").read_text()
    other = next(name for name in ALL if name != recipe)
    message = refused(capsys, other, "--config", str(tmp_path / "mine.yaml"))
    assert f"holds options of `etude {recipe}`, and this is `etude {other}`: give it there" in message


# -- learning ---------------------------------------------------------------------------------------------------------


@EVERY
def test_a_run_learns_and_logs_its_metrics(recipe: str, supervised_world: Path, finished: Finished) -> None:
    run = finished(recipe)
    steps = step_metrics(run)
    assert [step["step"] for step in steps] == [1, 2, 3] and steps[-1]["epoch"] == pytest.approx(24 / 40)
    assert all({"loss", "grad_norm", "learning_rate", "trained_tokens", "time/update"} <= step.keys() for step in steps)
    assert {step["examples"] for step in steps} == {8} and {step["skipped_rows"] for step in steps} == {0}
    assert not unexplained_metrics(run / "metrics.jsonl", "## Supervised training")
    assert sorted(path.name for path in run.iterdir() if path.name[0] != ".") == [
        *("checkpoints", "inputs.json", "metrics.jsonl", "run.yaml", "sessions.jsonl"),
    ]
    assert [(session.first_step, session.last_step, session.how) for session in read_sessions(run)] == [(0, 3, "done")]
    before, after, learned_too = began(run), weights(run), "model.layers.0.self_attn.q_proj.weight"
    assert before.keys() == after.keys() and not torch.equal(before[learned_too], after[learned_too])


@in_test("dpo")  # which packs pairs; the losses of the others have `conformance/test_law_supervised.py`
def test_the_weights_do_not_depend_on_micro_batches(recipe: str, supervised_world: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"train.precision": "fp64", "steps": 1}
    whole, cut = (
        weights(
            learned(recipe, supervised_world, tmp_path / str(size), train__max_tokens_per_micro_batch=size, **given)
        )
        for size in (9000, 1)
    )
    assert all((whole[name] - cut[name]).abs().max() < 1e-9 for name in whole)


@EVERY
def test_each_example_is_learned_from_as_often_as_epochs_say(
    recipe: str, supervised_world: Path, tmp_path: Path
) -> None:
    with build(
        run_of(recipe, supervised_world, directory=tmp_path / "run", steps=None, epochs=1.5, batch_size=16)
    ) as parts:
        sizes = [parts.examples.next().num_groups for _ in range(parts.examples.total_steps)]
    assert sizes == [16, 16, 16, 12] and sum(sizes) == 60


def test_an_epoch_is_the_length_where_none_is_given(supervised_world: Path, tmp_path: Path) -> None:
    run = learned("sft", supervised_world, tmp_path / "run", steps=None)
    assert len(step_metrics(run)) == 5 and step_metrics(run)[-1]["epoch"] == 1
    seen = []
    with build(run_of("sft", supervised_world, directory=tmp_path / "other", steps=None, seed=3)) as parts:
        for _ in range(5):
            batch = parts.examples.next()
            seen += [tuple(batch.ids[a:b].tolist()) for a, b in zip(batch.offsets, batch.offsets[1:], strict=False)]
    assert len(seen) == 40 and len(set(seen)) == len({(r["prompt"], r["completion"]) for r in sums()[:40]})


def test_examples_of_several_sources_come_in_their_shares(supervised_world: Path, tmp_path: Path) -> None:
    rows = [row | {"data_source": "abc"[n % 10 > 6]} for n, row in enumerate(sums()[:40])]
    file = write(tmp_path / "mixed.jsonl", rows)
    given = {"data.train": f"[{file}]", "data.sampler": "weighted", "data.sampler.weights": "{a: 1, b: 3}"}
    with build(run_of("sft", supervised_world, directory=tmp_path / "run", **given)) as parts:
        order = parts.examples._order
        drawn = [rows[order.advance_to(n)]["data_source"] for n in range(40)]
    assert drawn.count("b") == 30


# -- resuming ---------------------------------------------------------------------------------------------------------


@in_test("sft", "reward-model", "distill", kept="sft")  # `test_two_ranks_learn_what_one_does` goes on with a run of dpo
def test_a_resumed_run_equals_one_that_was_never_stopped(
    recipe: str, supervised_world: Path, finished: Finished, tmp_path: Path
) -> None:
    whole = finished(recipe)
    half = learned(recipe, supervised_world, tmp_path / "half", steps=1)
    assert main([recipe, "--resume", str(half), "steps=3"]) == 0
    assert same(weights(whole), weights(half))
    assert [line["loss"] for line in step_metrics(whole)] == [line["loss"] for line in step_metrics(half)]


def test_a_schedule_resumes_where_it_was(supervised_world: Path, tmp_path: Path, capsys: Captured) -> None:
    given: dict[str, Any] = {"train.lr_scheduler": "cosine", "steps": None, "checkpoint.every": 1, "batch_size": 16}
    whole = learned("sft", supervised_world, tmp_path / "whole", **given)
    run = tmp_path / "run"
    with suppress(Killed), build(run_of("sft", supervised_world, directory=run, **given)) as parts:
        parts.learner = dying(parts.learner, after=2)
        run_supervised_loop(parts)
    assert [step["step"] for step in step_metrics(run)] == [1, 2]
    assert main(["sft", "--resume", str(run)]) == 0
    assert same(weights(run), weights(whole)) and step_metrics(run)[-1]["learning_rate"] < 0.0015
    assert main(["sft", "--resume", str(run)]) == 0
    assert "Its learning-rate schedule is done too: to continue, start a new run" in capsys.readouterr().err
    assert "epochs was None, is 2" in refused(capsys, "sft", "--resume", str(run), "epochs=2")


def test_more_epochs_extend_a_run(supervised_world: Path, tmp_path: Path, capsys: Captured) -> None:
    run = learned("sft", supervised_world, tmp_path / "run", steps=None, epochs=1, batch_size=30)
    assert [step["examples"] for step in step_metrics(run)] == [30, 10]
    assert main(["sft", "--resume", str(run), "epochs=2"]) == 0
    assert [step["examples"] for step in step_metrics(run)[2:]] == [30, 10]
    assert step_metrics(run)[-1]["epoch"] == 2
    assert main(["sft", "--resume", str(run)]) == 0
    assert "All 4 steps are done. To continue, ask for more of them: `epochs=4`." in capsys.readouterr().err
    message = refused(capsys, "sft", "--resume", str(run), "epochs=0.5")
    assert "has gone through its examples 2 times, and `epochs=0.5` asks for less" in message


def test_a_resumed_run_counts_its_earlier_steps(supervised_world: Path, tmp_path: Path, capsys: Captured) -> None:
    run = learned("sft", supervised_world, tmp_path / "run", steps=None, epochs=1, batch_size=30)
    assert main(["sft", "--resume", str(run), "epochs=null", "steps=3"]) == 0
    assert [step["examples"] for step in step_metrics(run)] == [30, 10, 30]
    assert main(["sft", "--resume", str(run)]) == 0 and len(step_metrics(run)) == 3
    assert "has done 3 steps, and `steps=2` asks for fewer" in refused(capsys, "sft", "--resume", str(run), "steps=2")


def test_other_options_and_other_files_are_refused(supervised_world: Path, tmp_path: Path, capsys: Captured) -> None:
    file = write(tmp_path / "mine.jsonl", sums())
    run = learned("sft", supervised_world, tmp_path / "run", data__train=f"[{file}]", steps=1)
    assert "batch_size was 8, is 9" in refused(capsys, "sft", "--resume", str(run), "batch_size=9")
    write(file, sums(seed=1))
    assert "was started on other files: data.train[0]: mine.jsonl" in refused(capsys, "sft", "--resume", str(run))
    (tmp_path / "moved").mkdir()
    moved = write(tmp_path / "moved" / "mine.jsonl", sums())
    assert main(["sft", "--resume", str(run), f"data.train=[{moved}]", "steps=2"]) == 0


def test_a_run_of_another_command_is_reported(supervised_world: Path, tmp_path: Path, capsys: Captured) -> None:
    run = learned("sft", supervised_world, tmp_path / "run", steps=1)
    for words in (["train", "--resume", str(run)], ["dpo", "--resume", str(run)]):
        message = refused(capsys, *words)
        assert (
            f"holds a run of `etude sft`, and this is `etude {words[0]}`" in message
            and f"sft --resume {run}" in message
        )
    message = refused(capsys, "dpo", *options("dpo", supervised_world, directory=run))
    assert "holds a run of `etude sft`, and this is `etude dpo`" in message
    write_text(run / "run.yaml", read_text(run / "run.yaml").replace("recipe: sft", "recipe: sing"))
    assert "a run of `etude sing`, which this version does not have" in refused(capsys, "export", str(run), "x")


def test_a_signal_ends_the_step_saves_and_says_how_to_resume(
    supervised_world: Path, finished: Finished, tmp_path: Path, capsys: Captured
) -> None:
    run = tmp_path / "a run"
    with pytest.raises(KeyboardInterrupt), build(run_of("sft", supervised_world, directory=run, steps=3)) as parts:
        update, calls = parts.learner.update, iter(range(9))

        def signalled(batch: Any) -> Any:
            if next(calls) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return update(batch)

        object.__setattr__(parts.learner, "update", signalled)
        run_supervised_loop(parts)
    message = capsys.readouterr().err
    assert "Stopping after this step" in message and "Stopped after step 2 of 3. Go on with: " in message
    words = shlex.split(message.partition("Go on with: ")[2].splitlines()[0])
    assert words[1:3] == ["sft", "--resume"] and main(words[1:]) == 0
    assert same(weights(run), weights(finished("sft")))


@pytest.mark.parametrize(
    "point",
    [
        *(pytest.param(name, marks=pytest.mark.integration) for name in ("updated", "checkpoint.writing")),
        *("checkpoint.renaming", "saved"),
    ],
)
@pytest.mark.parametrize("in_background", ["false", "true"])
def test_a_run_that_ends_anywhere_resumes_bit_for_bit(
    point: str, in_background: str, supervised_world: Path, finished: Finished, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"steps": 3, "checkpoint.every": 2, "checkpoint.async_save": in_background}
    with suppress(Killed), build(run_of("sft", supervised_world, directory=tmp_path / "run", **given)) as parts:
        run_supervised_loop(_mortal(parts, point))
    newest = CheckpointManager(tmp_path / "run" / "checkpoints").newest()
    assert newest is None or newest.step < 3, "it has not come to its end"
    again = learned("sft", supervised_world, tmp_path / "run", **given)
    assert same(weights(again), weights(finished("sft"))) and [s["step"] for s in step_metrics(again)] == [1, 2, 3]


def _mortal(parts: SupervisedComponents, point: str) -> SupervisedComponents:
    """Return the parts of a loop that ends at a point: after its third update, or in its first save, or after that."""

    def reached(name: str) -> None:
        if name == point:
            raise Killed

    saver = parts.checkpoint
    saver.checkpoints = CheckpointManager(saver.checkpoints.directory, saver.checkpoints.keep, on_point=reached)
    if point == "updated":
        parts.learner = dying(parts.learner, after=2)
    elif point == "saved":
        saver.maybe_save = stopping(saver.maybe_save, Killed(), after=2)  # type: ignore[method-assign]
    return parts


@pytest.mark.soak
def test_a_run_that_is_killed_resumes_bit_for_bit(supervised_world: Path, tmp_path: Path) -> None:
    """`kill -9` at any moment."""
    held_out = f"[{supervised_world / 'held_out_shown.jsonl'}]"
    words = options("sft", supervised_world, steps=300, **{"checkpoint.every": 3, "data.val": held_out})
    whole = learned("sft", supervised_world, tmp_path / "whole", steps=300, **{"checkpoint.every": 100})
    run, kills = tmp_path / "run", 0
    command = [sys.executable, "-m", "etude", "sft", *words, f"directory={run}"]
    for _ in range(2):
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        done, deadline = _lines(run), time.monotonic() + 120
        while running.poll() is None and _lines(run) < done + 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        kills += running.poll() is None
        running.kill()
        running.communicate()
    assert kills == 2 and _lines(run) < 300, "both struck while it learned"
    assert main(["sft", *words, f"directory={run}"]) == 0
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(301)), "each step has its line, and only one"
    assert same(weights(run), weights(whole))


def _lines(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


# -- validation -------------------------------------------------------------------------------------------------------


@in_test("dpo")
def test_held_out_examples_are_measured_when_they_are_due(
    recipe: str, supervised_world: Path, finished: Finished, tmp_path: Path
) -> None:
    name = "held_out_pairs" if recipe in ("dpo", "reward-model") else "held_out_shown"
    given = {"data.val": f"[{supervised_world / name}.jsonl]", "evaluate.every": 2, "steps": 3}
    run = learned(recipe, supervised_world, tmp_path / "run", **given)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval/loss" in line] == [0, 2, 3]
    assert ("eval/accuracy" in lines[0]) is (recipe in ("dpo", "reward-model"))
    assert same(weights(run), weights(finished(recipe))), "nothing is learned from them"


def test_the_best_checkpoint_is_that_of_the_least_loss(supervised_world: Path, tmp_path: Path) -> None:
    held_out = f"[{supervised_world / 'held_out_shown.jsonl'}]"
    given = {"data.val": held_out, "evaluate.every": 1, "steps": 10, "train.learning_rate": 0.2, "checkpoint.keep": 1}
    run = learned("sft", supervised_world, tmp_path / "run", **given)
    losses = {step["step"]: step["eval/loss"] for step in step_metrics(run)}
    best = CheckpointManager(run / "checkpoints").best()
    assert best is not None and best.step == min(losses, key=lambda step: losses[step]) != 10
    assert main(["export", str(run), str(tmp_path / "model"), "--best"]) == 0
    assert (tmp_path / "model" / "config.json").is_file()


def test_a_loss_of_nan_marks_no_best_and_is_saved(supervised_world: Path, tmp_path: Path, capsys: Captured) -> None:
    given = {"data.val": f"[{supervised_world / 'held_out_shown.jsonl'}]", "evaluate.every": 1, "steps": 1}
    run = learned("sft", supervised_world, tmp_path / "run", **given | {"train.learning_rate": 1e38})
    message = capsys.readouterr().err
    assert re.search(r"The loss on `data\.val` is (nan|inf) after step 1: it .* marks no best checkpoint", message)
    checkpoints = CheckpointManager(run / "checkpoints")
    newest, best = checkpoints.newest(), checkpoints.best()
    assert newest is not None and newest.step == 1 and newest.facts["score"] is None and best is None


def test_evaluate_limit_bounds_the_held_out_examples(supervised_world: Path, tmp_path: Path) -> None:
    held_out = f"[{supervised_world / 'held_out_shown.jsonl'}]"
    with build(
        run_of("sft", supervised_world, directory=tmp_path, **{"data.val": held_out, "evaluate.limit": 3})
    ) as parts:
        assert parts.evaluate.read().num_groups == 3


def test_evaluation_without_held_out_examples_is_reported(
    supervised_world: Path, tmp_path: Path, capsys: Captured
) -> None:
    learned("sft", supervised_world, tmp_path / "run", **{"evaluate.every": 2, "observe.wandb.project": "mine"})
    message = capsys.readouterr().err
    assert "so nothing is measured. Give them with `data.val=[held_out.parquet]`" in message
    assert "`observe.wandb.mode` is disabled" in message


# -- commands on a run ------------------------------------------------------------------------------------------------


def test_a_run_can_generate_be_scored_exported_and_drawn(finished: Finished, tmp_path: Path, capsys: Captured) -> None:
    run = finished("sft")
    capsys.readouterr()
    assert main(["generate", str(run), "--raw", "3+4=", "sampling.max_tokens=4", "sampling.temperature=0"]) == 0
    assert capsys.readouterr().out.strip()
    tasks = write(
        tmp_path / "tasks.jsonl", [{"prompt": row["prompt"], "answer": row["completion"]} for row in sums()[:5]]
    )
    words = [f"data.val=[{tasks}]", "reward=exact_match", "sampling.max_tokens=4", "observe.console=plain", "--json"]
    assert main(["eval", str(run), *words]) == 0
    message = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert message["step"] == 3 and message["tasks"] == 5 and Path(message["answers"]).parent == run / "evaluations"
    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    assert main(["plot", str(run)]) == 0 and (run / "plot.png").is_file()
    assert "batch_size is not an option" in refused(capsys, "generate", str(run), "x", "batch_size=3")


def test_a_finished_run_names_the_next_commands(supervised_world: Path, tmp_path: Path, capsys: Captured) -> None:
    run = learned("dpo", supervised_world, tmp_path / "run")
    message = capsys.readouterr().err
    assert "examples: 40" in message and f"plot {run}" in message and f"export {run} my-model" in message
    assert "answers" not in message
    assert main(["dpo", "--resume", str(run)]) == 0
    assert "All 2 steps are done. To continue, ask for more of them: `steps=4`." in capsys.readouterr().err


@pytest.mark.integration
def test_a_sweep_runs_one_after_another(supervised_world: Path, tmp_path: Path) -> None:
    assert main(["sft", "--multirun", *options("sft", supervised_world, directory=tmp_path, steps=1, seed="0,1")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-seed-0", "1-seed-1"]
    assert step_metrics(tmp_path / "0-seed-0")[0]["loss"] != step_metrics(tmp_path / "1-seed-1")[0]["loss"]


def test_the_options_of_a_run_are_written(supervised_world: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with build(run_of("distill", supervised_world, directory=run, **{"temperature": 2, "teacher.top": 3})):
        pass
    held = read_recipe(SUPERVISED["distill"], run)
    assert "recipe: distill" in (run / "run.yaml").read_text()
    assert held == with_absolute_paths(
        run_of("distill", supervised_world, directory=run, **{"temperature": 2, "teacher.top": 3})
    )


# -- runs that are refused --------------------------------------------------------------------------------------------


@EVERY
def test_missing_inputs_are_reported(recipe: str, supervised_world: Path, tmp_path: Path, capsys: Captured) -> None:
    for changes, message in (
        ({"data.train": None}, "`data.train=[examples.parquet]`"),
        ({"data.train": f"[{supervised_world / 'tasks.jsonl'}]"}, "it has prompt, answer, data_source"),
    ):
        assert message in refusal(capsys, recipe, supervised_world, tmp_path / "run", **changes), changes


def test_impossible_options_are_reported(supervised_world: Path, tmp_path: Path, capsys: Captured) -> None:
    given: list[tuple[dict[str, Any], str]] = [
        ({"model.path": None}, "`model.path=…`"),
        ({"model.path": tmp_path / "nowhere"}, "is no directory"),
        ({"data.train": "[nowhere.jsonl]"}, "no such file"),
        ({"data.max_tokens": 4000}, "does not fit into this model's context of 128"),
        ({"epochs": 2}, "both set the length of the run"),
        ({"data.sampler": "curriculum"}, "there is no 'curriculum'"),
        ({"train.lr_scheduler": "linear", "train.warmup_steps": 2}, "leaves nothing of the 2 updates"),
    ]
    for changes, message in given:
        assert message in refusal(capsys, "sft", supervised_world, tmp_path / "run", **changes), changes


def test_a_loss_without_its_columns_is_refused(supervised_world: Path, tmp_path: Path, capsys: Captured) -> None:
    for loss, message in (
        ("etude.algorithms.losses.preference:DPO", "needs the column `ref_logp`, which takes a reference: `etude dpo`"),
        ("etude.algorithms.losses.distill:TopKDistillation", "takes a teacher: `etude distill` has one"),
        ("tests.recipes.test_batch_columns:Weighted", "which takes `data.batch_columns` of `etude train`"),
        ("etude.algorithms.losses.preference:RewardModelLoss", "takes pairs of which one is preferred"),
    ):
        assert message in refusal(capsys, "sft", supervised_world, tmp_path / "run", loss=loss)
    message = refusal(
        capsys, "dpo", supervised_world, tmp_path / "run", loss="etude.algorithms.losses.preference:RewardModelLoss"
    )
    assert "needs the model's `score`, which a model of `etude dpo` does not compute" in message

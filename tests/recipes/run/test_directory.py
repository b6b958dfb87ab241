"""A run's directory: held by one process, written completely, and different for different runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from etude.config.compose import compose
from etude.config.resume_marks import marked_options
from etude.config.tree import to_tree
from etude.errors import ConfigError, CrewError, DamagedFileError, DataError, RunError
from etude.integrity import write_text
from etude.observe import read_last_step
from etude.recipes.run.config import Run
from etude.recipes.run.directory import (
    JOURNAL,
    LOCK,
    OPTIONS,
    RANK_LOGS,
    STORE_RUN_FILE,
    check_same_options,
    differences,
    lock_directory,
    new_directory,
    read_metrics,
    read_options,
    read_recipe_name,
    read_run,
    with_absolute_paths,
    write_options,
)
from etude.recipes.run.machine.placement import ROLES
from etude.records import Task
from etude.rewards import RewardFunction
from etude.rollout import TorchEngineConfig, VllmConfig
from etude.store import open_store
from tests.recipes import supervised_runs
from tests.recipes.runs import at, options, run_of, train
from tests.worlds import make_model

HOLD = """
import fcntl, sys, time
lock = open(sys.argv[1], "a+")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_a_new_directory_was_not_there_before(tmp_path: Path) -> None:
    seen = []
    for _ in range(3):
        seen.append(new_directory(tmp_path, "train"))
        seen[-1].mkdir()
    assert len(set(seen)) == 3 and all(path.name.startswith("train-2") for path in seen)


def test_one_process_at_a_time_holds_a_directory(tmp_path: Path) -> None:
    with (
        lock_directory(tmp_path / "run"),
        pytest.raises(RunError, match="in use by process"),
        lock_directory(tmp_path / "run"),
    ):
        pass
    with lock_directory(tmp_path / "run"):
        (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert (tmp_path / "run").is_dir()


def test_the_lock_is_released_when_its_process_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / LOCK], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match="in use"), lock_directory(tmp_path):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with lock_directory(tmp_path):
        assert tmp_path.is_dir()


def test_an_empty_new_directory_is_removed_again(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="before anything"), lock_directory(tmp_path / "new"):
        raise ValueError("before anything was written")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="refused"), lock_directory(tmp_path / "new"):
        open_store(tmp_path / "new" / JOURNAL).close()
        (tmp_path / "new" / STORE_RUN_FILE).touch()
        raise ValueError("refused before its options were written")
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    with lock_directory(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine").is_dir(), "what was there before stays"


def test_logs_of_refused_ranks_are_removed_and_those_of_a_lost_rank_stay(tmp_path: Path) -> None:
    for error, stays in ((ConfigError("refused"), False), (CrewError("lost; its log: …"), True)):
        directory = tmp_path / str(stays)
        with pytest.raises(type(error)), lock_directory(directory):
            (directory / RANK_LOGS).mkdir()
            (directory / RANK_LOGS / "rank-0.log").write_text("its last words")
            raise error
        assert directory.exists() is stays


def test_written_options_are_read_back(world: Path, tmp_path: Path) -> None:
    run = run_of(world, seed=7, loss="gspo").model_copy(update={"directory": tmp_path / "a b=c"})
    (tmp_path / "a b=c").mkdir()
    write_options(tmp_path / "a b=c", run)
    assert read_run(tmp_path / "a b=c") == run
    assert [path.name for path in (tmp_path / "a b=c").iterdir()] == [OPTIONS]
    moved = (tmp_path / "a b=c").rename(tmp_path / "moved")
    assert read_run(moved, ["steps=9"]) == run.model_copy(update={"directory": moved, "steps": 9})


def test_another_run_is_identified_by_its_differences(world: Path, tmp_path: Path) -> None:
    run = run_of(world)
    write_options(tmp_path, run)
    check_same_options(tmp_path, run)
    check_same_options(tmp_path / "empty", run)
    with pytest.raises(ConfigError, match=r"loss\.name was ppo, is gspo.*seed was 0, is 1"):
        check_same_options(tmp_path, run_of(world, seed=1, loss="gspo"))


TRAIN_VALUES = {"activation_checkpointing": "full", "compile": "true", "offload": "true", "engine": "fsdp"}


JUDGED = {"reward": "judge", "reward.path": None, "reward.base_url": "http://here/v1", "reward.model": "small"}


def changed(path: str) -> tuple[dict[str, Any], str, str]:
    """Return the other options that give an option its meaning, the option's name, and another value of it."""
    sections = {"observe": "observe.level=error", "evaluate": "evaluate.every=3", "checkpoint": "checkpoint.every=3"}
    values = {"directory": "elsewhere", "device": "cpu", "data.val": "[others.jsonl]", "rollout.prepack": "false"}
    values |= {f"{whose}train.{name}": value for whose in ("", "critic.") for name, value in TRAIN_VALUES.items()}
    values |= {"lora.publish": "merged", "reward.prices": "[1,2]", "ess_floor": "0.3", "allow_unbounded_ratios": "true"}
    values |= {"agent.strategy": "cs", "agent.listen": "127.0.0.1:8700"}
    values |= {"agent.store": "http://127.0.0.1:8700", "placement.layout": "split"}
    values |= {f"placement.{role}": "engine" for role in ROLES}
    values |= {
        "rollout.url": "[http://127.0.0.1:8000]",
        "rollout.python": "python3",
        "rollout.rendezvous": "10.0.0.1:2900",
    }
    values |= {"mesh": "{tensor: 3}", "cluster": "ray", "rollout.weight_transport": "shm", "rollout.devices": "[3]"}
    values |= {"rollout.gpu_memory_utilization": "0.3", "rollout.restarts": "5", "rollout.running": "finish"}
    values |= {"rollout.kv": "keep", "collect.order": "windowed", "collect.window": "9"}
    values |= {"rollout.api_key_env": "KEY", "rollout.address": "10.0.0.1", "rollout.adapters": "only"}
    beside: dict[str, Any] = dict(JUDGED) if path.startswith("reward.") else {}
    beside |= {"lora.rank": 2} if path == "lora.publish" else {}
    served = (VllmConfig.model_fields.keys() - TorchEngineConfig.model_fields.keys()) | PUBLISHING
    beside |= {"rollout": "vllm"} if path.removeprefix("rollout.") in served else {}
    beside |= {"rollout.url": "http://127.0.0.1:8000"} if path == "rollout.api_key_env" else {}
    beside |= {"rollout.tensor_parallel": 3} if path in ("rollout.nodes", "rollout.rendezvous") else {}
    beside |= {"rollout.nodes": 3} if path == "rollout.rendezvous" else {}
    carried = ("rollout.bucket_mib", "rollout.running", "rollout.update_timeout", "rollout.address")
    beside |= {"rollout.weight_transport": "gloo"} if path in carried else {}
    beside |= {"ranks": 3} if path == "mesh" else {}
    name, _, value = sections.get(path, f"{path}={values.get(path, '3')}").partition("=")
    return beside, name, value


PUBLISHING = {"running", "kv", "update_timeout"}
"""Options of requests during a publish, which a run with the embedded engine has in other cases only."""
ALONE = ("mesh", "rollout.adapters", "rollout.url", "rollout.weight_transport", "rollout.devices")
"""Options that do not go with others of the same need."""


def test_options_that_may_change_keep_the_run_the_same(world: Path) -> None:
    """Options of one need are given at once: composing takes a tenth of a second."""
    groups: dict[object, tuple[dict[str, Any], dict[str, str]]] = {}
    runs = [run_of(world, **beside) for beside in ({}, {"rollout": "vllm"}, JUDGED)]
    marked = sorted({path for run in runs for path, _ in marked_options(run)})
    assert len(marked) > 70
    for path in marked:
        beside, name, value = changed(path)
        key = path if path in ALONE else tuple(beside.items())
        groups.setdefault(key, (beside, {}))[1][name] = value
    assert sum(len(values) for _, values in groups.values()) == len(marked)
    for beside, values in groups.values():
        run, other = run_of(world, **beside), run_of(world, **beside | values)
        assert not differences(run, other), values
        one, another = to_tree(run), to_tree(other)
        assert not [name for name in values if at(one, name) == at(another, name)]


def test_options_of_a_supervised_run_that_may_change_keep_the_run_the_same(supervised_world: Path) -> None:
    """All of them at once, except those that do not go with others."""
    marked = [path for path, _ in marked_options(supervised_runs.run_of("sft", supervised_world))]
    values = dict.fromkeys(marked, "3") | {"lora.publish": "merged"}
    values |= {"device": "cpu", "directory": "elsewhere", "data.val": "[others.jsonl]", "cluster": "ray"}
    values |= {"mesh": "{tensor: 3}"} | {f"train.{name}": value for name, value in TRAIN_VALUES.items()}
    sections = {"observe": ("level", "error"), "evaluate": ("every", "3"), "checkpoint": ("every", "3")}
    for section, (name, value) in sections.items():
        del values[section]
        values[f"{section}.{name}"] = value
    assert len(values) == len(marked)
    for names in (values.keys() - {"mesh", "epochs"}, {"mesh"}, {"epochs"}):
        beside: dict[str, Any] = {"steps": None, "lora.rank": 2} | ({"ranks": 3} if "mesh" in names else {})
        mine, other = (
            supervised_runs.run_of("sft", supervised_world, **beside),
            supervised_runs.run_of("sft", supervised_world, **beside | {n: values[n] for n in names}),
        )
        assert not differences(mine, other)
        one, another = to_tree(mine), to_tree(other)
        assert not [name for name in names if at(one, name) == at(another, name)]


def test_the_last_metrics_of_a_step_count(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 1}\n{"step": 1, "loss": 2}\n{"step": 2, "loss": 3}\n')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2}, {"step": 2, "loss": 3}]


def test_every_run_knows_its_defaults() -> None:
    assert not differences(Run(), Run()) and differences(Run(), Run(seed=1)) == [("seed", 0, 1)]


def test_more_steps_keep_the_run_the_same_only_with_a_constant_schedule(world: Path) -> None:
    for whose, scheduler, same in (
        *(("train", "constant", True), ("train", "linear", False)),
        *(("critic.train", "constant", True), ("critic.train", "linear", False)),
    ):
        given = {"advantage": "gae", f"{whose}.lr_scheduler": scheduler}
        before, after = (run_of(world, steps=n, **given) for n in (2, 3))
        assert (not differences(before, after)) is same


def test_paths_are_seen_from_anywhere_and_moving_makes_no_other_run(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world)
    run = run_of(Path(), **{"reward.path": "mine.py:score", "data.val": "[held_out.jsonl,tests.x:rows]"})
    result = with_absolute_paths(run)
    assert result.model.path == world / "model" and result.data.train == (str(world / "tasks.jsonl"),)
    assert result.data.val == (str(world / "held_out.jsonl"), "tests.x:rows")
    assert result.reward.model_dump()["path"] == f"{world / 'mine.py'}:score" and with_absolute_paths(result) == result
    monkeypatch.chdir(tmp_path)
    moved = run.model_copy(update={"model": run.model.model_copy(update={"path": tmp_path / "model"})})
    assert not differences(result, with_absolute_paths(moved.model_copy(update={"reward": result.reward})))


def test_files_inside_a_run_are_found_where_it_is_now(world: Path, tmp_path: Path) -> None:
    before, now = tmp_path / "before", tmp_path / "now"
    inside = {"model.path": before / "model", "data.train": f"[{before}/tasks.jsonl]"}
    before.mkdir()
    write_options(before, run_of(world, directory=before, **inside, **{"reward.path": f"{before}/mine.py:score"}))
    before.rename(now)
    run, tree = read_run(now), read_options(now)
    assert (run.model.path, run.data.train) == (now / "model", (f"{now}/tasks.jsonl",))
    assert run.reward.model_dump()["path"] == tree["reward"]["path"] == f"{now}/mine.py:score"
    assert (tree["directory"], tree["model"]["path"], tree["data"]["train"]) == (
        *(str(now), f"{now}/model"),
        [f"{now}/tasks.jsonl"],
    )


def test_a_run_stays_where_it_is(world: Path, tmp_path: Path) -> None:
    write_options(tmp_path, run_of(world))
    with pytest.raises(ConfigError, match=r"directory=other.*stays where it is"):
        read_run(tmp_path, ["directory=other"])


class Keyed(RewardFunction):
    """A judge whose key must stay secret."""

    api_key: str = Field(description="who pays")

    def __call__(self, task: Task, answer: str) -> float:
        return 0.0


def test_a_secret_is_not_written_and_can_be_given_again(world: Path, tmp_path: Path) -> None:
    key = "reward.api_key=sk-verysecret123456"
    run = compose(Run, [*options(world, **{"reward": f"{__name__}:Keyed", "reward.path": None}), key])
    write_options(tmp_path, run)
    assert "verysecret" not in (tmp_path / OPTIONS).read_text()
    check_same_options(tmp_path, run)
    with pytest.raises(ConfigError, match=r"reward\.api_key is \*\*\*.*Set it again as reward\.api_key=…"):
        read_run(tmp_path)
    again = read_run(tmp_path, [key, "steps=3"])
    assert again.reward == run.reward and again.steps == 3
    check_same_options(tmp_path, again)
    assert read_run(tmp_path, masked=lambda path: path).reward.model_dump()["api_key"] == "reward.api_key"


def test_a_run_needs_a_separate_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    for directory in (Path(), tmp_path / "deep", tmp_path):
        with pytest.raises(ConfigError, match="is the current directory or a parent of it"), lock_directory(directory):
            pass
    with lock_directory(tmp_path / "deep" / "run"):
        pass


def test_a_metrics_line_that_was_cut_off_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2}]


def test_other_options_are_reported_with_a_way_to_train_on_with_them(tmp_path: Path) -> None:
    write_options(tmp_path, compose(Run, ["model.path=m", "train.lr_scheduler=cosine"]))
    with pytest.raises(ConfigError) as caught:
        check_same_options(
            tmp_path, compose(Run, ["model.path=m", "train.lr_scheduler=cosine", "train.learning_rate=1e-3"])
        )
    message = str(caught.value)
    assert "train.learning_rate was 1e-06, is 0.001. To continue, leave that out." in message
    assert "begin a new run in another `directory`: this one has saved no step" in message and "export" not in message
    (tmp_path / "checkpoints" / "step-00000001.0").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"`etude export .* my-model`.*`model\.path=my-model`"):
        check_same_options(tmp_path, compose(Run, ["model.path=m", "train.learning_rate=1e-3"]))
    with pytest.raises(ConfigError, match=r"may change only while nothing depends on it: .* constant\. To continue"):
        check_same_options(tmp_path, compose(Run, ["model.path=m", "train.lr_scheduler=cosine", "steps=7"]))


def test_an_option_of_another_version_is_told_with_what_continues_the_run(world: Path, tmp_path: Path) -> None:
    """Options of a run's file cannot be left out or corrected by hand, so that the error says what can be done."""
    write_options(tmp_path, run_of(world, directory=tmp_path))
    lines = (tmp_path / OPTIONS).read_text().rpartition("# sha256")[0]
    write_text(tmp_path / OPTIONS, lines.replace("\ntrain:\n", "\ntrain:\n  former: none\n", 1))
    with pytest.raises(ConfigError, match=r"train\.former is not an option.*\n.*another version.*sessions\.jsonl"):
        read_run(tmp_path)
    write_options(tmp_path, run_of(world, directory=tmp_path))
    with pytest.raises(ConfigError, match=r"train\.former is not an option") as caught:
        read_run(tmp_path, ["train.former=none"])
    assert "another version" not in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    ["", "steps: 9\n", "recipe: train\n# sha256: 12", "- a list\n", "\x00"],
    ids=["empty", "other", "cut", "list", "binary"],
)
def test_damaged_options_are_reported(damage: str, world: Path, tmp_path: Path) -> None:
    run = run_of(world, directory=tmp_path)
    write_options(tmp_path, run)
    (tmp_path / OPTIONS).write_text(damage)
    for read in (
        lambda: read_run(tmp_path),
        lambda: check_same_options(tmp_path, run),
        lambda: read_recipe_name(tmp_path),
    ):
        with pytest.raises(DamagedFileError, match=r"run\.yaml is damaged: its last line.*first command once more"):
            read()
    write_options(tmp_path, run)
    file = tmp_path / OPTIONS
    file.write_text(file.read_text().replace("learning_rate: 0.01", "learning_rate: 0.03"))
    with pytest.raises(
        DamagedFileError, match=r"run\.yaml was changed or damaged.*given with the command, as `key=value`"
    ):
        read_run(tmp_path)


def test_a_run_that_lost_its_options_resumes_with_its_first_command(world: Path, tmp_path: Path) -> None:
    run = train(world, tmp_path / "run", steps=2)
    (run / OPTIONS).unlink()
    with pytest.raises(RunError, match=r"run\.yaml is missing.*first command once more.*`directory="):
        read_recipe_name(run)
    assert train(world, run, steps=3) == run and [line["step"] for line in read_metrics(run)] == [1, 2, 3]
    assert read_recipe_name(run) == "train"


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    """For example that of a model, which would no longer be accepted as a model."""
    model = make_model(tmp_path / "model")
    before = {path: path.read_bytes() for path in model.iterdir()}
    with (
        pytest.raises(ConfigError, match=r"model` is not empty and holds no run, but config.json.*directory="),
        lock_directory(model),
    ):
        pass
    assert {path: path.read_bytes() for path in model.iterdir()} == before
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / ".gitkeep").touch()
    with lock_directory(tmp_path / "hidden"):
        open_store(tmp_path / "hidden" / JOURNAL).close()
    with lock_directory(tmp_path / "hidden"):  # a run that did not start left this
        pass


@pytest.mark.parametrize(
    "line",
    ["garbage", "{}", "null", '{"step": "4"}', '{"step": 1e99}', "[" * 9_999, '{"step": 1, "a": []}'],
    ids=["text", "empty", "null", "word", "float", "deep", "list"],
)
def test_an_invalid_metrics_line_is_reported_and_stops_no_run(
    line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "loss": 2}}\n{line}\n{{"step": 2, "loss": 1}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2, is not a step with its metrics.*Repair or remove"):
        read_metrics(tmp_path)
    assert read_last_step(tmp_path) == 2 and "line 2, is not a step" in caplog.text

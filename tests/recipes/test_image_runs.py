"""Whole runs on tasks with images, whose environment shows more images: trained, stopped, resumed and scored."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.cli import main
from etude.envs import Observation, read_image
from etude.images import image_digest
from etude.images.encoding import encode_png
from etude.recipes.run.builders.assemble import build
from etude.recipes.run.builders.crew import RankBuilder
from etude.recipes.run.builders.policy import PolicyLoader, build_chat_renderer
from etude.records import Message, Task
from etude.store import TurnRecorded, open_store
from etude.train.backend import model_of
from tests.recipes.runs import Captured, options, refused, rows_of, run_of, same, step_metrics, train, weights
from tests.rollout.engines import engine_of
from tests.vlms import make_vlm, picture
from tests.waits import blocked_until

ROOT = Path(__file__).parents[2]
NAME = "tests.recipes.test_image_runs"
LOOKS: dict[str, Any] = {
    "env.path": f"{NAME}:Magnifier",
    "reward": "environment",
    "reward.path": None,
    "data.max_prompt_length": 100,
    "sampling.max_tokens": 6,
    "collect.tasks": 2,
    "collect.group_size": 2,
}


class Magnifier:
    """An environment that shows a part of the task's picture after the first answer."""

    def reset(self, task: Task) -> Observation:
        self._picture = read_image(task["images"][0])
        self._turns = 0
        return Observation()

    def step(self, answer: Message) -> Observation:
        self._turns += 1
        earned = sum(map(ord, str(answer.content))) % 7 / 7
        if self._turns == 2:
            return Observation(done=True, reward=earned)
        width, height = self._picture.size
        return Observation(["Closer:", self._picture.crop((0, 0, width // 2, height))], reward=earned)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, tasks with pictures beside them, and tasks to score on."""
    directory = tmp_path_factory.mktemp("pictures")
    (directory / "model").symlink_to(make_vlm("qwen2_5_vl"))
    for name, first in (("tasks", 0), ("held_out", 10)):
        rows = []
        for seed in range(first, first + 3):
            (directory / f"{seed}.png").write_bytes(encode_png(picture(seed, 32 + 8 * (seed % 3), 24)))
            message = {"role": "user", "content": "<image> How many?"}
            rows.append({"prompt": [message], "images": [f"{seed}.png"], "answer": "two"})
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return directory


@pytest.fixture(scope="module")
def straight(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps without an interruption."""
    scored = {"data.val": world / "held_out.jsonl", "checkpoint.every": 1}
    return train(world, tmp_path_factory.mktemp("straight") / "run", steps=2, **LOOKS, **scored)


def test_the_journal_has_each_image_once_and_turns_show_them(world: Path, straight: Path) -> None:
    with closing(open_store(straight / "journal.sqlite", read_only=True)) as store:
        turns = [event.turn for _, event in store.read(kinds=(TurnRecorded,)) if isinstance(event, TurnRecorded)]
        shown = {span.digest for turn in turns for span in turn.images}
        files = {image_digest((world / f"{seed}.png").read_bytes()) for seed in (*range(3), *range(10, 13))}
        assert files <= shown and len(shown) == 2 * len(files), "of each picture, the picture and a part of it"
        assert set(store.image_refs(list(shown))) == shown
    assert [len({span.digest for span in turn.images}) for turn in turns[:2]] == [1, 2]
    assert step_metrics(straight)[-1]["turns"] == 2


def test_a_resumed_run_equals_one_that_was_never_stopped(world: Path, straight: Path, tmp_path: Path) -> None:
    half = train(world, tmp_path / "half", steps=1, **LOOKS)
    train(world, half, steps=2, **LOOKS)
    assert same(weights(half), weights(straight))
    before = weights(straight, 1)
    assert not same(before, weights(straight))


def test_rollouts_after_a_checkpoint_are_read_back_with_their_images(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(world, directory=tmp_path / "run", steps=2, **LOOKS)
    with build(run) as parts:
        parts.begin()
        before = parts.source.next(1)
    with build(run) as parts:
        monkeypatch.setattr(Magnifier, "step", None)
        after = parts.source.next(1)
    assert after.replayed and [each.images for each in before.scored] == [each.images for each in after.scored]
    for one, other in zip(rows_of(before), rows_of(after), strict=True):
        assert (one.ids == other.ids).all() and one.images == other.images and len(one.images) == 2


def test_other_pictures_train_another_model(world: Path, straight: Path, tmp_path: Path) -> None:
    """So the pictures reach the update, and not their sizes alone."""
    other = tmp_path / "world"
    other.mkdir()
    (other / "model").symlink_to(make_vlm("qwen2_5_vl"))
    (other / "tasks.jsonl").write_text((world / "tasks.jsonl").read_text())
    for seed in range(3):
        (other / f"{seed}.png").write_bytes(encode_png(picture(seed + 100, 32 + 8 * (seed % 3), 24)))
    changed = train(other, tmp_path / "run", steps=1, **LOOKS)
    assert not same(weights(changed), weights(straight, 1))
    assert all(bool(torch.isfinite(weight).all()) for weight in weights(changed).values())


def test_a_policy_is_scored_on_tasks_with_images_as_in_its_run(straight: Path, capsys: Captured) -> None:
    assert main(["eval", str(straight), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out.splitlines()[-1])
    lines = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    recorded = next(line["eval/mean@1"] for line in reversed(lines) if "eval/mean@1" in line)
    assert scores["eval/mean@1"] == recorded


def test_a_step_is_replayed_with_the_images_of_the_journal(straight: Path, tmp_path: Path, capsys: Captured) -> None:
    assert main(["replay", str(straight), "--step", "2"]) == 0
    assert "Traceback" not in capsys.readouterr().out


def test_an_export_writes_each_image_once_beside_the_file(world: Path, straight: Path, tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    assert main(["export", "rollouts", str(straight), str(file), "--as", "jsonl"]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    named = {span["file"] for row in rows for turn in row["attempts"][0]["turns"] for span in turn["images"]}
    assert {f"images/{path.name}" for path in (tmp_path / "images").iterdir()} == named and len(named) == 6
    assert all(image_digest((tmp_path / name).read_bytes()) == Path(name).stem for name in named)
    assert set(rows[0]["images"].values()) < named
    assert rows[0]["fields"]["prompt"][0]["content"][0]["image_url"]["url"].startswith("image:")


def test_a_data_set_of_tokens_has_no_rollout_with_images(straight: Path, tmp_path: Path, capsys: Captured) -> None:
    for kind in ("sft", "dpo"):
        message = refused(capsys, "export", "rollouts", str(straight), str(tmp_path / "a.jsonl"), "--as", kind)
        assert "have images, which no data set here holds: `--as jsonl` writes them" in message


def test_the_doctor_names_an_image_that_the_journal_lacks(straight: Path, tmp_path: Path, capsys: Captured) -> None:
    copied = tmp_path / "run"
    shutil.copytree(straight, copied)
    main(["doctor", str(copied)])
    assert "journal.sqlite lacks" not in capsys.readouterr().out
    with closing(sqlite3.connect(copied / "journal.sqlite")) as raw, raw:
        (lost,) = raw.execute("SELECT digest FROM images ORDER BY digest LIMIT 1").fetchone()
        raw.execute("DELETE FROM images WHERE digest = ?", [lost])
    main(["doctor", str(copied)])
    assert f"journal.sqlite lacks 1 image that it names, the first {lost} of rollout" in capsys.readouterr().out


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_bit(world: Path, straight: Path, tmp_path: Path) -> None:
    """It is killed in its second step, while its environment shows parts of pictures."""
    run = tmp_path / "killed"
    words = options(world, directory=run, **LOOKS, checkpoint__every=1)
    command = [sys.executable, "-m", "etude", "train", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        blocked_until(lambda: recorded_turns(run / "journal.sqlite") > 8, within=120)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert main(["train", "--resume", str(run)]) == 0
    assert same(weights(run), weights(straight))


def recorded_turns(journal: Path) -> int:
    """Return the number of turns in the journal of a run in another process."""
    if not journal.exists():
        return 0
    with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as raw:
        try:
            (count,) = raw.execute("SELECT count(*) FROM events WHERE kind = 'turn_recorded'").fetchone()
        except sqlite3.OperationalError:  # it is being made
            return 0
    return int(count)


def test_trainer_and_engine_read_an_image_once(world: Path) -> None:
    """Both are in one process, and the engine has read what the trainer trains on."""
    run = run_of(world, **LOOKS)
    worker, engine = RankBuilder(run, build_chat_renderer(run)).build()
    assert engine is not None
    with closing(engine):
        assert engine.pixels is not None and worker._learner._backend.forward.pixels is engine.pixels


def test_a_frozen_tower_is_not_published_to_an_engine_with_weights_of_its_own(world: Path) -> None:
    run = run_of(world, **LOOKS)
    builder = RankBuilder(run, build_chat_renderer(run))
    policy = model_of(PolicyLoader(run, builder.chat.tokenizer).load_trained(None))
    with engine_of(policy.copy(), builder.chat.tokenizer) as engine:
        worker = builder.build_worker(policy, engine, None)
        text = {name: weight for name, weight in policy.named_weights() if name not in policy.frozen_tower}
        with torch.no_grad():
            for weight in text.values():
                weight.mul_(1.5)
        assert worker.publish(1).reduce()["publish_bytes"] == sum(weight.nbytes for weight in text.values())
        assert same(dict(engine.model.named_weights()), dict(policy.named_weights()))

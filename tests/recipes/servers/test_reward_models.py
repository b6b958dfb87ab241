"""`reward=reward_model`: a trained reward model judges the answers of a run, in the format of its training."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from etude.chat import ChatRenderer, Tokenizer
from etude.cli import main
from etude.config.compose import compose
from etude.models import create, save, tiny_config
from etude.recipes.run.config import Run
from etude.recipes.run.directory import with_absolute_paths
from etude.recipes.servers.reward_models import encode_prompt_and_answer, load_reward_models
from etude.records import Outcome, Task
from etude.rewards import REWARDS, Judge, RewardModelScore
from tests.chat.conversations import by
from tests.data.chats import chat_of
from tests.recipes.runs import Captured, options, refused_run, step_metrics, train
from tests.recipes.supervised_runs import sums
from tests.worlds import make_tokenizer

TASKS = [Task(n, {"prompt": row["prompt"]}) for n, row in enumerate(sums()[:6])]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with random weights."""
    directory = tmp_path_factory.mktemp("judge")
    size = make_tokenizer(directory)
    config = tiny_config(size, layers=1, hidden=32, heads=2, kv_heads=1, context=24)
    save(create(config, seed=3, dtype=torch.float32, head="score"), directory)
    return directory


def by_transformers(directory: Path, task: Task, answer: str) -> float:
    """Return the score of transformers' classifier for a prompt with its answer and the end."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(directory)
    tokenizer = Tokenizer.load(directory)
    ids = [*tokenizer.encode(str(task.fields["prompt"]) + answer).tolist(), tokenizer.eos_ids[0]]
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


def verdicts(reward: Any, answers: list[str]) -> list[Any]:
    """Return the rewards of some answers, judged at once."""

    async def ask(judging: Judge) -> list[Any]:
        return await asyncio.gather(*(judging.judge(t, a) for t, a in zip(TASKS, answers, strict=False)))

    with Judge(load_reward_models(reward, torch.device("cpu"))) as judging:
        return asyncio.run(ask(judging))


def test_the_reward_of_an_answer_is_the_models_score(judge: Path) -> None:
    answers = ["1", "12", "", "7 or 8", "3", "x"]
    result = verdicts(RewardModelScore(path=judge, precision="fp32"), answers)
    wanted = [by_transformers(judge, task, answer) for task, answer in zip(TASKS, answers, strict=True)]
    assert [verdict.reward for verdict in result] == pytest.approx(wanted, abs=1e-5)


def test_a_reward_model_may_be_a_part_of_a_reward(judge: Path) -> None:
    part = {"name": "reward_model", "path": str(judge), "precision": "fp32"}
    reward = REWARDS["combined"](
        parts={"liked": part, "form": {"name": "regex", "pattern": "^[0-9]+$"}}, weights={"liked": 0.5}
    )
    (verdict,) = verdicts(reward, ["12"])
    assert verdict.parts["liked"] == pytest.approx(0.5 * by_transformers(judge, TASKS[0], "12"), abs=1e-5)
    assert verdict.parts["form"] == 1


def test_an_answer_that_is_too_long_is_a_failure_and_no_score(judge: Path) -> None:
    long, short = verdicts(RewardModelScore(path=judge), ["1" * 30, "1"])
    assert long.outcome is Outcome.FAILED and "have 35 tokens" in long.error and "holds 24" in long.error
    assert short.outcome is Outcome.SUCCEEDED


def test_messages_are_read_by_the_models_own_template(tmp_path: Path) -> None:
    chat = chat_of(tmp_path)
    ids = encode_prompt_and_answer(chat, [by("user", "Hi")], "Hello.")
    assert chat.tokenizer.decode(ids, keep_special_tokens=True) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>"
    )
    bare = ChatRenderer(Tokenizer.load(tmp_path))
    assert np.array_equal(
        encode_prompt_and_answer(bare, "a", "b<|im_end|>"), encode_prompt_and_answer(bare, "a", "b")
    ), "it ends once"


@pytest.mark.integration
def test_a_run_learns_from_a_reward_model(world: Path, judge: Path, tmp_path: Path) -> None:
    given = {
        "reward": "reward_model",
        "reward.path": judge,
        "reward.precision": "fp32",
        "steps": 20,
        "collect.tasks": 12,
    }
    given |= {"collect.group_size": 8, "train.learning_rate": 1e-2}
    steps = step_metrics(train(world, tmp_path / "run", **given))
    assert steps[-1]["reward"] > 1.5 * steps[0]["reward"] and steps[-1]["failed_attempts"] == 0


def test_answers_are_scored_by_command(world: Path, judge: Path, capsys: Captured) -> None:
    words = [f"model.path={world / 'model'}", f"data.val=[{world / 'held_out.jsonl'}]", "reward=reward_model"]
    words += [
        f"reward.path={judge}",
        "sampling.max_tokens=4",
        "data.max_prompt_length=16",
        "train.precision=fp32",
        "--json",
    ]
    capsys.readouterr()
    assert main(["eval", *words]) == 0
    message = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert message["eval/failed"] == 0 and message["eval/mean@1"] != 0


def test_a_model_that_is_no_reward_model_is_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    for path, message in (
        (world / "model", "has no score head (`score.weight`), so it gives no scores"),
        (tmp_path / "nowhere", "`reward.path="),
        (None, "reward.path needs a value and has none"),
    ):
        changes = {"reward": "reward_model", "reward.path": path}
        assert message in refused_run(capsys, world, tmp_path / "run", **changes), message
    assert not (tmp_path / "run").exists()


def test_the_directory_of_a_reward_model_is_found_from_anywhere(
    world: Path, judge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(judge.parent)
    run = compose(Run, options(world, **{"reward": "reward_model", "reward.path": judge.name}))
    assert with_absolute_paths(run).reward.model_dump()["path"] == judge
    result = with_absolute_paths(run).reward.files()
    assert {file.name for file in result} >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_sums_of_several_rewards_load_each_model(judge: Path) -> None:
    parts = {name: {"name": "reward_model", "path": str(judge), "precision": "fp32"} for name in ("one", "other")}
    (verdict,) = verdicts(REWARDS["combined"](parts=parts), ["12"])
    assert verdict.parts["one"] == verdict.parts["other"]

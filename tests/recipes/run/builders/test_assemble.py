"""Mistakes of users: each is reported in one sentence, before anything is written, and nothing is lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from etude.algorithms import Denominators, LossValue, View
from etude.algorithms.losses.clip import PPO
from etude.checkpoint import CheckpointManager
from etude.cli import main
from etude.models import create, load, save, tiny_config
from etude.recipes.run.directory import lock_directory
from etude.store import open_store
from etude.train import load_weights
from tests.recipes import rewards
from tests.recipes.runs import Captured, options, refused, refused_run, run_of, same, step_metrics, train, weights
from tests.worlds import END, make_model, make_tokenizer

REWARDS = "tests.recipes.rewards"


def changed(world: Path, directory: Path, change: Callable[[Path], Any]) -> Path:
    """Copy the model, with one thing changed."""
    copy = Path(shutil.copytree(world / "model", directory))
    change(copy)
    return copy


def check_distinguished(file: Path, **values: Any) -> None:
    """Change values of a JSON file; None removes one."""
    tree = json.loads(file.read_text()) | values
    file.write_text(json.dumps({name: value for name, value in tree.items() if value is not None}))


# -- the model --------------------------------------------------------------------------------------------------------


def test_a_run_without_a_model_is_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    assert "`model.path=…`" in refused_run(capsys, world, tmp_path / "run", **{"model.path": None})


def test_a_model_directory_that_is_not_there_is_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    message = refused_run(capsys, world, tmp_path / "run", **{"model.path": tmp_path / "nowhere"})
    assert "model.path=" in message and "nowhere" in message and "config.json" in message
    assert "model.path=" in refused_run(capsys, world, tmp_path / "run", **{"model.path": world / "tasks.jsonl"})
    assert not (tmp_path / "run").exists(), "a run that cannot begin leaves no directory"


def test_a_value_that_is_no_path_is_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    for value in ("[a,b]", "3"):
        assert "model.path expects a path" in refused_run(capsys, world, tmp_path / "run", **{"model.path": value})


def test_a_directory_without_a_model_is_described(whole: Path, world: Path, tmp_path: Path, capsys: Captured) -> None:
    message = refused_run(capsys, world, tmp_path / "run", **{"model.path": whole})
    assert "is the directory of a run, not of a model" in message and f"export {whole}" in message
    message = refused_run(capsys, world, tmp_path / "run", **{"model.path": "Qwen/Qwen3-0.6B"})
    assert "`hf download Qwen/Qwen3-0.6B`" in message


def test_options_without_an_effect_are_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    """Scoring without tasks to score on, and trackers that have options and are off."""
    off = {"observe.wandb.project": "mine", "observe.mlflow.experiment": "mine", "observe.rollouts": 2}
    train(world, tmp_path / "run", **{"steps": 1, "evaluate.every": 2} | off)
    message = capsys.readouterr().err
    assert "so nothing is scored. Give them with `data.val=[held_out.parquet]`" in message
    assert "`observe.wandb.mode` is disabled" in message and "`observe.mlflow.enabled` is false" in message
    assert "`observe.rollouts` is for trackers, and none is on" in message


def test_fewer_steps_than_are_done_are_refused(whole: Path, capsys: Captured) -> None:
    message = refused(capsys, "train", "--resume", str(whole), "steps=1")
    assert "has done 4 steps, and `steps=1` asks for fewer" in message


def test_a_finished_run_names_the_next_commands(world: Path, tmp_path: Path, capsys: Captured) -> None:
    capsys.readouterr()
    run = train(world, tmp_path / "run", steps=1)
    message = capsys.readouterr().err
    assert (
        "Done after step 1, in" in message and f"etude answers {run}" in message and f"export {run} my-model" in message
    )
    assert main(["train", "--resume", str(run)]) == 0
    assert "Look:" not in capsys.readouterr().err, "nothing was done"


def test_an_empty_model_directory_is_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "empty").mkdir()
    message = refused_run(capsys, world, tmp_path / "run", **{"model.path": tmp_path / "empty"})
    assert "no config.json. It holds nothing" in message and "empty" in message


def test_a_tokenizer_that_ends_no_text_is_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    def endless(model: Path) -> None:
        check_distinguished(model / "tokenizer_config.json", eos_token=None)
        (model / "generation_config.json").unlink(missing_ok=True)

    message = refused_run(capsys, world, tmp_path / "run", **{"model.path": changed(world, tmp_path / "m", endless)})
    assert "eos_token" in message and "tokenizer_config.json" in message


def test_a_tokenizer_without_a_padding_token_trains_the_same(world: Path, whole: Path, tmp_path: Path) -> None:
    def unpadded(model: Path) -> None:
        check_distinguished(model / "tokenizer_config.json", pad_token=None)

    model = changed(world, tmp_path / "m", unpadded)
    assert same(weights(train(world, tmp_path / "run", steps=1, **{"model.path": model})), weights(whole, 1))


def test_messages_for_a_model_without_a_template_are_refused(world: Path, tmp_path: Path, capsys: Captured) -> None:
    tasks = tmp_path / "chat.jsonl"
    tasks.write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}) + "\n")
    message = refused_run(capsys, world, tmp_path / "run", **{"data.train": tasks})
    assert "no chat template" in message and "`chat.template`" in message


def test_a_tokenizer_of_another_model_is_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    size = make_tokenizer(tmp_path / "large", "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    message = refused_run(capsys, world, tmp_path / "run", **{"model.tokenizer": tmp_path / "large"})
    assert f"{size} tokens" in message and "different models" in message and "`model.tokenizer`" in message


def test_prompts_and_answers_beyond_the_context_are_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    message = refused_run(capsys, world, tmp_path / "run", **{"data.max_prompt_length": 125})
    assert "`data.max_prompt_length` + `sampling.max_tokens` = 131" in message and "128" in message


# -- the data ---------------------------------------------------------------------------------------------------------


def test_a_run_without_tasks_is_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    assert "`data.train=[tasks.parquet]`" in refused_run(capsys, world, tmp_path / "run", **{"data.train": None})


def test_one_file_needs_no_brackets(world: Path) -> None:
    bare, listed = (run_of(world, **{"data.train": file}) for file in ("tasks.jsonl", "[tasks.jsonl]"))
    assert bare == listed and bare.data.train == ("tasks.jsonl",)


def test_a_file_that_is_not_there_is_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    for name in ("data.train", "data.val"):
        message = refused_run(capsys, world, tmp_path / "run", **{name: f"[{tmp_path / 'none.jsonl'}]"})
        assert "none.jsonl" in message and "no such file" in message


def test_an_empty_dataset_is_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    message = refused_run(capsys, world, tmp_path / "run", **{"data.train": f"[{tmp_path / 'empty.jsonl'}]"})
    assert "empty.jsonl has no rows" in message


def test_a_missing_column_is_reported_with_those_found(world: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"question": "1+1=", "solution": "2"}\n')
    message = refused_run(capsys, world, tmp_path / "run", **{"data.train": f"[{tmp_path / 'tasks.jsonl'}]"})
    assert "`prompt`" in message and "question, solution" in message and "`data.columns.prompt=question`" in message


def test_tasks_without_the_right_answers_that_a_reward_reads_are_reported(
    world: Path, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1=", "solved": "2"}\n')
    given = {"data.train": f"[{tmp_path / 'tasks.jsonl'}]", "reward": "exact_match", "reward.path": None}
    message = refused_run(capsys, world, tmp_path / "run", **given)
    assert (
        "None of the 1 tasks in data.train can be judged" in message and "row 0: Task 0 needs a right answer" in message
    )
    assert "`data.columns.answer=…`" in message and "solved" in message
    assert not (tmp_path / "run").exists(), "reported before anything is sampled"


def test_single_tasks_without_a_right_answer_are_left_out_and_reported(
    world: Path, tmp_path: Path, capsys: Captured
) -> None:
    rows = [{"prompt": "1+1=", "answer": answer} for answer in (None, "2", None, "3", "4")]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"data.train": f"[{tmp_path / 'tasks.jsonl'}]", "reward": "exact_match", "reward.path": None, "steps": 1}
    run = train(world, tmp_path / "run", **given)
    assert "2 of 5 tasks in data.train cannot be judged: left out." in (message := capsys.readouterr().err)
    assert "tasks.jsonl, row 0: Task 0 needs" in message and "failed_attempts" not in message
    assert step_metrics(run)[0]["rollouts"] == 12 and step_metrics(run)[0]["failed_attempts"] == 0


def test_a_row_without_a_prompt_is_not_reported_as_a_missing_answer(
    world: Path, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"answer": "2"}\n')
    given = {"data.train": f"[{tmp_path / 'tasks.jsonl'}]", "reward": "exact_match", "reward.path": None}
    message = refused_run(capsys, world, tmp_path / "run", **given)
    assert "tasks.jsonl, row 1 has no column `prompt`" in message and "cannot be judged" not in message


def test_a_reward_with_changing_parts_does_not_stop_a_run(world: Path, tmp_path: Path, capsys: Captured) -> None:
    run = train(world, tmp_path / "run", **{"reward.path": f"{REWARDS}:moody", "steps": 2})
    message = capsys.readouterr().err
    assert message.count("fewer named parts than others, which have long, short. Missing parts count as 0") == 1
    assert {"reward/long", "reward/short"} <= step_metrics(run)[-1].keys()


def test_a_reward_that_changed_since_the_start_is_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "mine.py").write_text("def score(task, answer):\n    return len(answer)\n")
    run = train(world, tmp_path / "run", **{"reward.path": f"{tmp_path / 'mine.py'}:score", "steps": 1})
    capsys.readouterr()
    for text, is_told in (("len(answer)", False), ("-len(answer)", True)):
        (tmp_path / "mine.py").write_text(f"def score(task, answer):\n    return {text}\n")
        assert main(["train", "--resume", str(run)]) == 0
        message = "The file of the reward changed since the run was started" in capsys.readouterr().err
        assert message is is_told, text
    assert main(["train", "--resume", str(run), "steps=2"]) == 0


def test_prompts_that_are_too_long_are_left_out_cut_or_refused(world: Path, tmp_path: Path, capsys: Captured) -> None:
    lines = [{"prompt": "1+1=", "answer": "2"}] * 6 + [{"prompt": "1+1+1+1+1+1=", "answer": "6"}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {"data.train": f"[{tmp_path / 'tasks.jsonl'}]", "data.max_prompt_length": 8, "collect.tasks": 7, "steps": 1}
    message = refused_run(capsys, world, tmp_path / "run", **given | {"data.overlong": "error"})
    assert "row 6 has a prompt of 12 tokens; 8 are allowed" in message
    message = refused_run(capsys, world, tmp_path / "run", **given | {"data.max_prompt_length": 2})
    assert "Every one of the 7 prompts" in message
    for how, longest in (("filter", 4), ("truncate", 8)):
        run = train(world, tmp_path / how, **given | {"data.overlong": how})
        assert "1 of 7 prompts in data.train are longer" in capsys.readouterr().err
        assert step_metrics(run)[0]["overlong_prompts"] == 1
        store = open_store(run / "journal.sqlite", read_only=True)
        assert max(len(turn.prompt) for r in store.rollouts() for turn in store.turns(r.id)) == longest
        store.close()


# -- the reward -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "described"), [("nan", "nan"), ("nothing", "None"), ("text", "'good' of type str")])
def test_a_reward_that_is_no_number_is_reported(
    name: str, described: str, world: Path, tmp_path: Path, capsys: Captured
) -> None:
    message = refused_run(capsys, world, tmp_path / "run", **{"reward.path": f"{REWARDS}:{name}"})
    assert f"returned {described}" in message and "task" in message and "number is needed" in message


def test_a_reward_that_is_no_number_stops_a_run_with_that_option(world: Path, tmp_path: Path, capsys: Captured) -> None:
    given = {"reward.path": f"{REWARDS}:nan", "judging.on_error": "stop"}
    message = refused_run(capsys, world, tmp_path / "run", **given)
    assert "returned nan" in message and "`judging.on_error` is stop" in message


def test_a_reward_that_is_not_there_is_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    assert "has no digitz" in refused_run(capsys, world, tmp_path / "run", **{"reward.path": f"{REWARDS}:digitz"})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("policy", "steps"), [("stop", 2), ("drop", 3)], ids=["stop", "drop"])
def test_a_run_whose_judge_failed_resumes_once_it_is_repaired(
    policy: str, steps: int, world: Path, whole: Path, tmp_path: Path, capsys: Captured
) -> None:
    """With `stop` it ends at the first failure, with `drop` once no group is left. Either way nothing is lost."""
    given = {"reward.path": f"{REWARDS}:fragile", "judging.on_error": policy, "steps": steps, "collect.retries": 0}
    rewards.broken.add("fragile")
    try:
        message = refused_run(capsys, world, tmp_path / "run", **given)
    finally:
        rewards.broken.clear()
    assert "the judge does not answer" in message
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    assert [step["step"] for step in step_metrics(tmp_path / "run")][-1] == steps
    if policy == "stop":  # the failed groups were judged again: the run equals one without a failure
        assert same(weights(tmp_path / "run"), weights(whole, steps))


# -- answers ----------------------------------------------------------------------------------------------------------


def test_empty_answers_are_trained_on_like_any_other(world: Path, tmp_path: Path, capsys: Captured) -> None:
    """This model tends to end its answer at once."""
    size = make_tokenizer(tmp_path / "model")
    config = tiny_config(size, layers=1, hidden=16, heads=2, kv_heads=1, context=128)
    config.tie_word_embeddings = False
    model = create(config, seed=0, dtype=torch.float32)
    end = json.loads((tmp_path / "model" / "tokenizer.json").read_text())["model"]["vocab"][END]
    with torch.no_grad():
        for name, weight in model.named_weights():
            if name.endswith("embed_tokens.weight"):
                weight[:, 0] = 30.0
        model.head_weight[:, 0] = -30.0
        model.head_weight[end, 0] = 30.0
    save(model, tmp_path / "model")
    run = train(world, tmp_path / "run", steps=1, **{"model.path": tmp_path / "model"})
    step = step_metrics(run)[0]
    assert step["answer_length"] == 1 and step["reward"] == 0 and step["truncated"] == 0
    assert "earned the same" in capsys.readouterr().err


def test_a_group_of_one_is_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    message = refused_run(capsys, world, tmp_path / "run", **{"collect.group_size": 1, "advantage": "dr_grpo"})
    assert "`collect.group_size=1`" in message and "nothing would be learned" in message
    train(world, tmp_path / "bare", **{"collect.group_size": 1, "steps": 1})
    assert "its bare reward is its advantage" in capsys.readouterr().err
    train(world, tmp_path / "batch", **{"collect.group_size": 1, "advantage": "reinforce++", "steps": 1})
    assert "group_size" not in capsys.readouterr().err


# -- memory -----------------------------------------------------------------------------------------------------------


class Hungry(PPO):
    """A loss that asks for more memory than any machine has, while it is switched on."""

    hungry: ClassVar[bool] = True

    def __call__(self, view: View, whole: Denominators) -> LossValue:
        if self.hungry:
            torch.empty(2**55)
        return super().__call__(view, whole)


def test_memory_that_runs_out_is_reported_with_the_option_and_the_run_can_be_resumed(
    world: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refused_run(
        capsys, world, tmp_path / "run", steps=1, loss="tests.recipes.run.builders.test_assemble:Hungry"
    )
    assert "Memory ran out" in message and "Lower `train.max_tokens_per_micro_batch`" in message
    monkeypatch.setattr("tests.recipes.run.builders.test_assemble.Hungry.hungry", False)
    assert main(["train", "--resume", str(tmp_path / "run"), "train.max_tokens_per_micro_batch=64"]) == 0
    assert step_metrics(tmp_path / "run")[0]["replayed"] == 1 and step_metrics(tmp_path / "run")[0]["micro_batches"] > 1


def test_an_engine_too_large_for_the_machine_is_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    given = {"rollout.kv_gib": 10**9, "rollout.max_num_seqs": 10**12}
    message = refused_run(capsys, world, tmp_path / "run", **given)
    assert "ran out of memory" in message and "Lower kv_gib" in message
    assert not (tmp_path / "run").exists()


# -- the directory ----------------------------------------------------------------------------------------------------


def test_a_directory_in_use_is_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    with lock_directory(tmp_path / "run"):
        message = refused_run(capsys, world, tmp_path / "run")
    assert "in use by process" in message and "`directory=…`" in message
    train(world, tmp_path / "run", steps=1)


def test_a_directory_that_cannot_be_made_is_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").write_text("")
    assert "No directory can be made" in refused_run(capsys, world, tmp_path / "file" / "run")


def test_a_run_resumed_with_other_options_is_refused_with_the_differences(
    world: Path, whole: Path, tmp_path: Path, capsys: Captured
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    before = (run / "run.yaml").read_text()
    message = refused_run(capsys, world, run, seed=3, collect__group_size=8, steps=4)
    assert "collect.group_size was 4, is 8" in message and "seed was 0, is 3" in message
    assert "etude export" in message, "the way out"
    message = refused(capsys, "train", "--resume", str(run), "loss=gspo")
    assert "loss.name was ppo, is gspo" in message
    assert (run / "run.yaml").read_text() == before and len(step_metrics(run)) == 4
    assert main(["train", "--resume", str(run), "steps=5", "rollout.kv_gib=0.5", "judging.timeout=7"]) == 0


def test_options_of_a_refused_run_do_not_bind_a_later_one(world: Path, tmp_path: Path, capsys: Captured) -> None:
    refused_run(capsys, world, tmp_path / "run", **{"reward.path": f"{REWARDS}:digitz"})
    train(world, tmp_path / "run", steps=1)


def test_a_directory_that_holds_no_run_is_reported(tmp_path: Path, capsys: Captured) -> None:
    for where, problem in ((tmp_path, "holds no run"), (tmp_path / "nowhere", "There is no directory")):
        assert problem in refused(capsys, "train", "--resume", str(where))
    with lock_directory(tmp_path / "starting"):
        assert "has not started" in refused(capsys, "train", "--resume", str(tmp_path / "starting"))


def test_a_checkpoint_of_another_model_is_reported(world: Path, whole: Path, tmp_path: Path, capsys: Captured) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    wide = train(world, tmp_path / "other", steps=1, **{"model.path": make_model(tmp_path / "wide", hidden=64)})
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(wide / "checkpoints", run / "checkpoints")
    message = refused(capsys, "train", "--resume", str(run), "steps=5")
    assert "[43, 64] in the checkpoint" in message and "[43, 32] in this run" in message


# -- options and words ------------------------------------------------------------------------------------------------


def test_an_unknown_preset_is_reported_at_any_position(world: Path, tmp_path: Path, capsys: Captured) -> None:
    given = options(world, directory=tmp_path / "run")
    for words in (["grpoo", *given], [*given, "grpoo"]):
        message = refused(capsys, "train", *words)
        assert "no preset 'grpoo'" in message and "grpo" in message.partition("presets are")[2]
    assert "one preset" in refused(capsys, "train", "grpo", "dapo", *given)


def test_greedy_training_is_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    message = refused_run(capsys, world, tmp_path / "run", **{"sampling.temperature": 0})
    assert "greedy" in message


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"reference.path": "somewhere"}, "nothing here compares with one"),
        ({"advantage": "gigpo"}, "which an environment provides"),
        ({"max_staleness": 1}, "`placement.layout=split`"),
        ({"mini_batches": 13}, "fewer than `mini_batches`"),
        ({"train.lr_scheduler": "cosine", "train.warmup_steps": 5}, "warm-up"),
    ],
)
def test_impossible_options_are_reported(
    change: dict[str, Any], what: str, world: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert what in refused_run(capsys, world, tmp_path / "run", **change)
    assert not (tmp_path / "run").exists()


def test_resuming_takes_no_file_and_no_sweep(trained: Path, capsys: Captured) -> None:
    for words in (["--multirun"], ["--config", "mine.yaml"]):
        assert "--resume continues one run" in refused(capsys, "train", "--resume", str(trained), *words)


def test_a_run_in_half_precision_begins_from_the_weights_of_the_file(world: Path, tmp_path: Path) -> None:
    train(world, tmp_path / "run", steps=1, train__precision="bf16", train__learning_rate=1e-12)
    file, trained = (load(world / "model", dtype=torch.float32) for _ in range(2))
    checkpoints = CheckpointManager(tmp_path / "run" / "checkpoints")
    newest = checkpoints.newest()
    assert newest is not None
    load_weights(trained, checkpoints, newest)
    far = [float((a - b).detach().abs().max()) for a, b in zip(trained.parameters(), file.parameters(), strict=True)]
    assert max(far) < 1e-9
    assert any(float((weight - weight.bfloat16()).detach().abs().max()) > 1e-5 for weight in file.parameters())

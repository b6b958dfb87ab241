"""The uses of a trained model: scoring, generation, export, curves."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from etude.batch import Pack
from etude.cli import main
from etude.models.attention import PackedAttention
from etude.recipes import inference as ask
from tests.recipes.runs import Captured, loaded, options, refused, train, weights
from tests.rollout.test_server_pool import theirs
from tests.sweeps import sweep


def scored(capsys: Captured, *words: str) -> dict[str, float]:
    """Return the last line of `etude eval --json`."""
    capsys.readouterr()
    assert main(["eval", "--json", *words]) == 0
    result: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def answers(capsys: Captured, *words: str) -> str:
    """Return the answers that `etude generate` prints."""
    capsys.readouterr()
    assert main(["generate", *words]) == 0
    return capsys.readouterr().out


@pytest.fixture
def quiet(world: Path) -> list[str]:
    """The options for scoring a model that belongs to no run."""
    held_out = f"data.val=[{world / 'held_out.jsonl'}]"
    reward = ["reward=function", "reward.path=tests.recipes.rewards:in_parts"]
    return [held_out, *reward, "evaluate.samples=2", "evaluate.sampling.max_tokens=6", "train.precision=fp32"]


def test_a_run_is_scored_as_at_its_end(trained: Path, capsys: Captured) -> None:
    last = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    result = scored(capsys, str(trained))
    about = {"tasks": 5, "samples": 2, "step": 4, "answers": result["answers"]}
    assert result == about | {name: last[name] for name in result.keys() - about.keys()} and "eval/mean@2" in result
    path = Path(str(result["answers"]))
    assert path.parent == trained / "evaluations" and len(path.read_text().splitlines()) == 10
    assert len({scored(capsys, str(trained))["answers"] for _ in range(2)} | {result["answers"]}) == 3, (
        "a file for each"
    )


def test_the_best_checkpoint_is_scored_as_when_it_was_saved(trained: Path, capsys: Captured) -> None:
    best = json.loads((trained / "checkpoints" / "best.json").read_text())
    assert scored(capsys, str(trained), "--best")["eval/mean@2"] == pytest.approx(best["score"])


def test_a_checkpoint_of_a_run_is_talked_with(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    best = json.loads((trained / "checkpoints" / "best.json").read_text())
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n"))
    assert main(["chat", str(trained), "--best"]) == 0
    shown = capsys.readouterr().out
    assert f"This is step {best['step']} of {trained}." in shown and "> 1+1=" in shown


def test_a_model_is_scored_without_a_run(world: Path, trained: Path, quiet: list[str], capsys: Captured) -> None:
    before = json.loads((trained / "evaluations" / "step-00000000.jsonl").read_text().splitlines()[0])
    named, first = (scored(capsys, word, *quiet) for word in (f"model.path={world / 'model'}", str(world / "model")))
    assert named == first and before["task"] == 0
    rows = [json.loads(line) for line in (trained / "evaluations" / "step-00000000.jsonl").read_text().splitlines()]
    assert named["eval/mean@2"] == pytest.approx(sum(row["reward"] for row in rows) / len(rows))


def test_scores_follow_the_options(trained: Path, world: Path, capsys: Captured) -> None:
    result = scored(capsys, str(trained), "evaluate.samples=4", "evaluate.limit=2", "evaluate.sampling.temperature=0")
    assert {"eval/mean@4", "eval/best@2"} <= result.keys() and "eval/maj@4" not in result
    assert result["eval/best@4"] == result["eval/mean@4"], "greedy answers are all the same"


def test_servers_that_are_joined_find_the_weights_in_the_directory_of_the_run(
    trained: Path, tmp_path: Path, capsys: Captured
) -> None:
    before = set(trained.iterdir())
    with theirs(tmp_path) as server:
        answers(capsys, str(trained), "1+1=", "rollout=vllm", f"rollout.url={server.url}", "sampling.max_tokens=4")
        given = Path(httpx2.get(f"{server.url}/state").json()["model"])
    assert given.parent.parent == trained.resolve() and set(trained.iterdir()) == before


def test_an_impossible_scoring_is_reported(world: Path, whole: Path, tmp_path: Path, capsys: Captured) -> None:
    assert "`data.val=[tasks.parquet]`" in refused(capsys, "eval", str(whole))
    assert "no best checkpoint" in refused(capsys, "generate", str(whole), "1+1=", "--best")
    assert "There is no directory" in refused(capsys, "eval", str(tmp_path / "nowhere"))
    held_out = f"data.val=[{world / 'held_out.jsonl'}]"
    assert "needs a model" in refused(capsys, "eval", held_out)
    assert "no run was named" in refused(capsys, "eval", held_out, f"model.path={world / 'model'}", "--best")


@pytest.mark.kept
def test_a_run_generates_like_a_model(trained: Path, world: Path, capsys: Captured) -> None:
    words = ["1+1=", "sampling.max_tokens=12", "seed=5"]
    one, same = answers(capsys, str(trained), *words), answers(capsys, str(trained), *words)
    assert one == same and 0 < len(one.strip("\n")) <= 12
    assert answers(capsys, str(world / "model"), *words) != one, "training changed nothing"
    assert answers(capsys, str(trained), *words, "observe.console=off") == ""


def test_several_answers_are_numbered(world: Path, capsys: Captured) -> None:
    lines = answers(capsys, str(world / "model"), "1 + 1 =", "-n", "3", "sampling.max_tokens=5").splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3"] and len({line[3:] for line in lines}) > 1


def test_the_prompt_may_come_from_standard_input(
    world: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = answers(capsys, str(world / "model"), "1+1=", "sampling.max_tokens=8")
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n"))
    assert answers(capsys, str(world / "model"), "sampling.max_tokens=8") == text
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    message = refused(capsys, "generate", str(world / "model"))
    assert "There is no prompt" in message and str(world / "model") in message
    assert "Name a model or a run's directory" in refused(capsys, "generate")


def test_one_answer_is_shown_as_it_is_written(world: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is printed piece by piece, and the pieces form the answer."""
    pieces: list[str] = []
    make = ask.make_console

    def watched(*arguments: Any) -> Any:
        console = make(*arguments)
        show = console.print

        def print(*what: Any, **how: Any) -> None:
            pieces.extend(map(str, what))
            show(*what, **how)

        console.print = print  # type: ignore[method-assign]
        return console

    monkeypatch.setattr(ask, "make_console", watched)
    text = answers(capsys, str(world / "model"), "1+1=", "sampling.max_tokens=12", "seed=3")
    assert "".join(pieces) == text.removesuffix("\n") and len([piece for piece in pieces if piece]) > 3


def test_a_misspelt_option_is_not_taken_for_a_prompt(world: Path, capsys: Captured) -> None:
    message = refused(capsys, "generate", str(world / "model"), "1+1=", "samplin.max_tokens=3")
    assert "samplin.max_tokens is not an option; here it is sampling.max_tokens." in message


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.integration), "bf16"])
def test_an_export_is_loaded_by_transformers_and_answers_the_same(
    precision: str, world: Path, tmp_path: Path, capsys: Captured
) -> None:
    run = train(world, tmp_path / "run", **{"train.precision": precision, "steps": 1})
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert "of step 1" in capsys.readouterr().out
    trained_weights = weights(run)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert theirs.dtype is next(iter(trained_weights.values())).dtype
    assert all(torch.equal(weight, theirs.get_parameter(name)) for name, weight in trained_weights.items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = torch.tensor([tokenizer.encode("1+1=")])
    ours = loaded(run)
    with torch.no_grad():
        places = torch.arange(ids.shape[1])
        alone = Pack(
            ids=ids[0].int(),
            positions=places,
            offsets=torch.tensor([0, len(places)]),
            parent=torch.tensor([-1]),
            source=places - 1,
        )
        hidden = ours.hidden(alone.ids, alone.positions, PackedAttention(alone))
        logits = theirs(ids).logits[0].float()
        assert torch.allclose(logits, ours.logits(hidden), atol=1e-5 if precision == "fp32" else 0.05)
    words = ["1+1=", "sampling.max_tokens=12", f"train.precision={precision}"]
    assert answers(capsys, str(run), *words[:2]) == answers(capsys, str(tmp_path / "out"), *words)


def test_the_checkpoint_before_a_damaged_one_can_generate_and_be_exported(
    trained: Path, world: Path, tmp_path: Path, capsys: Captured
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    newest, step = sorted((run / "checkpoints").glob("step-*"))[-1], 0
    os.truncate(newest / "tensors.json", 3)
    generate = ["generate", str(run), "1+1=", "sampling.max_tokens=2"]
    for words in (generate, ["export", str(run), str(tmp_path / "out")]):
        message = refused(capsys, *words)
        assert "checkpoint.fall_back=true" in message and "--fall-back" in message
        step = int(message.partition("of step ")[2].partition(".")[0])
    assert main([*generate, "checkpoint.fall_back=true"]) == 0
    capsys.readouterr()
    assert main(["export", str(run), str(tmp_path / "out"), "--fall-back"]) == 0
    assert f"of step {step}" in capsys.readouterr().out


def test_an_export_overwrites_nothing(trained: Path, world: Path, capsys: Captured) -> None:
    assert "an export never overwrites files" in refused(capsys, "export", str(trained), str(world / "model"))
    assert "holds no run" in refused(capsys, "export", str(world), str(world / "out"))


def test_a_full_directory_is_refused_before_anything_is_loaded(
    trained: Path, world: Path, tmp_path: Path, capsys: Captured
) -> None:
    run = shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    assert "never overwrites files" in refused(capsys, "export", str(run), str(world / "model"))
    assert "never overwrites files" not in refused(capsys, "export", str(run), str(tmp_path / "out"))


def test_the_curves_of_a_run_are_drawn(trained: Path, capsys: Captured) -> None:
    assert main(["plot", str(trained)]) == 0
    shown = capsys.readouterr().out
    assert "reward" in shown and "eval/mean@2" in shown
    assert (trained / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_checkpoint_cannot_generate(world: Path, tmp_path: Path, capsys: Captured) -> None:
    given = options(world, directory=tmp_path / "run", **{"reward.path": "tests.recipes.rewards:nan"})
    assert main(["train", *given]) == 2
    assert "no checkpoint yet" in refused(capsys, "generate", str(tmp_path / "run"), "1+1=")


def test_the_table_names_the_scored_tasks(trained: Path, world: Path, capsys: Captured) -> None:
    assert main(["eval", str(trained), "evaluate.limit=1", "evaluate.samples=1"]) == 0
    shown = capsys.readouterr().out.replace("\n", " ")
    assert f"step 4 of {trained}, on 1 task of {world / 'held_out.jsonl'}, one answer to each" in shown


def test_the_answers_of_a_model_are_written_to_the_given_file(
    world: Path, tmp_path: Path, quiet: list[str], capsys: Captured
) -> None:
    assert "answers" not in scored(capsys, str(world / "model"), *quiet)
    result = scored(capsys, str(world / "model"), *quiet, "--answers", str(tmp_path / "answers.jsonl"))
    assert result["answers"] == str(tmp_path / "answers.jsonl") and "step" not in result
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 10


@sweep(
    ("command", "option", "sentence"),
    [
        ("eval", "sampling.temperature=0", "`evaluate.sampling.temperature`"),
        ("eval", "data.train=[x.jsonl]", "given by `data.val`"),
        ("eval", "steps=3", "does not read `steps`"),
        ("eval", "observe.wandb.mode=offline", "does not read `observe.wandb.mode`"),
        ("generate", "evaluate.samples=3", "the number of answers by -n"),
        ("generate", "loss=gspo", "does not read `loss`"),
    ],
)
def test_an_option_that_a_command_does_not_read_is_refused(
    command: str, option: str, sentence: str, trained: Path, world: Path, capsys: Captured
) -> None:
    what = str(world / "model") if option in ("steps=3", "loss=gspo") else str(trained)
    assert sentence in refused(capsys, command, what, option)


def test_a_run_is_used_with_its_own_options(trained: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "other.yaml").write_text("steps: 3\n")
    message = refused(capsys, "eval", str(trained), "--config", str(tmp_path / "other.yaml"))
    assert "--config has no place beside it" in message


def test_a_prompt_is_a_message_unless_it_is_to_be_continued(
    world: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[str] = []
    model = tmp_path / "model"
    shutil.copytree(world / "model", model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}={{ m['content'] }}+{% endfor %}")
    generate = ask.TorchEngine.stream

    def watched(engine: Any, prompt: Any, sampling: Any) -> Any:
        prompts.append(engine.tokenizer.decode(prompt))
        return generate(engine, prompt, sampling)

    monkeypatch.setattr(ask.TorchEngine, "stream", watched)
    for switch in ([], ["--raw"]):
        answers(capsys, str(model), "1+1", "sampling.max_tokens=2", *switch)
    assert prompts == ["=1+1+", "1+1"]


def test_zero_answers_are_refused(world: Path, capsys: Captured) -> None:
    assert "-n 0 asks for no answer" in refused(capsys, "generate", str(world / "model"), "1+1=", "-n", "0")


def test_the_device_can_be_chosen(trained: Path, world: Path, capsys: Captured) -> None:
    words = ["1+1=", "sampling.max_tokens=4", "device=cpu"]
    assert answers(capsys, str(trained), *words) and answers(capsys, str(world / "model"), *words)


def test_a_model_may_be_named_as_an_option(world: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["1+1=", "sampling.max_tokens=8"]
    path = f"model.path={world / 'model'}"
    assert answers(capsys, path, *words) == answers(capsys, str(world / "model"), *words)
    assert "Two models were named" in refused(capsys, "generate", str(world / "model"), path, *words)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "There is no prompt" in refused(capsys, "generate", path, "sampling.max_tokens=8")


def test_a_run_whose_model_was_moved_still_generates(
    trained: Path, world: Path, tmp_path: Path, capsys: Captured
) -> None:
    moved = shutil.copytree(world / "model", tmp_path / "moved")
    words = ["1+1=", "sampling.max_tokens=12", "seed=5"]
    assert answers(capsys, str(trained), f"model.path={moved}", *words) == answers(capsys, str(trained), *words)

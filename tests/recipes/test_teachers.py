"""Several teachers at once: the tasks of each data source have their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from etude.chat import Tokenizer
from etude.cli import main
from etude.models import save
from etude.recipes.run.builders.placement_report import describe_placement
from tests.recipes.runs import Captured, loaded, refused, refused_run, run_of, same, step_metrics, train, weights
from tests.recipes.supervised_runs import learned, sums, write
from tests.recipes.supervised_runs import refusal as refused_distillation
from tests.recipes.test_models_beside import other_model
from tests.worlds import make_tokenizer

TAUGHT: dict[str, Any] = {"advantage": "distillation", "reward": "nothing", "reward.path": None}


@pytest.fixture(scope="module")
def mixed(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The world's model, two other models as teachers, and tasks of two data sources: sums, and words."""
    directory = tmp_path_factory.mktemp("mixed")
    shutil.copytree(world / "model", directory / "model")
    other_model(world, directory / "adder", seed=1)
    other_model(world, directory / "speller", seed=2)
    rows = [{"prompt": f"{n % 10}+{n // 10}=", "data_source": "sums"} for n in range(20)]
    rows += [{"prompt": f"{chr(97 + n)}: ", "data_source": "words"} for n in range(20)]
    write(directory / "tasks.jsonl", [rows[n % 2 * 20 + n // 2] for n in range(40)])
    return directory


def teachers(world: Path, **of_source: str) -> dict[str, Any]:
    """Return the options of a run with these teachers."""
    listed = ", ".join(f"{source}: {world / name}" for source, name in of_source.items())
    return TAUGHT | {"teacher.paths": f"{{{listed}}}"}


@pytest.mark.slow
def test_equal_teachers_are_one_teacher(mixed: Path, tmp_path: Path) -> None:
    one = train(mixed, tmp_path / "one", **TAUGHT | {"teacher.path": mixed / "adder"})
    both = train(mixed, tmp_path / "both", **teachers(mixed, sums="adder", words="adder"))
    assert same(weights(one), weights(both))


@pytest.mark.kept
def test_each_source_is_compared_with_its_own_teacher(mixed: Path, tmp_path: Path) -> None:
    """The policy itself, as a teacher, differs from the policy in nothing."""
    options = {"collect.tasks": 6, "steps": 1}
    run = train(mixed, tmp_path / "run", **options | teachers(mixed, sums="model", words="speller"))
    first = step_metrics(run)[0]
    assert abs(first["teacher_kl/sums"]) < 1e-5 < 0.1 < first["teacher_kl/words"]


def next_token_logp(directory: Path, source: str) -> torch.Tensor:
    """[N, V]: return the log-probs of the first token of the answer to each task of a source, by transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = Tokenizer.load(directory)
    tasks = [json.loads(line) for line in (directory.parent / "tasks.jsonl").read_text().splitlines()]
    prompts = [tokenizer.encode(task["prompt"]) for task in tasks if task["data_source"] == source]
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([[*prompt]])).logits[0, -1] for prompt in prompts]
    return torch.stack(logits).log_softmax(1)


@pytest.mark.integration
def test_the_policy_nears_the_teacher_of_each_source(mixed: Path, tmp_path: Path) -> None:
    """On the tasks of a source it nears that source's teacher, and is nearer to it than to the other one."""
    options = {"collect.tasks": 6, "steps": 25}
    run = train(mixed, tmp_path / "run", **options | teachers(mixed, sums="adder", words="speller"))
    save(loaded(run), mixed / "learned")
    make_tokenizer(mixed / "learned")
    for source, own, other in (("sums", "adder", "speller"), ("words", "speller", "adder")):
        of_model = {name: next_token_logp(mixed / name, source) for name in ("model", "learned", own, other)}

        def divergence(policy: str, teacher: str, logp: dict[str, torch.Tensor] = of_model) -> float:
            return float((logp[policy].exp() * (logp[policy] - logp[teacher])).sum(1).mean())

        assert divergence("learned", own) < 0.6 * divergence("model", own)
        assert divergence("learned", own) < 0.6 * divergence("learned", other)


@pytest.mark.slow
def test_a_weight_of_0_leaves_a_source_out(mixed: Path, tmp_path: Path) -> None:
    """The sums alone then move the policy, to which their teacher is equal."""
    options = {
        "collect.tasks": 6,
        "steps": 1,
        "train.weight_decay": 0,
        **teachers(mixed, sums="model", words="speller"),
    }
    still = train(mixed, tmp_path / "still", **options | {"advantage.weights": "{words: 0}"})
    half = train(
        mixed, tmp_path / "half", **options | {"advantage.weights": "{words: 0.5}", "train.max_grad_norm": 1e9}
    )
    assert step_metrics(still)[0]["grad_norm"] < 1e-3 < 1e-2 < step_metrics(half)[0]["grad_norm"]
    whole = train(mixed, tmp_path / "whole", **options | {"train.max_grad_norm": 1e9})
    assert step_metrics(half)[0]["grad_norm"] == pytest.approx(step_metrics(whole)[0]["grad_norm"] / 2, rel=1e-3)


@pytest.mark.slow
def test_a_run_with_several_teachers_resumes_bit_for_bit(mixed: Path, tmp_path: Path, capsys: Captured) -> None:
    """The files of each teacher are recorded, wherever they are."""
    for name in ("adder", "speller"):
        shutil.copytree(mixed / name, tmp_path / name)
    options = teachers(mixed, sums="adder", words="speller")
    whole = train(mixed, tmp_path / "whole", **options | {"steps": 3})
    half = train(mixed, tmp_path / "half", **options | {"steps": 1})
    moved = f"teacher.paths={{sums: {tmp_path / 'adder'}, words: {tmp_path / 'speller'}}}"
    assert main(["train", "--resume", str(half), "steps=3", moved]) == 0
    assert same(weights(whole), weights(half))
    turned = f"teacher.paths={{sums: {tmp_path / 'speller'}, words: {tmp_path / 'adder'}}}"
    assert "was started on other files: teacher[sums]/" in refused(
        capsys, "train", "--resume", str(half), "steps=4", turned
    )


def test_a_source_that_is_never_sampled_needs_no_teacher(mixed: Path, tmp_path: Path, capsys: Captured) -> None:
    options: dict[str, Any] = {"collect.tasks": 2, "steps": 1, "data.sampler": "weighted"}
    options |= {"data.sampler.weights": "{sums: 1, words: 0}"}
    run = train(mixed, tmp_path / "run", **options | teachers(mixed, sums="adder"))
    assert step_metrics(run)[0]["teacher_kl/sums"] == step_metrics(run)[0]["teacher_kl"]
    message = refused_run(capsys, mixed, tmp_path / "other", **options | teachers(mixed, words="adder"))
    assert "rows of the data source `sums`, for which `teacher.paths` has no teacher" in message


def test_the_placement_counts_the_teachers_that_are_loaded(mixed: Path) -> None:
    for of_source, text in (
        ({"sums": "adder", "words": "speller"}, "2 teachers."),
        ({"sums": "adder", "words": "adder"}, "the teacher."),
    ):
        run = run_of(mixed, **teachers(mixed, **of_source))
        assert describe_placement(run, run.active_roles())[0].endswith(f"the same weights, {text}")


def test_teachers_that_do_not_fit_are_refused(mixed: Path, tmp_path: Path, capsys: Captured) -> None:
    turned = shutil.copytree(mixed / "speller", tmp_path / "turned")
    make_tokenizer(turned, "".join(reversed("0123456789 +-=:abcdefghijklmnopqrstuvwxyz")))
    both = teachers(mixed, sums="adder", words="speller")
    for options, message in (
        (both | {"teacher.path": mixed / "adder"}, "`teacher.paths` has one for each data source. Give one of them."),
        (teachers(mixed, sums="adder"), "rows of the data source `words`, for which `teacher.paths` has no teacher"),
        (teachers(mixed, sums="adder"), "The rows have the data sources `sums`, `words`."),
        (
            teachers(mixed, sums="adder", words="speller", codes="adder"),
            "`teacher.paths` names the data source `codes`, and `data.train` has no row of it.",
        ),
        (both | {"advantage.weights": "{word: 0.5}"}, "`advantage.weights` names the data source `word`, and"),
        (teachers(mixed, sums="adder", words="nowhere"), "`teacher.paths.words="),
        (teachers(tmp_path, sums="turned", words="turned"), "Give a `teacher.paths.sums` of the same tokenizer"),
        (both | {"advantage": "grpo", "reward": "exact_match"}, "Choose `advantage=distillation`"),
    ):
        assert message in refused_run(capsys, mixed, tmp_path / "run", **options)


@pytest.mark.slow
def test_distillation_learns_each_text_from_the_teacher_of_its_source(
    supervised_world: Path, tmp_path: Path, capsys: Captured
) -> None:
    """The trained model, as a teacher, differs from it in nothing."""
    rows = [row | {"data_source": "even" if n % 2 else "odd"} for n, row in enumerate(sums()[:32])]
    texts, of_odd = write(tmp_path / "texts.jsonl", rows), write(tmp_path / "odd.jsonl", rows[::2])
    paths = f"{{odd: {supervised_world / 'model'}, even: {supervised_world / 'teacher'}}}"
    options: dict[str, Any] = {"data.train": f"[{texts}]", "teacher.path": None, "teacher.paths": paths, "steps": 1}
    run = learned("distill", supervised_world, tmp_path / "run", **options | {"data.val": f"[{of_odd}]"})
    step = step_metrics(run)[0]
    assert abs(step["distillation_kl/odd"]) < 1e-5 < 1e-3 < step["distillation_kl/even"]
    before = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert before["eval/loss"] == pytest.approx(0, abs=1e-5)
    still = learned("distill", supervised_world, tmp_path / "still", **options | {"loss.weights": "{even: 0}"})
    assert step_metrics(still)[0]["loss"] == pytest.approx(0, abs=1e-5) and step["loss"] > 1e-3

    lone = options | {"data.train": f"[{of_odd}]"}
    message = refused_distillation(capsys, "distill", supervised_world, tmp_path / "lone", **lone)
    assert "`teacher.paths` names the data source `even`, and `data.train` has no row of it" in message
    unknown = options | {"data.val": f"[{supervised_world / 'held_out_shown.jsonl'}]"}
    message = refused_distillation(capsys, "distill", supervised_world, tmp_path / "unknown", **unknown)
    assert "`data.val` has rows without a data source" in message

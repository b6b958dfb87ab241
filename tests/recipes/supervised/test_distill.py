"""`etude distill`: a student nears its teacher at each token of given texts, as far as the teacher's top-k allows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from etude.chat import Tokenizer
from etude.models import create, save, tiny_config
from tests.recipes.runs import Captured, same, step_metrics
from tests.recipes.supervised_runs import learned, refusal, sums, weights
from tests.worlds import make_tokenizer


def thoughts(directory: Path, temperature: float) -> list[torch.Tensor]:
    """Return for each held-out row [trained, V] the log-probs before each trained token, by transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer, result = Tokenizer.load(directory), []
    for row in sums()[80:]:
        prompt_ids, answer_ids = tokenizer.encode(row["prompt"]), tokenizer.encode(row["completion"])
        ids = torch.tensor([*prompt_ids, *answer_ids, tokenizer.eos_ids[0]]).long()
        with torch.no_grad():
            logp = (model(input_ids=ids[None]).logits[0] / temperature).log_softmax(1)
        result.append(logp[len(prompt_ids) - 1 : len(ids) - 1])
    return result


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_loss_is_the_divergence_from_the_teacher(
    temperature: float, supervised_world: Path, tmp_path: Path
) -> None:
    """With the log-probs of every token, it is the whole KL(teacher ‖ student)."""
    size = Tokenizer.load(supervised_world / "model").vocab_size
    options = {
        "data.val": f"[{supervised_world / 'held_out_shown.jsonl'}]",
        "teacher.top": size,
        "temperature": temperature,
    }
    run = learned("distill", supervised_world, tmp_path / "run", steps=1, **options)
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    learner, teacher = (torch.cat(thoughts(supervised_world / name, temperature)) for name in ("model", "teacher"))
    assert line["eval/loss"] == pytest.approx(float((teacher.exp() * (teacher - learner)).sum(1).mean()), rel=1e-4)
    assert line["eval/teacher_tail"] == pytest.approx(0, abs=1e-5)


def test_a_teacher_that_is_the_trained_model_gives_a_loss_of_zero(supervised_world: Path, tmp_path: Path) -> None:
    run = learned("distill", supervised_world, tmp_path / "run", steps=1, teacher__path=supervised_world / "model")
    assert step_metrics(run)[0]["loss"] == pytest.approx(0, abs=1e-6) and step_metrics(run)[0]["grad_norm"] < 1e-4


def test_each_option_changes_the_training(supervised_world: Path, tmp_path: Path) -> None:
    flips: list[dict[str, Any]] = [
        {},
        {"teacher.top": 2},
        {"temperature": 3},
        {"loss.direction": "reverse"},
        {"loss.reduction": "seq-mean-token-mean"},
    ]
    result = [
        weights(learned("distill", supervised_world, tmp_path / str(n), steps=1, **flip))
        for n, flip in enumerate(flips)
    ]
    assert not any(same(result[a], result[b]) for a in range(len(result)) for b in range(a))


def test_a_teacher_may_have_more_rows_than_tokens(supervised_world: Path, tmp_path: Path, capsys: Captured) -> None:
    """Large models often have more rows than their tokenizer has tokens: the log-probs of those rows are left out."""
    size = make_tokenizer(tmp_path / "teacher")
    save(
        create(tiny_config(size + 23, layers=1, hidden=16, heads=2, kv_heads=1, context=128), seed=2),
        tmp_path / "teacher",
    )
    options = {"teacher.path": tmp_path / "teacher", "teacher.top": size, "steps": 1}
    assert step_metrics(learned("distill", supervised_world, tmp_path / "run", **options))[0][
        "teacher_tail"
    ] == pytest.approx(0, abs=1e-5)
    learned(
        "distill", supervised_world, tmp_path / "unasked", **options | {"teacher.top": None}
    )  # as many as there are
    message = refusal(capsys, "distill", supervised_world, tmp_path / "more", **options | {"teacher.top": size + 1})
    assert f"asks for more tokens than all models know, which is {size}" in message


def test_a_teacher_that_cannot_teach_is_refused(supervised_world: Path, tmp_path: Path, capsys: Captured) -> None:
    run = tmp_path / "run"
    assert "give its model directory with `teacher.path=…`" in refusal(
        capsys, "distill", supervised_world, run, teacher__path=None
    )
    assert "`teacher.path=" in refusal(capsys, "distill", supervised_world, run, teacher__path=tmp_path / "nowhere")
    turned = tmp_path / "turned"
    shutil.copytree(supervised_world / "teacher", turned)
    make_tokenizer(turned, "".join(reversed("0123456789 +-=:abcdefghijklmnopqrstuvwxyz")))
    message = refusal(capsys, "distill", supervised_world, run, teacher__path=turned)
    assert "has another tokenizer than the policy: id 2 is 'z' there and '0' here" in message

"""`etude sft`: its loss equals that of transformers, and each of its options changes the training."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from etude.cli import main
from etude.models import create, save, tiny_config
from etude.recipes.supervised.builder import build
from tests.chat.conversations import by
from tests.data.chats import chat_of
from tests.recipes.runs import Captured, same, step_metrics
from tests.recipes.supervised_runs import learned, refusal, run_of, weights, write

TALKS = [
    {"messages": [by("user", "Hi"), by("assistant", "Hello."), by("user", f"{n}?"), by("assistant", f"It is {n}.")]}
    for n in range(12)
]


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model`, which uses ChatML, and `talks.jsonl`."""
    directory = tmp_path_factory.mktemp("talker")
    size = chat_of(directory / "model").tokenizer.vocab_size
    save(create(tiny_config(size, layers=1, hidden=32, heads=2, kv_heads=1, context=256), seed=0), directory / "model")
    write(directory / "talks.jsonl", TALKS)
    return directory


@pytest.fixture(scope="module")
def plain(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on conversations with default options."""
    return talked(talker, tmp_path_factory.mktemp("plain") / "run")


def talked(talker: Path, directory: Path, **changes: Any) -> Path:
    """Return the weights of a run on conversations."""
    options = {"data.train": f"[{talker / 'talks.jsonl'}]", "batch_size": 4} | changes
    return learned("sft", talker, directory, **options)


def test_the_loss_is_that_of_transformers(talker: Path, tmp_path: Path) -> None:
    options = {"data.train": f"[{talker / 'talks.jsonl'}]", "data.val": f"[{talker / 'talks.jsonl'}]"}
    model: Any = AutoModelForCausalLM.from_pretrained(talker / "model")
    with build(run_of("sft", talker, directory=tmp_path / "run", **options)) as parts:
        result, batch = parts.evaluate.maybe_run(0).reduce(), parts.evaluate.read()
    assert batch.num_rows == len(TALKS)
    total = 0.0
    for start, stop in pairwise(batch.offsets.tolist()):
        ids = batch.ids[start:stop].long()[None]
        labels = torch.where(batch.action[start:stop][None], ids, -100)
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * int((labels[:, 1:] != -100).sum())
    assert result["eval/loss"] == pytest.approx(total / int(batch.action.sum()), rel=1e-5)


@pytest.mark.parametrize(
    "flipped",
    [
        {"data.train_on": "last"},
        {"loss.reduction": "seq-mean-token-mean"},
        {"loss.reduction": "seq-mean-token-mean", "loss.unit": "turn"},
        {"data.max_tokens": 40, "data.overlong": "truncate"},
        {"data.sampler": "sequential"},
        {"batch_size": 3},
        {"seed": 1},
        {"chat.template_kwargs.greeting": "Hello", "chat.template": "greeting.jinja"},
    ],
)
def test_each_option_changes_the_training(flipped: dict[str, Any], talker: Path, plain: Path, tmp_path: Path) -> None:
    if "chat.template" in flipped:
        template = "{{ greeting }}" + (talker / "model" / "chat_template.jinja").read_text()
        (tmp_path / "greeting.jinja").write_text(template)
        flipped = flipped | {"chat.template": tmp_path / "greeting.jinja"}
    assert not same(weights(plain), weights(talked(talker, tmp_path / "other", **flipped)))


def test_earlier_thinking_follows_the_option_history(tmp_path: Path) -> None:
    size = chat_of(tmp_path / "model", "qwen3").tokenizer.vocab_size
    save(create(tiny_config(size, layers=1, hidden=32, heads=2, kv_heads=1, context=256), seed=0), tmp_path / "model")
    forms = [
        *(by("user", "?"), by("assistant", "4", reasoning_content="Hm.")),
        *(by("user", "!"), by("assistant", "5", reasoning_content="So.")),
    ]
    write(tmp_path / "talks.jsonl", [{"messages": forms}] * 2)
    rows = {}
    for history in ("served", "template"):
        options = {"data.train": f"[{tmp_path / 'talks.jsonl'}]", "chat.history": history, "batch_size": 2}
        with build(run_of("sft", tmp_path, directory=tmp_path / history, **options)) as parts:
            batch = parts.examples.next()
            rows[history] = (batch.num_rows, batch.num_rollouts, int(batch.action.sum()))
    assert rows["served"][:2] == (2, 2) and rows["template"][:2] == (4, 2)
    assert rows["served"][2] == rows["template"][2], "each token that was said is learned once"


def test_plain_text_trains_its_continuation(supervised_world: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "texts.jsonl", [{"text": f"{n} is {n}"} for n in range(8)])
    steps = step_metrics(learned("sft", supervised_world, tmp_path / "run", data__train=f"[{file}]", steps=2))
    assert steps[-1]["loss"] < steps[0]["loss"] and steps[0]["prompt_length"] == 1


def test_skipped_rows_are_counted_at_every_step(supervised_world: Path, tmp_path: Path, capsys: Captured) -> None:
    rows = [{"prompt": "a", "completion": c} for c in ("b", "", "c" * 200, "d")]
    run = learned("sft", supervised_world, tmp_path / "run", data__train=f"[{write(tmp_path / 'a.jsonl', rows)}]")
    assert {(s["overlong_rows"], s["skipped_rows"]) for s in step_metrics(run)} == {(1, 2)}
    message = capsys.readouterr().err
    assert "1 of 4 rows in data.train have nothing to learn: left out. The first is" in message
    assert "1 of 4 rows in data.train are longer than this model's context of 128 tokens: left out" in message


def test_a_run_can_start_from_an_exported_model(talker: Path, plain: Path, tmp_path: Path) -> None:
    assert main(["export", str(plain), str(tmp_path / "model")]) == 0
    again = talked(talker, tmp_path / "again", **{"model.path": tmp_path / "model"})
    assert step_metrics(again)[0]["loss"] < step_metrics(plain)[0]["loss"]


def test_messages_for_a_model_without_a_template_are_refused(
    supervised_world: Path, tmp_path: Path, capsys: Captured
) -> None:
    file = write(tmp_path / "talks.jsonl", TALKS)
    message = refusal(capsys, "sft", supervised_world, tmp_path / "run", data__train=f"[{file}]")
    assert "no chat template" in message and "`chat.template`" in message

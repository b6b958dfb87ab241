"""`etude reward-model` writes a sequence classifier of transformers, which scores as it was trained to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from etude.chat import Tokenizer
from etude.cli import main
from etude.models import create, save, tiny_config
from tests.recipes.runs import Captured, refused, same, step_metrics
from tests.recipes.supervised_runs import learned, pairs, weights
from tests.worlds import make_tokenizer


@pytest.fixture(scope="module")
def judge(supervised_world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run, and the model that it wrote."""
    place = tmp_path_factory.mktemp("judge")
    options = {"data.val": f"[{supervised_world / 'held_out_pairs.jsonl'}]", "steps": 3}
    run = learned("reward-model", supervised_world, place / "run", **options)
    assert main(["export", str(run), str(place / "model")]) == 0
    return run, place / "model"


def texts(directory: Path, side: str) -> list[torch.Tensor]:
    """The held-out answers with their prompts and ends, as ids."""
    tokenizer = Tokenizer.load(directory)
    return [
        torch.tensor([*tokenizer.encode(row["prompt"] + row[side]), tokenizer.eos_ids[0]]).long()
        for row in pairs()[80:]
    ]


def test_the_written_model_scores_as_measured(judge: tuple[Path, Path]) -> None:
    run, directory = judge
    model: Any = AutoModelForSequenceClassification.from_pretrained(directory)
    assert type(model).__name__ in json.loads((directory / "config.json").read_text())["architectures"]
    scores = {}
    for side in ("chosen", "rejected"):
        with torch.no_grad():
            scores[side] = torch.stack([model(input_ids=ids[None]).logits[0, 0] for ids in texts(directory, side)])
    margin = scores["chosen"] - scores["rejected"]
    last = step_metrics(run)[-1]
    assert last["eval/margin"] == pytest.approx(float(margin.mean()), rel=1e-3, abs=1e-6)
    assert last["eval/accuracy"] == pytest.approx(float((margin > 0).double().mean()))


def test_the_written_model_scores_the_same_in_a_padded_batch(judge: tuple[Path, Path]) -> None:
    _, directory = judge
    model: Any = AutoModelForSequenceClassification.from_pretrained(directory)
    rows = texts(directory, "chosen")
    width, pad = max(map(len, rows)), model.config.pad_token_id
    batch = torch.stack([torch.cat([row, row.new_full((width - len(row),), pad)]) for row in rows])
    mask = torch.stack([torch.arange(width) < len(row) for row in rows]).long()
    with torch.no_grad():
        together = model(input_ids=batch, attention_mask=mask).logits[:, 0]
        alone = torch.stack([model(input_ids=row[None]).logits[0, 0] for row in rows])
    assert len({len(row) for row in rows}) > 1 and torch.allclose(together, alone, atol=1e-5)


def test_padding_that_also_ends_answers_is_not_named(supervised_world: Path, tmp_path: Path) -> None:
    """transformers' classifier reads its score before the padding: it would skip the end itself."""
    size = make_tokenizer(tmp_path / "model")
    data = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    data["pad_token"] = data["eos_token"]
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(data))
    save(create(tiny_config(size, layers=1, hidden=16, heads=2, kv_heads=1), seed=0), tmp_path / "model")
    run = learned("reward-model", supervised_world, tmp_path / "run", steps=1, model__path=tmp_path / "model")
    assert main(["export", str(run), str(tmp_path / "judge")]) == 0
    assert json.loads((tmp_path / "judge" / "config.json").read_text()).get("pad_token_id") is None


def test_a_new_head_gives_equal_scores_unless_it_is_loaded(
    judge: tuple[Path, Path], supervised_world: Path, tmp_path: Path
) -> None:
    run, directory = judge
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6) and lines[0]["eval/margin"] == 0
    options = {"data.val": f"[{supervised_world / 'held_out_pairs.jsonl'}]", "model.path": directory}
    more = learned("reward-model", supervised_world, tmp_path / "more", steps=1, **options)
    first = json.loads((more / "metrics.jsonl").read_text().splitlines()[0])
    assert first["eval/loss"] == pytest.approx(lines[-1]["eval/loss"], rel=1e-4)


def test_each_option_changes_the_training(supervised_world: Path, tmp_path: Path) -> None:
    flips: list[dict[str, Any]] = [{}, {"batch_size": 4}, {"data.sampler": "sequential"}]
    result = [
        weights(learned("reward-model", supervised_world, tmp_path / str(n), steps=1, **flip))
        for n, flip in enumerate(flips)
    ]
    assert not any(same(result[a], result[b]) for a in range(len(result)) for b in range(a))


def test_it_refuses_to_generate_text(judge: tuple[Path, Path], supervised_world: Path, capsys: Captured) -> None:
    run, _ = judge
    for words in (["generate", str(run), "1+1="], ["eval", str(run), f"data.val=[{supervised_world / 'tasks.jsonl'}]"]):
        message = refused(capsys, *words)
        assert "trains a model that scores, and cannot generate text" in message and "reward=reward_model" in message

"""`etude dpo`: its loss is the one of the paper, from log-probs that transformers computes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from etude.chat import Tokenizer
from etude.cli import main
from etude.models import create, save, tiny_config
from tests.recipes.runs import Captured, refused, same, step_metrics
from tests.recipes.supervised_runs import learned, pairs, refusal, weights, write
from tests.worlds import make_tokenizer


def implied(directory: Path, rows: list[dict[str, str]], side: str) -> torch.Tensor:
    """Return [pairs]: the log-prob of an answer with its end, by transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer, sums = Tokenizer.load(directory), []
    for row in rows:
        prompt_ids, answer_ids = tokenizer.encode(row["prompt"]), tokenizer.encode(row[side])
        ids = torch.tensor([*prompt_ids, *answer_ids, tokenizer.eos_ids[0]])[None]
        with torch.no_grad():
            logp = model(input_ids=ids.long()).logits[0].log_softmax(1)
        sums.append(sum(logp[at - 1, ids[0, at]] for at in range(len(prompt_ids), ids.shape[1])))
    return torch.stack(sums)


def test_the_loss_is_that_of_the_paper(supervised_world: Path, tmp_path: Path) -> None:
    rows, beta = pairs()[80:], 0.3
    options = {
        "data.val": f"[{supervised_world / 'held_out_pairs.jsonl'}]",
        "loss.beta": beta,
        "reference.path": supervised_world / "teacher",
    }
    run = learned("dpo", supervised_world, tmp_path / "run", steps=1, **options)
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    gap = {
        side: implied(supervised_world / "model", rows, side) - implied(supervised_world / "teacher", rows, side)
        for side in ("chosen", "rejected")
    }
    margin = beta * (gap["chosen"] - gap["rejected"])
    assert line["eval/loss"] == pytest.approx(float(-logsigmoid(margin).mean()), rel=1e-4)
    assert line["eval/accuracy"] == pytest.approx(float((margin > 0).double().mean()))
    assert line["eval/margin"] == pytest.approx(float(margin.mean()), rel=1e-3, abs=1e-6)


def test_at_first_the_policy_is_its_reference(finished: Callable[[str], Path]) -> None:
    first, second, _ = step_metrics(finished("dpo"))
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6) and first["margin"] == pytest.approx(0, abs=1e-5)
    assert abs(second["margin"]) > 1e-3


def test_each_option_changes_the_training(supervised_world: Path, tmp_path: Path) -> None:
    flips: list[dict[str, Any]] = [
        {},
        {"loss.beta": 0.5},
        {"loss.label_smoothing": 0.3},
        {"reference.path": supervised_world / "teacher"},
        {"batch_size": 4},
    ]
    result = [weights(learned("dpo", supervised_world, tmp_path / str(n), **flip)) for n, flip in enumerate(flips)]
    assert not any(same(result[a], result[b]) for a in range(len(result)) for b in range(a))


def test_a_prompt_that_a_pair_shares_is_computed_once(supervised_world: Path, tmp_path: Path) -> None:
    """A micro-batch counts packed tokens: a pair of 7 + 7 with 4 in common fits into 10."""
    rows = [{"prompt": "1+2=", "chosen": "33", "rejected": "44"}] * 8
    options = {"data.train": f"[{write(tmp_path / 'a.jsonl', rows)}]", "steps": 1}
    apart = step_metrics(
        learned("dpo", supervised_world, tmp_path / "apart", train__max_tokens_per_micro_batch=10, **options)
    )
    joined = step_metrics(
        learned("dpo", supervised_world, tmp_path / "joined", train__max_tokens_per_micro_batch=20, **options)
    )
    assert apart[0]["trained_tokens"] == 8 * 14 and (apart[0]["micro_batches"], joined[0]["micro_batches"]) == (8, 4)


def test_a_reference_with_another_vocabulary_is_refused(
    supervised_world: Path, tmp_path: Path, capsys: Captured
) -> None:
    size = make_tokenizer(tmp_path / "large", "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    save(create(tiny_config(size, layers=1, hidden=16, heads=2, kv_heads=1), seed=0), tmp_path / "large")
    message = refusal(capsys, "dpo", supervised_world, tmp_path / "run", reference__path=tmp_path / "large")
    assert f"knows {size} tokens" in message and "`reference.path` of the same tokenizer" in message
    message = refusal(capsys, "dpo", supervised_world, tmp_path / "run", reference__path=tmp_path / "nowhere")
    assert "`reference.path=" in message and "is no directory" in message


def test_a_reference_with_a_shorter_context_is_refused(
    supervised_world: Path, tmp_path: Path, capsys: Captured
) -> None:
    config = tiny_config(make_tokenizer(tmp_path / "short"), layers=1, hidden=16, heads=2, kv_heads=1, context=64)
    save(create(config, seed=0), tmp_path / "short")
    message = refusal(capsys, "dpo", supervised_world, tmp_path / "run", reference__path=tmp_path / "short")
    assert (
        "has a context of 64 tokens, and a row of this run may have 128" in message and "`data.max_tokens`" in message
    )
    learned("dpo", supervised_world, tmp_path / "run", steps=1, reference__path=tmp_path / "short", data__max_tokens=64)


def test_a_run_with_another_reference_is_another_run(supervised_world: Path, tmp_path: Path, capsys: Captured) -> None:
    other = tmp_path / "other"
    size = make_tokenizer(other)
    save(create(tiny_config(size, layers=1, hidden=16, heads=2, kv_heads=1), seed=0), other)
    run = learned("dpo", supervised_world, tmp_path / "run", steps=1, reference__path=other)
    moved = other.rename(tmp_path / "moved")
    assert main(["dpo", "--resume", str(run), "steps=2", f"reference.path={moved}"]) == 0
    save(create(tiny_config(size, layers=1, hidden=16, heads=2, kv_heads=1), seed=1), moved)
    message = refused(capsys, "dpo", "--resume", str(run), "steps=3", f"reference.path={moved}")
    assert "was started on other files: reference" in message


def test_pairs_of_equal_answers_are_reported(supervised_world: Path, tmp_path: Path, capsys: Captured) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "b"}]
    message = refusal(
        capsys, "dpo", supervised_world, tmp_path / "run", data__train=f"[{write(tmp_path / 'a.jsonl', rows)}]"
    )
    assert (
        "None of the 1 rows in data.train can be learned from" in message and "prefers an answer to itself" in message
    )

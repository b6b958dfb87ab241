"""lm-eval and inspect-ai evaluate a model that `etude serve` serves, as their packages do, with tasks in local files.

A plain forward pass of transformers gives the same log-likelihoods, answers and figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from etude.models import create, save, tiny_config
from tests.clients.evals import run_offline
from tests.components import require_environment
from tests.serving import ServedModel, serve_command
from tests.worlds import ALPHABET, make_tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}="
QUESTIONS = ["a b", "k 1", "zz", "2+2=", "one two three", "x"]
CHOICES = ["c", "d e", "f g h", "1"]
LENGTH = 8
"""The most tokens of an answer."""
SETTINGS = "num_concurrent=2,max_length=100"


@dataclass
class PlainModel:
    """A model in transformers alone."""

    model: Any
    tokenizer: Any

    def log_likelihood(self, context: str, text: str) -> float:
        """Return the log-prob of a text after its context."""
        ids = self.tokenizer(context + text)["input_ids"]
        start = len(self.tokenizer(context)["input_ids"])
        scores = self._logits(ids[:-1]).log_softmax(-1)
        return sum(float(scores[place - 1, ids[place]]) for place in range(start, len(ids)))

    def answer(self, prompt: str) -> str:
        """Return the likeliest answer, token by token."""
        ids = self.tokenizer(prompt)["input_ids"]
        count = len(ids)
        while len(ids) < count + LENGTH and ids[-1] != self.tokenizer.eos_token_id:
            ids.append(int(self._logits(ids)[-1].argmax()))
        return str(self.tokenizer.decode(ids[count:], skip_special_tokens=True))

    def _logits(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.model(torch.tensor([ids])).logits[0]
        return logits.double()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose next token depends strongly on its context, and a chat template."""
    directory = tmp_path_factory.mktemp("evals") / "model"
    size = make_tokenizer(directory, ALPHABET)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    config = tiny_config(size, layers=2, hidden=48, heads=4, kv_heads=1, context=128, tied=False)
    model = create(config, seed=3, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    save(model, directory)
    return directory


@pytest.fixture(scope="module")
def plain(directory: Path) -> PlainModel:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return PlainModel(model, AutoTokenizer.from_pretrained(directory))


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[ServedModel]:
    with serve_command(directory) as served:
        yield served


def half_right(answers: list[str]) -> list[str]:
    """Return targets that every second answer has."""
    assert all(answers), "an empty answer would equal an empty target"
    return [answer if place % 2 == 0 else f"not {answer}" for place, answer in enumerate(answers)]


def write_task(folder: Path, name: str, rows: list[dict[str, Any]], **fields: Any) -> None:
    """Write a task of lm-eval, whose rows are in a file beside it."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        **fields,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))


def write_words(folder: Path, name: str, targets: list[str]) -> None:
    """Write a task that wants exact answers."""
    rows = [{"question": question, "answer": target} for question, target in zip(QUESTIONS, targets, strict=True)]
    write_task(
        folder,
        name,
        rows,
        output_type="generate_until",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": ["never"], "max_gen_toks": LENGTH, "do_sample": False, "temperature": 0.0},
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )


def read_results(folder: Path) -> dict[str, Any]:
    """Return the figures of a run of lm-eval."""
    (file,) = folder.rglob("results_*.json")
    results: dict[str, Any] = json.loads(file.read_text())["results"]
    return results


def test_lm_eval_scores_and_generates(directory: Path, plain: PlainModel, served: ServedModel, tmp_path: Path) -> None:
    python = require_environment("evals").python
    scores = [[plain.log_likelihood(question, f" {choice}") for choice in CHOICES] for question in QUESTIONS]
    best = [row.index(max(row)) for row in scores]
    gold = [choice if place % 2 == 0 else (choice + 1) % len(CHOICES) for place, choice in enumerate(best)]
    tasks = tmp_path / "tasks"
    write_task(
        tasks,
        "etude_choice",
        [{"question": question, "gold": answer} for question, answer in zip(QUESTIONS, gold, strict=True)],
        output_type="multiple_choice",
        doc_to_target="gold",
        doc_to_choice=CHOICES,
        metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    )
    write_words(tasks, "etude_words", half_right([plain.answer(question) for question in QUESTIONS]))
    write_words(tasks, "etude_chat", half_right([plain.answer(f"{question}=") for question in QUESTIONS]))

    words = ["lm_eval", "--include_path", str(tasks), "--log_samples"]
    completions = f"model=policy,base_url={served.url}/v1/completions,tokenizer={directory},{SETTINGS}"
    whole = ["--model", "local-completions", "--tasks", "etude_choice,etude_words", "--batch_size", "4"]
    key = {"OPENAI_API_KEY": served.key}
    run_offline(python, [*words, *whole, "--model_args", completions, "--output_path", "completions"], tmp_path, **key)
    chat = ["--model", "local-chat-completions", "--tasks", "etude_chat", "--apply_chat_template"]
    chats = f"model=policy,base_url={served.url}/v1/chat/completions,{SETTINGS}"
    run_offline(python, [*words, *chat, "--model_args", chats, "--output_path", "chats"], tmp_path, **key)

    results = read_results(tmp_path / "completions")
    assert results["etude_choice"]["acc,none"] == 0.5
    assert results["etude_words"]["exact_match,none"] == 0.5
    assert read_results(tmp_path / "chats")["etude_chat"]["exact_match,none"] == 0.5
    (file,) = (tmp_path / "completions").rglob("samples_etude_choice_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(samples) == len(QUESTIONS)
    for sample in samples:
        got = [float(score) for score, _ in sample["filtered_resps"]]
        assert got == pytest.approx(scores[sample["doc_id"]], rel=0, abs=1e-5)


INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import match
from inspect_ai.solver import generate


@task
def words():
    return Task(dataset=json_dataset("words.jsonl"), solver=generate(), scorer=match(location="exact"))
"""


def test_inspect_ai_generates(plain: PlainModel, served: ServedModel, tmp_path: Path) -> None:
    python = require_environment("evals").python
    answers = [plain.answer(f"{question}=") for question in QUESTIONS]
    rows = [
        {"id": place, "input": question, "target": target}
        for place, (question, target) in enumerate(zip(QUESTIONS, half_right(answers), strict=True))
    ]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "words.py").write_text(INSPECT_TASK)
    words = ["inspect_ai", "eval", "words.py", "--model", "openai-api/etude/policy", "--display", "none"]
    options = ["--temperature", "0", "--max-tokens", str(LENGTH), "--log-dir", "logs", "--log-format", "json"]
    run_offline(python, [*words, *options], tmp_path, ETUDE_BASE_URL=f"{served.url}/v1", ETUDE_API_KEY=served.key)

    (file,) = (tmp_path / "logs").glob("*.json")
    log = json.loads(file.read_text())
    assert log["status"] == "success"
    assert log["results"]["scores"][0]["metrics"]["accuracy"]["value"] == 0.5
    given = {sample["id"]: sample["output"]["choices"][0]["message"]["content"] for sample in log["samples"]}
    assert given == dict(enumerate(answers))

"""A run offers its agents another model beside the trained one."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI, Request

import etude
from etude.agents import LLM
from etude.errors import ConfigError
from etude.models import create, save, tiny_config
from etude.records import Task
from etude.store import open_store
from tests.agents.proxy.listening import served
from tests.learn.games import make_tokenizer


def judge(seen: list[str]) -> FastAPI:
    """A provider whose model rates everything good."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> dict[str, Any]:
        body = await request.json()
        seen.append(f"{request.headers['authorization']} {body['model']}")
        message = {"role": "assistant", "content": "0.5"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": choices, "usage": usage}

    return app


@etude.agent
async def judged(task: Task, llm: LLM) -> float:
    """Answer, and have the other model rate the answer."""
    client, messages = llm.async_client.chat.completions, [{"role": "user", "content": task["key"]}]
    answer = await client.create(model=llm.model, messages=messages)  # type: ignore[call-overload]
    shown = [{"role": "user", "content": f"How good is {answer.choices[0].message.content}?"}]
    verdict = await client.create(model="judge", messages=shown)  # type: ignore[call-overload]
    return float(verdict.choices[0].message.content)


def options(directory: Path, **more: Any) -> dict[str, Any]:
    tokenizer = make_tokenizer(directory / "model")
    sizes = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "context": 48}
    save(create(tiny_config(tokenizer.vocab_size, **sizes), seed=0, dtype=torch.float32), directory / "model")
    few = {
        "steps": 1,
        "collect.tasks": 2,
        "collect.group_size": 2,
        "sampling.max_tokens": 4,
        "data.max_prompt_length": 16,
    }
    return {"model.path": directory / "model", "train.precision": "fp32", "threads": 1, **few, **more}


def test_an_agent_may_call_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGES_KEY", "not-to-be-seen")
    seen: list[str] = []
    with served(judge(seen)) as url:
        file = tmp_path / "models.yaml"
        file.write_text(f"judge: {{url: '{url}', model: large, api_key_env: JUDGES_KEY}}\n")
        algorithm = etude.RL("grpo", options(tmp_path, **{"agent.external": file}), tmp_path / "run")
        metrics = etude.Trainer(algorithm).fit(judged, [{"key": key} for key in "abc"])
    assert seen == ["Bearer not-to-be-seen large"] * 4
    assert metrics["reward"] == 0.5 and metrics["failed_attempts"] == 0
    assert (
        metrics["endpoint/external_answered"]
        == metrics["endpoint/turns"]
        == metrics["endpoint/external_completion_tokens"]
        == 4
    )
    with closing(open_store(tmp_path / "run/journal.sqlite", read_only=True)) as store:
        (step,) = store.admitted().values()
        assert [len(store.turns(rollout)) for rollout in step] == [1] * 4, "what is learned from is the policy's alone"
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or b"not-to-be-seen" not in path.read_bytes(), path


def test_an_external_model_without_its_key_is_refused_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGES_KEY", raising=False)
    file = tmp_path / "models.yaml"
    file.write_text(json.dumps({"judge": {"url": "http://127.0.0.1:9/v1", "api_key_env": "JUDGES_KEY"}}))
    algorithm = etude.RL("grpo", options(tmp_path, **{"agent.external": file}), tmp_path / "run")
    with pytest.raises(ConfigError, match="JUDGES_KEY, which is not set"):
        etude.Trainer(algorithm).fit(judged, [{"key": "a"}])

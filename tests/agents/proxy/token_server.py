"""A small server that answers as vLLM does: /v1/completions over ids, with `return_token_ids`, whole and streamed."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from etude.agents.proxy import Upstream
from etude.errors import DataError
from etude.records import Completion, SamplingParams


def _params(body: dict[str, Any]) -> SamplingParams:
    names = ("max_tokens", "min_tokens", "temperature", "top_p", "min_p", "repetition_penalty", "seed")
    told = {name: body[name] for name in names if name in body}
    stops = {"stop": tuple(body.get("stop", ())), "stop_ids": tuple(body.get("stop_token_ids", ()))}
    bias = {int(id): value for id, value in body.get("logit_bias", {}).items()}
    return SamplingParams(**told, **stops, top_k=max(body["top_k"], 0), logit_bias=bias, top_logprobs=body["logprobs"])


def _event(choice: dict[str, Any]) -> str:
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def _choice(
    ids: Any, logp: Any, text: str, finish: str | None, whole: Completion | None, start: int = 0
) -> dict[str, Any]:
    tops = [{} for _ in ids]
    if whole is not None and whole.top_ids is not None and whole.top_logp is not None:
        pairs = [*zip(whole.top_ids.tolist(), whole.top_logp.tolist(), strict=True)][start : start + len(ids)]
        tops = [{f"token_id:{id}": one for id, one in zip(*pair, strict=True)} for pair in pairs]
    scores = {"tokens": [f"token_id:{id}" for id in ids], "token_logprobs": [float(one) for one in logp]}
    return {
        "index": 0,
        "text": text,
        "token_ids": [int(id) for id in ids],
        "logprobs": {**scores, "top_logprobs": tops},
        "finish_reason": finish,
    }


def app_of(engine: Upstream, *, ids: bool = True) -> FastAPI:
    """The app. Without `ids` it is a server that does not know of them."""
    app = FastAPI()

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await request.json()
        assert body["return_token_ids"]
        prompt, params = np.array(body["prompt"], np.int32), _params(body)
        try:
            if not body["stream"]:
                whole = await engine.generate(prompt, params)
                choice = _choice(whole.ids, whole.logp, whole.text, whole.finish, whole)
                if not ids:
                    del choice["token_ids"]
                return Response(json.dumps({"choices": [choice]}), media_type="application/json")
        except DataError as error:
            return Response(json.dumps({"error": {"message": str(error)}}), 400)

        async def events() -> AsyncIterator[str]:
            if params.top_logprobs:  # which the engine tells with the whole
                whole = await engine.generate(prompt, params)
                last = len(whole.ids) - 1
                for n in range(last + 1):
                    text, finish = (whole.text, whole.finish) if n == last else ("", None)
                    yield _event(_choice(whole.ids[n : n + 1], whole.logp[n : n + 1], text, finish, whole, n))
            else:
                async for each in engine.stream(prompt, params):
                    done = each.completion
                    text, finish = (done.text, done.finish) if done else ("", None)
                    yield _event(_choice(each.ids, each.logp, text, finish, done))
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


@contextmanager
def token_server(engine: Upstream, **options: Any) -> Iterator[str]:
    """Serve while the block runs; where."""
    with served(app_of(engine, **options)) as url:
        yield url


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Serve an app while the block runs; where its /v1 is."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join(20)

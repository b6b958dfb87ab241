"""A real server samples for the endpoint as the in-process engine does."""

from __future__ import annotations

import pytest

from etude.chat import ChatRenderer, Tokenizer
from etude.records import SamplingParams
from etude.rollout import ServerPool
from tests.agents.proxy.world import serving
from tests.agents.sdks import openai
from tests.served import CONTEXT, on

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}="


@pytest.fixture(scope="module", autouse=True)
def one_certificate() -> None:
    """All certificates: a missing server environment is installed, and the packages come over TLS."""


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=on(kind)) for kind in ("vllm", "sglang")])
def test_an_agent_is_answered_by_a_server(kind: str, request: pytest.FixtureRequest) -> None:
    engine: ServerPool = request.getfixturevalue(f"{kind}_server")
    tokenizer = engine.servers[0].tokenizer
    assert isinstance(tokenizer, Tokenizer)
    chat = ChatRenderer(tokenizer, template=TEMPLATE)
    with serving(engine, chat, context=CONTEXT, train=SamplingParams(max_tokens=8)) as world:
        claim = world.attempt()
        with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
            ask = [{"role": "user", "content": "1+2"}]
            whole = client.chat.completions.create(model="policy", messages=ask)  # type: ignore[arg-type]
            chunks = list(client.chat.completions.create(model="policy", messages=ask, stream=True))  # type: ignore[arg-type]
        first, second = world.turns(claim.attempt_id)
        assert whole.choices[0].message.content == first.completion.text
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == second.completion.text and tokenizer.decode(second.completion.ids) == text
        assert len(second.completion.logp) == len(second.completion.ids) > 0

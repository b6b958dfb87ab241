"""A server that tells token ids samples for the endpoint as the engine within it does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import openai
import pytest

from etude.agents.proxy.server import TokenServer
from etude.chat import Chat, Tokenizer
from etude.errors import DataError, EngineError
from etude.records import Completion, SamplingParams
from etude.rollout.torch_engine import TorchEngine
from tests.agents.proxy.token_server import token_server
from tests.agents.proxy.world import serving
from tests.chat.made import CHATML, byte_level, save
from tests.rollout.engines import engine_of, model_of

PROMPT = np.array([5, 6, 7, 8], np.int32)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save(tmp_path_factory.mktemp("chat"), byte_level(CHATML), CHATML, ("<|im_end|>",)))


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> Iterator[TorchEngine]:
    with engine_of(model_of(vocabulary=tokenizer.size, context=128), tokenizer) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: TorchEngine) -> Iterator[str]:
    with token_server(engine) as url:
        yield url


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=9, seed=3),
        SamplingParams(max_tokens=9, seed=4, temperature=0.7, top_p=0.9, top_k=5, min_p=0.01, repetition_penalty=1.1),
        SamplingParams(max_tokens=9, seed=5, top_logprobs=3, min_tokens=2, logit_bias={9: 2.0}, stop=("e",)),
    ],
)
def test_it_samples_as_its_engine_does(engine: TorchEngine, url: str, sampling: SamplingParams) -> None:
    async def asked() -> tuple[Completion, Completion, Completion, int]:
        server = TokenServer(url, "policy", version=4)
        pieces = [each async for each in server.stream(PROMPT, sampling)]
        whole = pieces[-1].completion
        assert whole is not None
        try:
            direct = await engine.generate(PROMPT, sampling)
            return await server.generate(PROMPT, sampling), whole, direct, sum(len(each.ids) for each in pieces)
        finally:
            await server.close()

    one, streamed, direct, count = asyncio.run(asked())
    assert count == len(direct.ids)
    for each in (one, streamed):
        assert np.array_equal(each.ids, direct.ids) and np.array_equal(each.logp, direct.logp)
        assert each.finish == direct.finish and set(each.version) == {4}
        if sampling.top_logprobs:
            assert each.top_ids is not None and direct.top_logp is not None and each.top_logp is not None
    if sampling.top_logprobs:
        assert direct.top_logp is not None and one.top_logp is not None
        assert np.allclose(one.top_logp, direct.top_logp)


def test_what_it_refuses_and_what_it_cannot_tell(engine: TorchEngine, url: str) -> None:
    async def asked(where: str, prompt: np.ndarray) -> None:
        server = TokenServer(where, "policy")
        try:
            await server.generate(prompt, SamplingParams(max_tokens=3))
        finally:
            await server.close()

    with pytest.raises(DataError, match=r"answered 400: .*the model knows"):
        asyncio.run(asked(url, np.array([10**6], np.int32)))
    with pytest.raises(EngineError, match="could not be asked"):
        asyncio.run(asked("http://127.0.0.1:9/v1", PROMPT))
    with pytest.raises(EngineError, match="answered 404"):
        asyncio.run(asked(f"{url}/nowhere", PROMPT))
    with token_server(engine, ids=False) as silent, pytest.raises(EngineError, match="return_token_ids"):
        asyncio.run(asked(silent, PROMPT))


def test_an_agent_behind_the_endpoint(tokenizer: Tokenizer, url: str) -> None:
    with serving(TokenServer(url, "policy"), Chat(tokenizer), context=128, train=SamplingParams(max_tokens=8)) as world:
        claim = world.attempt()
        with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
            ask = [{"role": "user", "content": "?"}]
            whole = client.chat.completions.create(model="policy", messages=ask)  # type: ignore[arg-type]
            chunks = list(client.chat.completions.create(model="policy", messages=ask, stream=True))  # type: ignore[arg-type]
        first, second = world.turns(claim.key)
        assert whole.choices[0].message.content == first.completion.text
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == second.completion.text == tokenizer.decode(second.completion.ids)
        assert len(second.completion.logp) == len(second.completion.ids) > 0

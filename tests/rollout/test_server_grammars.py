"""Answers of servers that are held to a grammar: what is asked, what is checked, and what happens at a break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.chat import Tokenizer
from etude.chat.grammar import HEADER
from etude.errors import ConfigError, EngineError
from etude.records import Completion, SamplingParams
from etude.rollout import SglangConfig, VllmConfig
from etude.rollout.failover_router import FailoverRouter
from etude.rollout.grammar_trial import TRIAL
from tests.rollout.late_server import SHAPE, LateServer, late_server
from tests.worlds import make_tokenizer

V = SHAPE.vocab_size
FORM = SamplingParams(max_tokens=8, grammar=f"{HEADER}start: /[ab]c/\n", support=True, seed=3)


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that llguidance reads."""
    directory = tmp_path_factory.mktemp("letters")
    make_tokenizer(directory, byte_level=True)
    return Tokenizer.load(directory)


class World:
    """A server whose tokens the test sends, and a router to it."""

    def __init__(self, server: LateServer, tokenizer: Tokenizer) -> None:
        self.server = server
        self.tokenizer = tokenizer
        self.router = FailoverRouter([server.engine], max_num_seqs=8, max_waiting=8)

    def ids(self, text: str, *, ends: bool = False) -> list[int]:
        """Return the tokens of a text, and the end token if the answer ends there."""
        ids: list[int] = self.tokenizer.encode(text).tolist()
        return ids + [self.tokenizer.eos_ids[0]] * ends

    def ask(self, sampling: SamplingParams = FORM) -> asyncio.Task[Completion]:
        """Ask for an answer."""
        return asyncio.create_task(self.router.generate(np.array([5, 6], np.int32), sampling))

    async def write(self, text: str, request: int, *, ends: bool = True) -> None:
        """Send an answer, or its beginning."""
        await self.server.requested(request + 1)
        await self.server.send(self.ids(text, ends=ends), request=request, finish="stop" if ends else None)

    async def breaks_off(self, request: int) -> None:
        """Break an answer off, and let the server be found healthy again."""
        self.server._replies[request].close()
        async with asyncio.timeout(10):
            while self.server.engine.is_up:
                await asyncio.sleep(0.001)
        self.server.engine.is_up = True
        self.router.admit_waiting()


@asynccontextmanager
async def world_of(tokenizer: Tokenizer) -> AsyncGenerator[World, None]:
    backend = VllmConfig().create_backend()
    backend.grammar_end_ids = tokenizer.eos_ids
    async with late_server(backend) as server:
        server.engine.tokenizer = tokenizer
        server.engine.is_up = True
        yield World(server, tokenizer)


def run(tokenizer: Tokenizer, scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario with a server."""

    async def main() -> None:
        async with world_of(tokenizer) as world, asyncio.timeout(60):
            await scenario(world)

    asyncio.run(main())


def test_a_server_is_tried_once_and_its_answers_get_the_sets_of_the_grammar(letters: Tokenizer) -> None:
    async def scenario(world: World) -> None:
        answers = [world.ask(), world.ask()]
        await world.write("17", 0)
        for request in (1, 2):
            await world.write("bc", request)
        completions = [await answer for answer in answers]
        grammars = [request["sampling_params"]["structured_outputs"] for request in world.server.requests]
        assert grammars == [{"grammar": TRIAL}, {"grammar": FORM.grammar}, {"grammar": FORM.grammar}]
        for completion in completions:
            assert completion.support is not None and completion.raw_logp is None
            sets = [completion.support.mask(place, V).nonzero()[0].tolist() for place in range(3)]
            assert sets == [world.ids("ab"), world.ids("c"), world.ids("", ends=True)]

    run(letters, scenario)


def test_a_token_that_the_grammar_forbids_ends_the_answer_as_an_error_of_the_server(letters: Tokenizer) -> None:
    async def scenario(world: World) -> None:
        for request, sampling in ((1, FORM), (2, replace(FORM, support=False)), (3, replace(FORM, temperature=0.0))):
            answer = world.ask(sampling)
            if request == 1:
                await world.write("17", 0)
            await world.write("bb", request)
            with pytest.raises(EngineError, match=rf"engine allows token {world.ids('b')[0]} at place 1 of an answer"):
                await answer

    run(letters, scenario)


def test_a_server_without_the_grammar_engine_is_refused_by_name(letters: Tokenizer) -> None:
    async def scenario(world: World) -> None:
        answer = world.ask()
        await world.write("free text", 0)
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1:\d+ cannot hold one to it .*config\.backend guidance`"):
            await answer

    run(letters, scenario)


def test_an_answer_that_broke_off_begins_anew_or_fails_where_it_was_streamed(letters: Tokenizer) -> None:
    async def scenario(world: World) -> None:
        answer = world.ask()
        await world.write("17", 0)
        await world.write("b", 1, ends=False)
        await world.breaks_off(1)
        await world.write("ac", 2)
        assert (await answer).text == "ac"
        assert [request["token_ids"] for request in world.server.requests[1:]] == [[5, 6], [5, 6]]

        async def read() -> None:
            async for delta in world.router.stream(np.array([5, 6], np.int32), FORM):
                assert delta.support is not None and delta.support.sizes(V).tolist() == [2]

        reading = asyncio.create_task(read())
        await world.write("b", 3, ends=False)
        world.server._replies[3].close()
        with pytest.raises(EngineError, match="could not be reached"):
            await reading

    run(letters, scenario)


def test_servers_are_started_for_grammars_only_with_a_tokenizer_that_they_read(
    letters: Tokenizer, tmp_path: Path
) -> None:
    make_tokenizer(tmp_path)
    assert letters.grammars.is_read_directly() and not Tokenizer.load(tmp_path).grammars.is_read_directly()
    assert VllmConfig().create_backend().find_grammar_end_ids(letters, tmp_path) == letters.eos_ids
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert SglangConfig().create_backend().find_grammar_end_ids(letters, tmp_path) == (1, 2)
    for config in (VllmConfig(), SglangConfig()):
        backend = config.create_backend()
        with pytest.raises(ConfigError, match=rf"{backend.package} cannot read this model's tokenizer"):
            backend.check_sampling(FORM)
        backend.grammar_end_ids = (1,)
        backend.check_sampling(FORM)
        with pytest.raises(ConfigError, match="asked for with `min_tokens`"):
            backend.check_sampling(replace(FORM, min_tokens=2))

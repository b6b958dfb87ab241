"""Rollouts with images, in tasks, observations and tool results: stored once, and given to the engine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from PIL import Image

from etude.chat import ChatRenderer, Tokenizer
from etude.chat.renderer import ChatConfig
from etude.data import Dataset
from etude.data.samples import build_samples
from etude.images import PromptImages, image_digest
from etude.images.decoding import open_image
from etude.images.encoding import encode_png
from etude.protocols import Ids, Observation
from etude.recipes.collect.environment import EnvConfig, Environment
from etude.recipes.collect.episodes import EpisodePlayer
from etude.recipes.collect.player import EnginePlayer
from etude.recipes.collect.rollout_images import RolloutImages
from etude.recipes.collect.rollouts import PlayedRollout
from etude.records import Completion, ContentPart, Message, Outcome, SamplingParams, Task
from etude.rewards import EnvironmentReward, Judge
from etude.store import open_store
from etude.store.queue.local_queue import open_own_queue
from tests.vlms import make_vlm, picture

RED, BLUE = (encode_png(Image.new("RGB", (40, 32), colour)) for colour in ("red", "blue"))
CALL = '<tool_call>\n{"name": "zoom", "arguments": {}}\n</tool_call>'
THIS = "tests.recipes.collect.test_image_rollouts"


class Eyes:
    """An engine that says its script, and keeps the prompts and the images that it was given."""

    def __init__(self, tokenizer: Tokenizer, script: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._script = list(script)
        self.asked: list[tuple[Ids, PromptImages | None]] = []

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        """Return the next answer of the script."""
        assert on_start is not None and sampling.max_tokens
        on_start()
        self.asked.append((prompt, images))
        answer = self._script.pop(0)
        ids = [*self._tokenizer.encode(answer), self._tokenizer.eos_ids[0]]
        return Completion(ids, np.zeros(len(ids)), np.zeros(len(ids), int), "stop", answer)

    @property
    def shown(self) -> list[list[str]]:
        """Of each prompt, the digests of its spans' images; their bytes came with them."""
        shown = []
        for prompt, images in self.asked:
            spans = () if images is None else images.spans
            assert images is None or {span.digest for span in spans} == set(images.contents)
            assert all(len(set(prompt[span.start : span.stop].tolist())) == 1 for span in spans)
            shown.append([span.digest for span in spans])
        return shown


@pytest.fixture(scope="module")
def chat() -> ChatRenderer:
    directory = make_vlm("qwen2_5_vl")
    return ChatConfig().build_renderer(Tokenizer.load(directory), directory)


def play(
    chat: ChatRenderer, engine: Eyes, task: Task, *, images: RolloutImages | None = None, **options: Any
) -> PlayedRollout:
    """Play one attempt at a task."""

    async def run() -> PlayedRollout:
        with Judge(EnvironmentReward()) as judge:
            config = EnvConfig(**options)
            player = EnginePlayer(
                render=chat.render_prompt,
                engine=engine,
                judge=judge,
                timeout=30.0,
                max_concurrency=4,
                episodes=EpisodePlayer(Environment(config), chat, 400) if config.is_enabled else None,
                images=images,
            )
            stored = await player.store_images(task)
            return await player.play(stored, SamplingParams(max_tokens=80), lambda turn: turn)

    return asyncio.run(run())


def shown_task(**row: Any) -> Task:
    return Dataset.load([{"prompt": [{"role": "user", "content": "<image> How many?"}], "images": [RED], **row}]).task(
        0, 0
    )


def zoom() -> list[Any]:
    """Look closer."""
    return ["Closer:", open_image(BLUE)]


def broken() -> bytes:
    """Look away."""
    return BLUE[:60]


class Gallery:
    """An environment that shows images in all their forms."""

    def __init__(self, last: str = "") -> None:
        self._last = last

    def reset(self, task: Task) -> Observation:
        del task
        return Observation(["Look.", Image.new("RGB", (40, 32), "red")])

    def step(self, answer: Message) -> Observation:
        del answer
        parts: dict[str, Any] = {
            "message": [Message("user", (ContentPart("text", text="So?"), BLUE))],  # type: ignore[arg-type]
            "json": [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (40, 32), "blue")}]}],
            "damaged": [BLUE[:60]],
            "many": [RED] * 3,
        }
        return Observation(parts[self._last])


def test_the_image_of_a_task_goes_to_the_engine_and_into_the_turn(chat: ChatRenderer) -> None:
    engine = Eyes(chat.tokenizer, ["two"])
    task = shown_task()
    played = play(chat, engine, task)
    assert played.succeeded and engine.shown == [[image_digest(RED)]]
    _, images = engine.asked[0]
    assert images is not None and images.contents == {image_digest(RED): RED} == task.images
    (turn,) = played.turns
    assert turn.images == images.spans
    (row,) = build_samples(played.turns, 0)
    assert row.images == turn.images


def test_a_tool_shows_an_image_that_is_stored_once_and_read_again(chat: ChatRenderer) -> None:
    with closing(open_store()) as store, open_own_queue(store) as queue:
        task = shown_task()
        asyncio.run(queue.put_images(list(task.images.values())))
        recorded = Task(task.ordinal, task.fields)
        for _ in range(2):  # the second reads the images of the first
            engine = Eyes(chat.tokenizer, [CALL, CALL, "two"])
            played = play(chat, engine, recorded, images=RolloutImages(queue), tools=(f"{THIS}:zoom",))
            closer = encode_png(open_image(BLUE))
            red, blue = image_digest(RED), image_digest(closer)
            assert played.succeeded and engine.shown == [[red], [red, blue], [red, blue, blue]], played.verdict.error
        stored = store.images([red, blue])
        assert [stored[digest].content for digest in (red, blue)] == [RED, closer]
        (row,) = build_samples(played.turns, 0)
        assert [span.digest for span in row.images] == [red, blue, blue] and (played.calls, played.failed_calls) == (
            2,
            0,
        )


@pytest.mark.parametrize("last", ["message", "json"])
def test_an_environment_shows_images_of_pillow_and_bytes(chat: ChatRenderer, last: str) -> None:
    engine = Eyes(chat.tokenizer, ["two", "three"])
    played = play(chat, engine, shown_task(), path=f"{THIS}:Gallery", kwargs={"last": last}, max_turns=2)
    first = image_digest(encode_png(Image.new("RGB", (40, 32), "red")))
    assert engine.shown[0] == [first] and [len(shown) for shown in engine.shown] == [1, 2], played.verdict.error


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (
            "damaged",
            "The observation shown on task 0 is invalid: Image 1 of message 0 cannot be taken. The image cannot",
        ),
        ("many", "The prompt has 4 images, and `vision.max_images` is 3. Send fewer, or raise it."),
    ],
)
def test_what_cannot_be_shown_is_a_recorded_outcome(chat: ChatRenderer, last: str, says: str) -> None:
    engine = Eyes(chat.tokenizer, ["two", "three"])
    images = RolloutImages(max_images=3)
    played = play(chat, engine, shown_task(), images=images, path=f"{THIS}:Gallery", kwargs={"last": last}, max_turns=2)
    assert played.verdict.outcome is Outcome.FAILED and says in played.verdict.error and len(played.turns) == 1


def test_equal_pixels_of_pillow_are_one_image() -> None:
    same = picture(1, 9, 7)
    copied = Image.fromarray(np.asarray(same))
    copied.info["dpi"] = (72, 72)
    assert encode_png(same) == encode_png(copied)
    assert np.array_equal(np.asarray(open_image(encode_png(same))), np.asarray(same))


def test_images_beyond_the_memory_are_read_again(chat: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.recipes.collect.rollout_images.MOST_BYTES", 1)
    images = RolloutImages()
    refs = asyncio.run(images.put([RED, BLUE]))
    prompt = chat.render([Message("user", tuple(ContentPart("image", image=ref) for ref in refs))])
    found = asyncio.run(images.find(prompt))
    assert found is not None and found.contents == {image_digest(RED): RED, image_digest(BLUE): BLUE}


def test_a_prompt_without_room_says_how_much_of_it_is_images(chat: ChatRenderer) -> None:
    played = play(chat, Eyes(chat.tokenizer, []), shown_task(), path=f"{THIS}:Gallery", max_tokens=20)
    assert re.search(r"has \d+ tokens, 20 of them of images, and a rollout may have 20 in all", played.verdict.error)

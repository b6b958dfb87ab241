"""Images in calls: three dialects, all ways that an image comes in, and each refusal."""

from __future__ import annotations

import asyncio
import base64
import io
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cache
from typing import Any

import httpx2
import numpy as np
import pytest

from etude.agents.proxy import EndpointConfig, request_images
from etude.agents.proxy.image_addresses import ImageFetcher, is_public
from etude.agents.proxy.request import APIError
from etude.chat import ChatConfig, ChatRenderer, ImageEncoder, Tokenizer
from etude.images import image_digest, keyed_ids
from etude.store.queue.rollout_queue import Claim
from tests.agents.proxy.world import Scripted, World, serving
from tests.images.test_decoding import large_png
from tests.vlms import make_vlm, picture

END = "<|im_end|>"


@cache
def png(seed: int, width: int = 40, height: int = 24) -> bytes:
    file = io.BytesIO()
    picture(seed, width, height).save(file, "PNG")
    return file.getvalue()


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


@cache
def chat() -> ChatRenderer:
    directory = make_vlm("qwen3_vl")
    return ChatConfig().build_renderer(Tokenizer.load(directory), directory)


def encoder() -> ImageEncoder:
    found = chat().encoder
    assert isinstance(found, ImageEncoder)
    return found


@pytest.fixture(scope="module")
def upstream() -> Scripted:
    return Scripted(chat().tokenizer, lambda _: f"two{END}")


@pytest.fixture(scope="module")
def world(upstream: Scripted) -> Iterator[World]:
    with serving(upstream, chat(), context=2000, config=EndpointConfig(max_images=3)) as world:
        yield world


def post(world: World, path: str, body: dict[str, Any], claim: Claim) -> httpx2.Response:
    headers = {"authorization": f"Bearer {claim.model_key}"}
    return httpx2.post(f"{world.url}{path}", json={"model": "policy", **body}, headers=headers, timeout=30)


def shown(url: str, text: str = "?", **more: Any) -> dict[str, Any]:
    """A message of OpenAI's with an image."""
    image = {"type": "image_url", "image_url": {"url": url, **more}}
    return {"role": "user", "content": [image, {"type": "text", "text": text}]}


def ask(world: World, claim: Claim, *messages: dict[str, Any], **more: Any) -> httpx2.Response:
    return post(world, "/chat/completions", {"messages": list(messages), **more}, claim)


def sentence(response: httpx2.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    message: str = response.json()["error"]["message"]
    return message


def source(content: bytes) -> dict[str, Any]:
    """An image block of Anthropic's."""
    encoded = base64.b64encode(content).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}


TOOL = {"name": "look", "parameters": {"type": "object", "properties": {}}}
CALLS: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "messages": [
            shown(data_url(png(1))),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
            },
            {
                "role": "tool",
                "tool_call_id": "a",
                "content": [
                    {"type": "text", "text": "cropped:"},
                    {"type": "image_url", "image_url": {"url": data_url(png(2, 30, 60))}},
                ],
            },
        ],
        "tools": [{"type": "function", "function": TOOL}],
    },
    "/responses": {
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": data_url(png(1))},
                    {"type": "input_text", "text": "?"},
                ],
            },
            {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "a",
                "output": [
                    {"type": "input_text", "text": "cropped:"},
                    {"type": "input_image", "image_url": data_url(png(2, 30, 60))},
                ],
            },
        ],
        "tools": [{"type": "function", **TOOL}],
    },
    "/messages": {
        "max_tokens": 50,
        "messages": [
            {"role": "user", "content": [source(png(1)), {"type": "text", "text": "?"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "a",
                        "content": [{"type": "text", "text": "cropped:"}, source(png(2, 30, 60))],
                    }
                ],
            },
        ],
        "tools": [{"name": "look", "input_schema": TOOL["parameters"]}],
    },
}


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("stream", [False, True])
def test_images_of_users_and_tools_reach_the_sampler(world: World, upstream: Scripted, path: str, stream: bool) -> None:
    claim = world.attempt()
    response = post(world, path, {**CALLS[path], "stream": stream}, claim)
    assert response.status_code == 200, response.text
    (turn,) = world.turns(claim.attempt_id)
    digests = [image_digest(png(1)), image_digest(png(2, 30, 60))]
    assert [span.digest for span in turn.images] == digests
    sizes = [span.stop - span.start for span in turn.images]
    assert sizes == [encoder().layout.count(40, 24), encoder().layout.count(30, 60)]
    assert all((turn.prompt[span.start : span.stop] == encoder().image_id).all() for span in turn.images)
    sampled = upstream.shown[-1]
    assert sampled is not None and sampled.spans == turn.images
    assert sampled.contents == dict(zip(digests, [png(1), png(2, 30, 60)], strict=True))
    assert world.do(world.queue.get_images(digests)) == sampled.contents
    if not stream:
        usage = response.json()["usage"]
        assert usage.get("prompt_tokens", usage.get("input_tokens")) == len(turn.prompt) > sum(sizes)


def test_the_dialects_have_one_prompt(world: World) -> None:
    prompts = []
    for path, body in CALLS.items():
        claim = world.attempt()
        assert post(world, path, body, claim).status_code == 200
        prompts.append(world.turns(claim.attempt_id)[0].prompt.tolist())
    assert prompts[0] == prompts[1] == prompts[2]


def test_a_conversation_continues_with_its_images(world: World) -> None:
    claim = world.attempt()
    first = [shown(data_url(png(1)))]
    answer = {"role": "assistant", "content": "two"}
    assert ask(world, claim, *first).status_code == 200
    again = [*first, answer, shown(data_url(png(3, 20, 20)), "and now?")]
    assert ask(world, claim, *again).status_code == 200
    other = [shown(data_url(png(4))), *again[1:]]
    assert ask(world, claim, *other).status_code == 200
    one, two, three = world.turns(claim.attempt_id)
    served = np.concatenate([one.prompt, one.completion.ids])
    assert np.array_equal(two.prompt[: len(served)], served)
    assert two.images[: len(one.images)] == one.images and len(two.images) == 2
    metrics = world.endpoint.metrics()
    assert metrics["endpoint/turns_continued"] >= 1
    assert not np.array_equal(keyed_ids(three.prompt, three.images)[: len(served)], keyed_ids(served, one.images))
    assert three.observed == 0


def test_an_earlier_response_continues_with_its_images(world: World) -> None:
    claim = world.attempt()
    body = {"role": "user", "content": [{"type": "input_image", "image_url": data_url(png(1)), "detail": "high"}]}
    first = post(world, "/responses", {"input": [body]}, claim)
    assert first.headers["x-etude-ignored"] == "detail"
    then = post(world, "/responses", {"input": "and now?", "previous_response_id": first.json()["id"]}, claim)
    assert then.status_code == 200, then.text
    one, two = world.turns(claim.attempt_id)
    assert two.images == one.images and len(one.images) == 1


def test_an_image_of_the_store_is_named_by_its_hash(world: World) -> None:
    (image,) = world.do(world.queue.put_images([png(7, 12, 34)]))
    for address in (f"image:{image.digest}", f"image:{image.digest};9000x9000"):
        claim = world.attempt()
        assert ask(world, claim, shown(address)).status_code == 200
        (span,) = world.turns(claim.attempt_id)[0].images
        assert (span.digest, span.stop - span.start) == (image.digest, encoder().layout.count(12, 34))
    for unknown in (image_digest(b"none"), "../etc"):
        refused = sentence(ask(world, claim, shown(f"image:{unknown}")), 404)
        assert refused.startswith("'messages[0].content[0].image_url.url' names the image ")
        assert refused.endswith("which the store does not have. Send its bytes as a data URL.")


def test_an_attempt_that_fills_the_store_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_images, "MAX_ATTEMPT_IMAGES", 2)
    claim, other = world.attempt(), world.attempt()
    for seed in (31, 32, 31, 32):
        assert ask(world, claim, shown(data_url(png(seed)))).status_code == 200
    refused = sentence(ask(world, claim, shown(data_url(png(33)))))
    assert refused.startswith("This attempt has sent 2 different images of 0 MiB in all, and one may send 2 of 512 MiB")
    assert ask(world, other, shown(data_url(png(33)))).status_code == 200
    monkeypatch.setattr(request_images, "MAX_ATTEMPT_IMAGES", 9)
    monkeypatch.setattr(request_images, "MAX_ATTEMPT_BYTES", 2**10)
    assert "and one may send 9 of 0 MiB" in sentence(ask(world, claim, shown(data_url(png(34, 40, 40)))))


def test_tokens_of_images_are_counted(world: World) -> None:
    claim = world.attempt()
    counted = post(world, "/messages/count_tokens", CALLS["/messages"], claim).json()["input_tokens"]
    post(world, "/messages", CALLS["/messages"], claim)
    assert counted == len(world.turns(claim.attempt_id)[0].prompt)


def test_detail_has_no_effect(world: World) -> None:
    claim = world.attempt()
    response = ask(world, claim, shown(data_url(png(1)), detail="low"))
    assert response.headers["x-etude-ignored"] == "detail"
    assert "x-etude-ignored" not in ask(world, claim, shown(data_url(png(1)), detail="auto")).headers


def damaged() -> bytes:
    return png(1)[:200]


REFUSED: list[tuple[list[dict[str, Any]], str]] = [
    (
        [shown(data_url(png(1))), shown(data_url(damaged()))],
        r"Image 1 of message 1 cannot be read: image file is truncated\. Send a whole PNG, JPEG, WebP or GIF\.",
    ),
    ([shown(data_url(b"<svg/>"))], r"Image 1 of message 0 is an SVG file\. Send a whole PNG"),
    (
        [shown(data_url(large_png(60000, 60000)))],
        r"Image 1 of message 0 has 60000 × 60000 pixels; this run takes 50,000,000\. Make it smaller\.",
    ),
    (
        [shown(data_url(png(1)))] * 4,
        r"The request has 4 images, and `vision\.max_images` is 3\. Send fewer, or raise it\.",
    ),
    ([shown(data_url(png(5, 1000, 4)))], r"An image of 1000 × 4 pixels is too long and thin"),
    (
        [shown("https://example.com/a.png")],
        r"'messages\[0\]\.content\[0\]\.image_url\.url' is an address, and this endpoint fetches none\. Send a data "
        r"URL, or name its host in `agent\.image_hosts`\.",
    ),
    ([shown("file:///etc/passwd")], "is an address, and this endpoint fetches none"),
    ([shown("data:image/png;base64,%%%")], "Image 1 of message 0 is a data URL whose data are not base64"),
    ([shown("data:image/png,abc")], "Image 1 of message 0 is a data URL without base64"),
    (
        [shown(data_url(png(1)), "<|image_pad|>")],
        r"has 2 times `<\|image_pad\|>`, which stands for an image, and 1 image\.",
    ),
    (
        [{"role": "system", "content": shown(data_url(png(1)))["content"]}],
        "is 'image_url'; images are read in messages of the user and in results of tools only",
    ),
    (
        [{"role": "user", "content": [{"type": "image", "source": {}}]}],
        "is 'image'; an image is a part of the type 'image_url', or 'input_image' in Responses",
    ),
    (
        [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "a"}}]}],
        r"is 'video_url'; give a video's frames as images",
    ),
    (
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        "is 'input_audio'; this endpoint reads text and images only",
    ),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "must be the address of an image"),
    ([shown(data_url(png(1)), "word " * 2500)], r"maximum, 15 of them of images; .* Lower `vision\.max_pixels`, or"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refused(world: World, case: int) -> None:
    messages, expected = REFUSED[case]
    claim = world.attempt()
    message = sentence(ask(world, claim, *messages))
    assert re.search(expected, message), message
    assert not world.turns(claim.attempt_id)
    assert any(note["name"] in ("refused", "context_length_exceeded") for note in world.notes(claim.attempt_id))


def test_parts_of_other_dialects_are_refused(world: World) -> None:
    claim = world.attempt()
    cases: list[tuple[str, dict[str, Any], str]] = [
        (
            "/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "'input[0].content[0].file_id' is not stored by this endpoint; send a data URL.",
        ),
        (
            "/responses",
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "is 'input_file'; this endpoint reads text and images only",
        ),
        (
            "/messages",
            {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "is 'document'; this endpoint reads text and images only",
        ),
        (
            "/messages",
            {
                "max_tokens": 5,
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}
                ],
            },
            "is 'file'; it must be base64 or url",
        ),
        (
            "/messages",
            {
                "max_tokens": 5,
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a/b"}}]}
                ],
            },
            "'messages[0].content[0].source.url' is an address, and this endpoint fetches none",
        ),
    ]
    for path, body, expected in cases:
        assert expected in sentence(post(world, path, body, claim))


# -- addresses ---------------------------------------------------------------------------------------------------------


async def body(*parts: bytes) -> AsyncIterator[bytes]:
    """Yield the parts of an answer, as they come from a socket."""
    for part in parts:
        yield part


def fetch(
    address: str,
    *,
    hosts: Sequence[str] = ("images.test", "images.test:8000"),
    found: Sequence[str] = ("93.184.216.34",),
    answer: httpx2.Response | None = None,
    max_bytes: int = 1000,
) -> tuple[bytes, list[httpx2.Request]]:
    requests: list[httpx2.Request] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        assert host == "images.test" and port in (80, 443, 8000)
        return found

    def reply(request: httpx2.Request) -> httpx2.Response:
        requests.append(request)
        return answer or httpx2.Response(200, content=body(b"by", b"tes"))

    fetcher = ImageFetcher(hosts, max_bytes, resolve=resolve, transport=httpx2.MockTransport(reply))
    return asyncio.run(fetcher.fetch(address, "url")), requests


def test_a_named_host_is_fetched_at_the_address_that_was_checked() -> None:
    content, (request,) = fetch("https://images.test/a.png?b=1")
    assert content == b"bytes"
    assert str(request.url) == "https://93.184.216.34/a.png?b=1"
    assert request.headers["host"] == "images.test"
    assert request.extensions["sni_hostname"] == "images.test"
    assert fetch("http://images.test:8000/a.png")[1][0].headers["host"] == "images.test:8000"


@pytest.mark.parametrize(
    "address",
    [
        "https://other.test/a.png",
        "https://images.test:8443/a.png",
        "https://images.test.other.test/a.png",
        "https://user:secret@images.test/a.png",
        "ftp://images.test/a.png",
        "//images.test/a.png",
        "https://[::1]/a.png",
    ],
)
def test_other_hosts_are_not_fetched(address: str) -> None:
    with pytest.raises(APIError, match=r"fetches from images\.test, images\.test:8000 only\. Send a data URL"):
        fetch(address)


@pytest.mark.parametrize(
    "found",
    [
        ["127.0.0.1"],
        ["10.0.0.1"],
        ["169.254.169.254"],
        ["93.184.216.34", "192.168.0.1"],
        ["::1"],
        ["fe80::1"],
        ["fd00::1"],
        ["::ffff:127.0.0.1"],
        ["64:ff9b::7f00:1"],
        ["2002:7f00:1::"],
        ["0.0.0.0"],
        ["100.64.0.1"],
        ["224.0.0.1"],
        ["fe80::1%eth0"],
        [],
    ],
)
def test_machines_that_are_not_public_are_not_reached(found: list[str]) -> None:
    with pytest.raises(APIError, match=r"has the host 'images\.test', which is not a public machine"):
        fetch("https://images.test/a.png", found=found)
    assert is_public("2606:2800:220:1:248:1893:25c8:1946") and not is_public("localhost")


def test_redirects_and_large_answers_are_refused() -> None:
    moved = httpx2.Response(302, headers={"location": "http://169.254.169.254/"})
    with pytest.raises(APIError, match=r"answered with status 302, not 200\. Send a data URL"):
        fetch("https://images.test/a.png", answer=moved)
    with pytest.raises(APIError, match=r"has more than 1,000 bytes\. Send a smaller image"):
        fetch("https://images.test/a.png", answer=httpx2.Response(200, content=body(b"a" * 600, b"a" * 401)))


def test_a_slow_or_broken_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.agents.proxy.image_addresses.FETCH_S", 0.05)

    async def slow(host: str, port: int) -> Sequence[str]:
        await asyncio.sleep(5)
        return [host, str(port)]

    async def broken(host: str, port: int) -> Sequence[str]:
        raise OSError(f"no such host {host}:{port}")

    began = time.monotonic()
    with pytest.raises(APIError, match=r"did not answer within 0\.05 seconds"):
        asyncio.run(ImageFetcher(["images.test"], 9, resolve=slow).fetch("http://images.test/", "url"))
    assert time.monotonic() - began < 3
    with pytest.raises(APIError, match=r"could not be fetched \(OSError\)"):
        asyncio.run(ImageFetcher(["images.test"], 9, resolve=broken).fetch("http://images.test/", "url"))

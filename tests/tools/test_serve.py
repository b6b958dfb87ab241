"""`etude serve`: the dialects of the endpoint over a model, for holders of the key, until it is stopped."""

from __future__ import annotations

import base64
import io
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.learn import games
from tests.serving import ServedModel, serve_command
from tests.vlms import make_vlm, picture


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return games.make_speaker(tmp_path_factory.mktemp("serve") / "model", steps=11)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[ServedModel]:
    with serve_command(model, "sampling.max_tokens=5") as served:
        yield served


@pytest.mark.slow
def test_a_model_is_served_in_every_dialect(served: ServedModel, model: Path) -> None:
    process, url, key = served.process, served.url, served.key
    output = served.output
    assert output.startswith(f"{model} is served at {url}, under the name policy.") and "Nothing is trained." in output
    messages: Any = [{"role": "user", "content": "a"}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        whole = client.chat.completions.create(model="policy", messages=messages, temperature=0)
        pieces = client.chat.completions.create(model="policy", messages=messages, temperature=0, stream=True)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert text == whole.choices[0].message.content, "what a call says of sampling holds"
        assert whole.usage is not None and whole.usage.completion_tokens <= 5
        first = client.responses.create(model="policy", input="a")
        assert client.responses.create(model="policy", input="b", previous_response_id=first.id).output
        assert client.completions.create(model="policy", prompt="a", max_tokens=7).usage.completion_tokens <= 7  # type: ignore[union-attr]
        assert [model.id for model in client.models.list()] == ["policy"]
    with anthropic.Anthropic(base_url=url, api_key=key) as claude:
        assert claude.messages.create(model="policy", max_tokens=3, messages=messages).usage.output_tokens <= 3  # type: ignore[arg-type]
    for header in ({}, {"authorization": "Bearer sk-none"}):
        assert httpx2.get(f"{url}/v1/models", headers=header).status_code == 401
    assert httpx2.post(f"{url}/v1/rollouts/claim", headers={"authorization": f"Bearer {key}"}).status_code in (403, 404)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert process.stdout is not None and process.stdout.read().strip() == "Stopped."


@pytest.mark.slow
def test_a_vision_language_model_is_served_to_clients_that_send_images() -> None:
    model = make_vlm("qwen3_vl")
    file = io.BytesIO()
    picture(0, 40, 24).save(file, "PNG")
    encoded = base64.b64encode(file.getvalue()).decode()
    address = f"data:image/png;base64,{encoded}"
    text = {"type": "text", "text": "How many?"}
    with serve_command(model, "sampling.max_tokens=3") as served:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.key) as client:
            seen: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}, text]}]
            blind: Any = [{"role": "user", "content": "How many?"}]
            with_image = client.chat.completions.create(model="policy", messages=seen).usage
            without = client.chat.completions.create(model="policy", messages=blind).usage
            assert with_image is not None and without is not None
            assert with_image.prompt_tokens == without.prompt_tokens + 15 + 2, "15 squares between two marks"
            items: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": address, "detail": "low"}]}]
            first = client.responses.create(model="policy", input=items)
            again: Any = [{"role": "user", "content": "And now?"}]
            assert client.responses.create(model="policy", input=again, previous_response_id=first.id).output
        with anthropic.Anthropic(base_url=served.url, api_key=served.key) as claude:
            block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}
            asked: Any = [{"role": "user", "content": [block, text]}]
            answer = claude.messages.create(model="policy", max_tokens=3, messages=asked)
            assert answer.usage.input_tokens == with_image.prompt_tokens
            counted = claude.messages.count_tokens(model="policy", messages=asked).input_tokens
            assert counted == with_image.prompt_tokens

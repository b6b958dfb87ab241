"""Images in conversations: their tokens and places, continuation that keeps them, and placeholders that are none."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm import processing_smolvlm

from etude.chat import ChatConfig, ChatRenderer, ImageEncoder, RenderedPrompt, Tokenizer, Transcript
from etude.chat.messages import message_from_dict, message_to_dict
from etude.chat.tokenizer import Ids
from etude.chat.transcript import observation_text
from etude.data.tokenization import tokenize_messages
from etude.errors import ChatError, ConfigError, ImageError
from etude.images import ImageRef, image_digest
from etude.records import Completion, ContentPart, Message
from tests.chat.made import byte_level, save
from tests.vlms import FAMILIES, QWEN, make_vlm, picture

PROCESSORS: dict[str, Any] = {
    "qwen2_vl": Qwen2VLProcessor,
    "qwen2_5_vl": Qwen2_5_VLProcessor,
    "qwen3_vl": Qwen3VLProcessor,
    "smolvlm": processing_smolvlm.SmolVLMProcessor,
    "gemma3": Gemma3Processor,
    "gemma4": Gemma4Processor,
}
CONTENT = "{{ messages[0].content }}"
WORDS = ("How many red squares?", "\nlook ", " count:\n\n", "one two", "é中", "x")


@cache
def chat_of(family: str) -> ChatRenderer:
    directory = make_vlm(family)
    return ChatConfig().build_renderer(Tokenizer.load(directory), directory, tower=True)


def encoder_of(family: str) -> ImageEncoder:
    encoder = chat_of(family).encoder
    assert isinstance(encoder, ImageEncoder)
    return encoder


def image(name: str, width: int = 40, height: int = 24) -> ContentPart:
    return ContentPart("image", image=ImageRef(image_digest(name.encode()), width, height))


def words(text: str) -> ContentPart:
    return ContentPart("text", text=text)


def check_spans(prompt: RenderedPrompt, family: str) -> None:
    """The spans hold exactly the image tokens, and each image's features in order."""
    held = np.zeros(len(prompt.ids), bool)
    following: dict[str, int] = {}
    for span in prompt.images:
        held[span.start : span.stop] = True
        assert span.first == following.get(span.digest, 0)
        following[span.digest] = span.first + span.stop - span.start
    assert np.array_equal(held, prompt.ids == encoder_of(family).image_id)


def their_processor(family: str) -> Any:
    """Transformers' processor without its videos, which would need torchvision and num2words."""
    vars(processing_smolvlm)["num2words"] = str
    directory = make_vlm(family)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    images = AutoImageProcessor.from_pretrained(directory, backend="pil")
    if family == "gemma3":
        return Gemma3Processor(images, tokenizer, image_seq_length=16)
    if family == "gemma4":
        return gemma4_processor(images, tokenizer)
    without_videos = classmethod(lambda cls: ["image_processor", "tokenizer"])
    kind: Any = type("Alone", (PROCESSORS[family],), {"get_attributes": without_videos})
    if family == "smolvlm":
        return kind(images, tokenizer, None, image_seq_len=16)
    return kind(image_processor=images, tokenizer=tokenizer, video_processor=None)


def gemma4_processor(images: Any, tokenizer: Any) -> Any:
    """Transformers' processor of Gemma 4 without videos and sound."""

    class Alone(Gemma4Processor):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer", "feature_extractor", "video_processor"]

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    return Alone(None, images, tokenizer, None)


def conversation_of(draw: random.Random) -> tuple[list[Message], list[tuple[int, int]]]:
    """Return a conversation with images, and their sizes."""
    messages: list[Message] = []
    sizes: list[tuple[int, int]] = []
    for turn in range(draw.randint(1, 3)):
        parts: list[ContentPart] = []
        for _ in range(draw.randint(1, 3)):
            if draw.random() < 0.6:
                sizes.append((draw.randint(3, 150), draw.randint(3, 150)))
                parts.append(image(str(len(sizes)), *sizes[-1]))
            if draw.random() < 0.8 or not parts:
                parts.append(words(draw.choice(WORDS)))
        if turn:
            messages.append(Message("assistant", draw.choice(["three", " two\n", "I see <four>."])))
        messages.append(Message("user", tuple(parts)))
    return messages, sizes


def compare(family: str, conversations: int) -> None:
    chat = chat_of(family)
    theirs = their_processor(family)
    draw = random.Random(0)
    for _ in range(conversations):
        messages, sizes = conversation_of(draw)
        prompt = chat.render(messages)
        pictures: Any = [picture(seed, *size) for seed, size in enumerate(sizes)] or None
        nested = [pictures] if family in ("smolvlm", "gemma3", "gemma4") and pictures else pictures
        settings = {"add_special_tokens": False} if family in ("gemma3", "gemma4") else {}
        text = chat.render_text(messages)
        ids = theirs(text=[text], images=nested, return_tensors="np", **settings)["input_ids"][0]
        assert np.array_equal(prompt.ids, ids), text
        check_spans(prompt, family)


@pytest.mark.parametrize("family", sorted(PROCESSORS))
def test_ids_are_those_of_transformers(family: str) -> None:
    compare(family, 6)


def completion(ids: Ids) -> Completion:
    return Completion(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), "stop")


def play(family: str, turns: int, seed: int) -> None:
    """Play a conversation with images in every message; what was served stays, ids and places."""
    chat = chat_of(family)
    draw = random.Random(seed)
    transcript = Transcript(chat, (Message("user", (image("0", 33, 90), words("How many red squares?"))),))
    served: list[RenderedPrompt] = []
    for turn in range(turns):
        prompt = transcript.prompt
        check_spans(prompt, family) if not turn else None
        for earlier in served:
            assert np.array_equal(prompt.ids[: len(earlier.ids)], earlier.ids)
            assert prompt.images[: len(earlier.images)] == earlier.images
        text = draw.choice(["three", "Look again", "two red"])
        ids = np.concatenate([chat.tokenizer.encode(letter) for letter in text])  # unlike the tokenizer's own
        ids = np.append(ids, np.int32(encoder_of(family).image_id))  # a policy may sample the placeholder
        ids = np.append(ids, np.int32(chat.tokenizer.eos_ids[0]))
        transcript.add_answer(prompt, completion(ids))
        served.append(RenderedPrompt(np.concatenate([prompt.ids, ids]), prompt.images))
        shown = (words("cropped:"), image(f"{turn}a", draw.randint(8, 150), 40), image(f"{turn}b", 9, 70))
        transcript.add_observation((Message("tool" if family in QWEN else "user", shown),))
    last = transcript.prompt
    assert [span.digest for span in last.images if span.first == 0] == [
        image_digest(name.encode()) for name in ["0", *(f"{turn}{half}" for turn in range(turns) for half in "ab")]
    ]
    new = RenderedPrompt(last.ids[len(served[-1].ids) :], ())
    counted = sum(span.stop - span.start for span in last.images if span.start >= len(served[-1].ids))
    assert counted == int((new.ids == encoder_of(family).image_id).sum()) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_continuation_keeps_the_images_that_were_served(family: str) -> None:
    play(family, turns=3, seed=1)


def test_an_equal_conversation_with_another_image_continues_nothing() -> None:
    chat = chat_of("qwen3_vl")
    conversation = chat.start_conversation()

    def asked(name: str) -> list[Message]:
        return [Message("user", (image(name), words("?")))]

    prompt = conversation.render(asked("a"))
    odd = np.concatenate([chat.tokenizer.encode(text) for text in ("o", "n", "e", "<|im_end|>")])
    answer = Message("assistant", "one")
    conversation.remember_answer(asked("a"), (), prompt.ids, odd, answer, images=prompt.images)
    then = [answer, Message("user", "and now?")]
    assert len(odd) != len(chat.tokenizer.encode("one<|im_end|>")), "a new rendering is seen by its length"
    kept = conversation.render([*asked("a"), *then])
    other = conversation.render([*asked("b"), *then])
    assert np.array_equal(kept.ids[: len(prompt.ids) + len(odd)], np.concatenate([prompt.ids, odd]))
    assert len(other.ids) < len(kept.ids)
    assert other.images[0].digest == image_digest(b"b")
    assert chat.render(asked("a")).ids.tolist() == chat.render(asked("b")).ids.tolist()


def test_a_prefill_keeps_the_images_of_its_prompt() -> None:
    chat = chat_of("qwen2_vl")
    conversation = chat.start_conversation()
    messages = [Message("user", (image("a"), words("?")))]
    prompt = conversation.render(messages)
    answer = Message("assistant", "two")
    ids = chat.tokenizer.encode("two<|im_end|>")
    conversation.remember_answer(messages, (), prompt.ids, ids, answer, images=prompt.images)
    found = conversation.find_prefill_ids(messages, (), answer)
    assert found is not None
    assert np.array_equal(found[0].ids, prompt.ids) and found[0].images == prompt.images


@pytest.mark.parametrize("family", FAMILIES)
def test_placeholders_in_texts_are_refused(family: str) -> None:
    chat = chat_of(family)
    layout = encoder_of(family).layout
    two = rf"The conversation has 2 times `{layout.placeholder}`, which stands for an image, and 1 image\. Take"
    with pytest.raises(ChatError, match=two.replace("|", r"\|")):
        chat.render([Message("user", (image("a"), words(f"see {layout.placeholder}")))])
    with pytest.raises(ChatError, match="and 0 images"):
        chat.render([Message("user", layout.placeholder)])
    with pytest.raises(ChatError, match=r"out of the text"):
        chat.render([Message("user", (image("a"), words(f"see {layout.image_token}")))])


def test_a_template_that_drops_an_image_is_refused() -> None:
    directory = make_vlm("qwen3_vl")
    tokenizer = Tokenizer.load(directory)
    chat = ChatRenderer(
        tokenizer,
        template="{% for message in messages %}{{ message.content if message.content is string }}{% endfor %}",
        encoder=encoder_of("qwen3_vl"),
    )
    with pytest.raises(ChatError, match=r"has 0 times `<\|image_pad\|>`, .* and 1 image\. .* give another template"):
        chat.render([Message("user", (image("a"), words("?")))])


def test_other_parts_and_models_are_refused(tmp_path: Any) -> None:
    chat = chat_of("qwen3_vl")
    with pytest.raises(ChatError, match=r"a part of type 'video' that no model here takes\. Give its frames as images"):
        chat.render([Message("user", (ContentPart("video", url="a.mp4"),))])
    with pytest.raises(ChatError, match=r"a part of type 'audio' that no model here takes\. Leave it out"):
        chat.render([Message("user", (ContentPart("audio", url="a.wav"),))])
    with pytest.raises(ChatError, match=r"an image that was not read: 'http://a/b\.png'\. Give its bytes"):
        chat.render([Message("user", (ContentPart("image", url="http://a/b.png"),))])
    with pytest.raises(ImageError, match="too long and thin"):
        chat.render([Message("user", (image("a", 4000, 10),))])
    text = ChatRenderer(Tokenizer.load(save(tmp_path / "t", byte_level(CONTENT), CONTENT, ["<|im_end|>"])))
    for render in (text.render, text.start_conversation().render):
        with pytest.raises(ChatError, match=r"has an image, and this model takes text alone\. Give a vision-language"):
            render([Message("user", (image("a"),))])


def test_an_unknown_family_is_a_model_of_text(tmp_path: Any) -> None:
    save(tmp_path / "t", byte_level(CONTENT), CONTENT, ["<|im_end|>"])
    (tmp_path / "t" / "config.json").write_text('{"model_type": "internvl", "vision_config": {}}')
    chat = ChatConfig().build_renderer(Tokenizer.load(tmp_path / "t"), tmp_path / "t")
    assert len(chat.render([Message("user", "a")]).ids) == 1
    with pytest.raises(ChatError, match="in the way of `internvl`, which Etude does not know"):
        chat.render([Message("user", (image("a"),))])
    with pytest.raises(ConfigError, match="`internvl`"):
        ChatConfig().build_renderer(Tokenizer.load(tmp_path / "t"), tmp_path / "t", 1000)
    with pytest.raises(ConfigError, match=r"has the image token `<\|image_pad\|>`, and the tokenizer in .* does not"):
        ChatConfig().build_renderer(Tokenizer.load(tmp_path / "t"), make_vlm("qwen3_vl"))


def test_a_model_without_its_tower_takes_text_alone() -> None:
    directory = make_vlm("qwen3_5")
    chat = ChatConfig().build_renderer(Tokenizer.load(directory), directory)
    assert len(chat.render([Message("user", "a")]).ids)
    with pytest.raises(ChatError, match=r"an image needs its vision tower. Set `vision.tower=true`"):
        chat.render([Message("user", (image("a"),))])


def test_a_smaller_limit_gives_fewer_tokens() -> None:
    directory = make_vlm("qwen3_vl")
    messages = [Message("user", (image("a", 64, 64),))]
    smaller = ChatConfig().build_renderer(Tokenizer.load(directory), directory, 32 * 32).render(messages)
    assert len(smaller.ids) < len(chat_of("qwen3_vl").render(messages).ids)


def test_an_answer_is_trained_after_the_images_of_its_prompt() -> None:
    chat = chat_of("qwen2_5_vl")
    messages = [Message("user", (image("a"), words("How many?")))]
    prompt = chat.render(messages)
    ids = chat.encode_answer(messages, Message("assistant", "three"), prompt_ids=prompt.ids)
    assert chat.tokenizer.decode(ids, keep_special_tokens=True) == "three<|im_end|>"


def test_messages_for_templates_and_for_endpoints() -> None:
    message = Message("user", (image("a"), words("?")))
    digest = image_digest(b"a")
    assert message_to_dict(message)["content"] == [{"type": "image"}, {"type": "text", "text": "?"}]
    sent = message_to_dict(message, addresses=True)["content"][0]
    assert sent == {"type": "image_url", "image_url": {"url": f"image:{digest};40x24"}}
    assert message_from_dict({"role": "user", "content": [sent]}).content == (image("a"),)
    assert digest in observation_text((message,)), "states with other images are other states"


def test_an_answer_with_an_image_is_no_supervised_data() -> None:
    rows: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": [{"type": "image", "url": f"image:{image_digest(b'a')};40x24"}]},
    ]
    with pytest.raises(ChatError, match=r"An answer of the conversation has an image .*, and a model writes text\."):
        tokenize_messages(chat_of("qwen3_vl"), rows)

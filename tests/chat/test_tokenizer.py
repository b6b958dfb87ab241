from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.chat import DecodeStream, Tokenizer
from etude.errors import ConfigError
from tests.chat.made import CHATML, beginning, byte_level, save, sentencepiece


@pytest.fixture(scope="module")
def qwen_like(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    ends = ["<|im_end|>", "<|endoftext|>"]
    return Tokenizer.load(save(tmp_path_factory.mktemp("qwen"), byte_level(more=ends), CHATML, ends))


@pytest.fixture(scope="module")
def llama2_like(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save(tmp_path_factory.mktemp("llama2"), sentencepiece(), None, ["</s>"], unk_token="<unk>"))


def test_text_goes_to_ids_and_back(qwen_like: Tokenizer) -> None:
    ids = qwen_like.encode("Grüße, 世界 🎉\n\n and more")
    assert ids.dtype == np.int32
    assert qwen_like.decode(ids) == "Grüße, 世界 🎉\n\n and more"
    assert qwen_like.encode("").shape == (0,)


def test_special_tokens_are_read_in_text_and_left_out_of_it(qwen_like: Tokenizer) -> None:
    ids = qwen_like.encode("a<|im_end|>b")
    assert ids.tolist().count(qwen_like.eos_ids[0]) == 1
    assert qwen_like.decode(ids) == "ab"
    assert qwen_like.decode(ids, keep_special_tokens=True) == "a<|im_end|>b"
    assert qwen_like.id_to_token(qwen_like.eos_ids[0]) == "<|im_end|>"
    assert qwen_like.token_to_id("<|im_end|>") == qwen_like.eos_ids[0]
    assert qwen_like.id_to_token(qwen_like.vocab_size) is None


def test_settings_of_the_files_are_read(qwen_like: Tokenizer, llama2_like: Tokenizer) -> None:
    assert [qwen_like.id_to_token(id) for id in qwen_like.eos_ids] == ["<|im_end|>", "<|endoftext|>"]
    assert (qwen_like.pad_id, qwen_like.adds_bos) == (None, False)
    assert qwen_like.template == CHATML
    assert (llama2_like.bos_id, llama2_like.eos_ids) == (1, (2,))
    assert llama2_like.template is None
    assert llama2_like.vocab_size == len({llama2_like.id_to_token(id) for id in range(llama2_like.vocab_size)})


def test_a_beginning_token_is_added_if_the_tokenizer_adds_one(
    tmp_path: Path, qwen_like: Tokenizer, llama2_like: Tokenizer
) -> None:
    assert llama2_like.encode("the", add_special_tokens=True).tolist() == [1, *llama2_like.encode("the")]
    assert np.array_equal(qwen_like.encode("the", add_special_tokens=True), qwen_like.encode("the"))
    llama3_like = Tokenizer.load(save(tmp_path, beginning(byte_level()), None, ["<|im_end|>"]))
    assert llama3_like.encode("the", add_special_tokens=True).tolist() == [
        llama3_like.bos_id,
        *llama3_like.encode("the"),
    ]
    assert llama3_like.bos_id not in llama3_like.encode("the")


def test_truncation_and_padding_asked_for_by_the_file_are_off(tmp_path: Path) -> None:
    inner = byte_level()
    inner.enable_truncation(3)
    inner.enable_padding(length=50)
    tokenizer = Tokenizer.load(save(tmp_path, inner, None, ["<|im_end|>"]))
    text = "What is the weather in Paris?"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a")) == 1


def test_tokens_that_only_the_configuration_adds_are_added(tmp_path: Path) -> None:
    inner = byte_level()
    last = inner.get_vocab_size()
    added = {str(last): {"content": "<|new|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}}
    tokenizer = Tokenizer.load(save(tmp_path, inner, None, ["<|im_end|>"], added_tokens_decoder=added))
    assert tokenizer.encode("<|new|>").tolist() == [last]


def test_older_layouts_are_read(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), None, ["<|im_end|>"], eos_token=None, bos_token=None)
    described = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "bos_token": "<s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(described))
    several = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    config = {"chat_template": several}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "bos_token": "<s>"}
    assert tokenizer.templates == {"default": "D", "tool_use": "T"}
    (tmp_path / "chat_template.jinja").write_text("own")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert Tokenizer.load(tmp_path).templates == {"default": "own", "tool_use": "tools"}


def test_a_missing_directory_or_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"directory .*nowhere does not exist"):
        Tokenizer.load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.model").write_bytes(b"slow")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json \(its files: tokenizer\.model\).*save_pretrained"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer file .* cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("{}", "no end-of-sequence token, so no answer could end. Write `eos_token`"),
        (
            '{"eos_token": "<gone>"}',
            "names '<gone>' as its end-of-sequence token, but its vocabulary has no such token",
        ),
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object; it holds a value of type list"),
    ],
)
def test_an_incomplete_configuration_is_reported(tmp_path: Path, config: str, problem: str) -> None:
    save(tmp_path, byte_level(), None, ["<|im_end|>"])
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ConfigError, match=problem):
        Tokenizer.load(tmp_path)


def test_end_tokens_may_come_from_generation_settings_alone(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), None, ["<|im_end|>"], eos_token=None)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.load(tmp_path).eos_ids == (7,)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), chunk=st.integers(1, 5))
def test_streamed_pieces_join_to_the_whole_text(
    data: st.DataObject, chunk: int, qwen_like: Tokenizer, llama2_like: Tokenizer
) -> None:
    tokenizer = data.draw(st.sampled_from([qwen_like, llama2_like]))
    text = data.draw(st.text(max_size=40))
    special = data.draw(st.booleans())
    ids = [*tokenizer.encode(text, add_special_tokens=True), *tokenizer.eos_ids, *tokenizer.encode(text)]
    stream = tokenizer.decode_stream(special)
    pieces = [stream.push(ids[at : at + chunk]) for at in range(0, len(ids), chunk)]
    assert "".join([*pieces, stream.finish()]) == tokenizer.decode(ids, special)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=60))
def test_any_ids_stream_to_their_text(qwen_like: Tokenizer, ids: list[int]) -> None:
    stream = qwen_like.decode_stream()
    pieces = [stream.push([id]) for id in ids]
    assert "".join([*pieces, stream.finish()]) == qwen_like.decode(ids)


def test_a_character_is_held_back_until_it_is_whole(qwen_like: Tokenizer) -> None:
    first, *others = qwen_like.encode("𝄞").tolist()
    assert others  # it takes several tokens
    stream = qwen_like.decode_stream()
    assert stream.push([first]) == ""
    assert stream.push(others) == "𝄞"
    assert stream.push([first]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(others[:0]) == stream.finish() == ""


def test_bytes_that_form_no_text_are_not_collected() -> None:
    lengths = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return "a" * len(ids)

    stream = DecodeStream(decode, frozenset({7}))
    assert stream.push([7] * 1000 + [1]) + stream.finish() == "a"
    assert max(lengths) < 5


def test_endless_garbage_is_emitted_and_not_collected(qwen_like: Tokenizer) -> None:
    lone = qwen_like.encode("𝄞").tolist()[-1]
    stream = qwen_like.decode_stream()
    pieces = [stream.push([lone]) for _ in range(1000)]
    assert sum(map(len, pieces)) > 900
    assert set("".join(pieces)) == {"\ufffd"}
    assert (
        stream.push(qwen_like.encode(" fine")) + stream.finish() == "\ufffd" * (1000 - sum(map(len, pieces))) + " fine"
    )

"""Preference pairs: two answers to one prompt, of which one is preferred.

Each row has one of four forms:

    Anthropic's HH (arXiv 2204.05862)   `chosen` and `rejected` are dialogues as text: `Human: …`, `Assistant: …`
    UltraFeedback (arXiv 2310.01377)    an `instruction` and its `completions`, each with an `overall_score`
    messages                            `chosen` and `rejected` are conversations, which may begin with the `prompt`
    texts                               a `prompt` and two answers as text
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import pyarrow as pa
from pydantic import Field

from etude.data.prepare.base import MESSAGES_TYPE, DataSplit, Row, options_of, sample_keys
from etude.data.prepare.raw import RawFilePreparation, require_text
from etude.errors import DataError

TextOrMessages: TypeAlias = str | list[dict[str, str]]
TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}
ANSWER_COLUMNS = ("chosen", "rejected")
Pair: TypeAlias = tuple[TextOrMessages, TextOrMessages, TextOrMessages]
"""A prompt, the preferred answer and the other one."""


class PreferencePreparation(RawFilePreparation):
    """Rows of `prompt`, `chosen` and `rejected`, in TRL's columns.

    If more than two answers were scored, the best answer is paired with a random worse one.
    """

    form: Literal["messages", "text"] = Field(
        "messages", description="`messages` for a chat model; `text` keeps raw text unchanged, for a base model"
    )

    title: ClassVar[str] = "preferences"
    published_name: ClassVar[str] = "HuggingFaceH4/ultrafeedback_binarized"
    extra_info_fields: ClassVar[Mapping[str, pa.DataType]] = {f"score_{name}": pa.float64() for name in ANSWER_COLUMNS}

    def columns(self) -> dict[str, pa.DataType]:
        kind = pa.string() if self.form == "text" else MESSAGES_TYPE
        return {"prompt": kind, "chosen": kind, "rejected": kind}

    def command(self, files: Mapping[DataSplit, Path]) -> str:
        return " ".join(["etude dpo model.path=MODEL", *options_of(files)])

    def duplicate_key(self, row: Row) -> str:
        return json.dumps([row["prompt"], row["chosen"], row["rejected"]])

    def convert_row(self, values: Mapping[str, Any], where: str) -> Row | str:
        if "completions" in values:
            pair, scores = self._choose_two(values, where)
        else:
            pair = self._read_pair(values, where)
            scores = [_parse_score(values.get(f"score_{name}")) for name in ANSWER_COLUMNS]
        if isinstance(pair, str):
            return pair
        prompt, chosen, rejected = pair
        if not all(map(_has_content, pair)):
            return "the prompt or an answer is empty"
        if chosen == rejected:
            return "both answers are the same"
        extra_info = {f"score_{name}": score for name, score in zip(ANSWER_COLUMNS, scores, strict=True)}
        columns = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        return {"data_source": self.data_source, **columns, "extra_info": extra_info}

    def _choose_two(self, values: Mapping[str, Any], where: str) -> tuple[Pair | str, Sequence[float | None]]:
        """Pair the best of several scored answers with a random worse one. Return the pair and the two scores."""
        prompt, answers = require_text(values, "instruction", where), values["completions"]
        if not isinstance(answers, list) or not all(isinstance(answer, Mapping) for answer in answers):
            raise DataError(
                f"{where} should have a list of mappings in `completions`, each with its `response` and its "
                f"`overall_score`; it has {answers!r:.80}. Give the published files."
            )
        scores: dict[str, float] = {}
        for answer in answers:
            score = _parse_score(answer.get("overall_score"))
            if score is not None:
                scores.setdefault(require_text(answer, "response", where), score)
        best = max(scores, key=lambda text: scores[text], default="")
        worse = [text for text, score in scores.items() if score < scores[best]]
        if not worse:
            return "no two of its answers have different scores", ()
        (worse_answer,) = sample_keys(worse, 1, f"{self.seed} {prompt}")
        return self._pair_from_texts(prompt, best, worse_answer), (scores[best], scores[worse_answer])

    def _read_pair(self, values: Mapping[str, Any], where: str) -> Pair | str:
        """Read a row with two answers, with or without the prompt in them."""
        chosen, rejected, prompt = (values.get(name) for name in ("chosen", "rejected", "prompt"))
        if isinstance(chosen, list) and isinstance(rejected, list):
            return self._pair_from_messages(prompt, chosen, rejected, where)
        names = ("prompt", *ANSWER_COLUMNS) if "prompt" in values else ANSWER_COLUMNS
        texts: Sequence[str] = [require_text(values, name, where) for name in names]
        if self.form == "text":
            texts = [values[name] for name in names]
        if "prompt" not in values:
            parts = _split_dialogue(texts[0], texts[1], where)
            if isinstance(parts, str):
                return parts
            texts = parts
        prompt, chosen, rejected = texts
        if self.form == "messages" and TURN.match(prompt):
            return _pair_from_dialogue(prompt, chosen, rejected)
        return self._pair_from_texts(prompt, chosen, rejected)

    def _pair_from_texts(self, prompt: str, chosen: str, rejected: str) -> Pair:
        if self.form == "text":
            return prompt, chosen, rejected
        return _message("user", prompt), _message("assistant", chosen), _message("assistant", rejected)

    def _pair_from_messages(self, prompt: Any, chosen: list[Any], rejected: list[Any], where: str) -> Pair | str:
        if self.form == "text":
            raise DataError(f"{where} has messages, which `form=text` cannot keep as text. Leave `form` out.")
        given = prompt if isinstance(prompt, list) else []
        before, first, second = (
            [_check_message(message, where) for message in messages] for messages in (given, chosen, rejected)
        )
        if not before or first[: len(before)] == before:
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
            before = first[:shared]
            first = first[shared:]
            second = second[shared:]
        if not before and isinstance(prompt, str):
            before = _message("user", prompt)
        if any(not answer or answer[0]["role"] != "assistant" for answer in (first, second)):
            return "an answer does not begin with a message of the assistant"
        return before, first, second


def _split_dialogue(chosen: str, rejected: str, where: str) -> tuple[str, str, str] | str:
    """Split two dialogues in text into their common beginning, up to the assistant's last turn, and both last turns."""
    ends = [[match.end() for match in TURN.finditer(text) if match[1] == "Assistant"] for text in (chosen, rejected)]
    if not all(ends):
        raise DataError(
            f"{where} has no `prompt`, and no dialogue in `chosen` and `rejected` to read it from: the prompt ends at "
            f"their last `Assistant:`. Give the published files."
        )
    chosen_start, rejected_start = (match[-1] for match in ends)
    if chosen[:chosen_start] != rejected[:rejected_start]:
        return "its answers have different prompts"
    return chosen[:chosen_start], chosen[chosen_start:], rejected[rejected_start:]


def _pair_from_dialogue(prompt: str, chosen: str, rejected: str) -> Pair | str:
    """Convert a dialogue in text to messages, and pair two answers to it."""
    turns = [(match[1], match.end(), match.start()) for match in TURN.finditer(prompt)]
    ends = [start for _, _, start in turns[1:]] + [len(prompt)]
    texts_by_role = [
        (ROLES[speaker], prompt[begin:end].strip()) for (speaker, begin, _), end in zip(turns, ends, strict=True)
    ]
    if len(texts_by_role) < 2 or texts_by_role.pop() != ("assistant", "") or not all(text for _, text in texts_by_role):
        return "its dialogue does not end at the assistant's turn"
    messages = [{"role": role, "content": text} for role, text in texts_by_role]
    return messages, _message("assistant", chosen.strip()), _message("assistant", rejected.strip())


def _check_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise DataError(
            f"{where} has {message!r:.80} for a message; a message is a mapping with a `role` and its `content`, both "
            f"text. Give the published files."
        )
    return {"role": message["role"], "content": message["content"]}


def _message(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def _has_content(content: TextOrMessages) -> bool:
    """Return True if a text, or every message of a list, is not empty."""
    if isinstance(content, str):
        return bool(content.strip())
    return bool(content) and all(message["content"].strip() for message in content)


def _parse_score(value: Any) -> float | None:
    """Return a score that is a finite number, or None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        score = float(value)
    except OverflowError:  # an integer larger than any float
        return None
    return score if math.isfinite(score) else None

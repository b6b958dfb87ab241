"""A model's chat: messages to the ids it is shown, and the ids it wrote to a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from etude.chat.continuation import Conversation, History
from etude.chat.messages import check_roles, message_of
from etude.chat.reasoning import CLOSE, OPEN
from etude.chat.streaming import Reader, Teller
from etude.chat.template import Template
from etude.chat.tokenizer import Ids, Tokenizer
from etude.chat.tools import FORMS, MARKS, form_of
from etude.chat.written import Text, ended, written
from etude.config import Config
from etude.errors import ChatError, ConfigError
from etude.records import Message, SamplingParams

__all__ = ["Chat", "ChatConfig"]

Tools = Sequence[Mapping[str, Any]]
_TAIL = 8  # ids at the end of a prompt that may open the reasoning


class Chat:
    """The `Renderer` of one model.

    With `history` "served" a conversation keeps what the model wrote, thinking included; with "template" it keeps it
    where the model's template would, and is rendered anew where the template drops earlier thinking.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        history: History = "served",
        *,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """`template` takes the place of the model's own; `variables` are what it is told beside the conversation."""
        self.tokenizer = tokenizer
        self.history: History = history
        self._variables = dict(variables or {})
        sources = {"default": template} if template is not None else tokenizer.templates
        self._templates = {name: Template(source, tokenizer.specials) for name, source in sources.items()}
        default = sources.get("default", "")
        self._reasons = CLOSE in default
        self._calls = form_of(sources.get("tool_use", default))
        marks = frozenset(tokenizer.id(token) for token in (OPEN, CLOSE, *MARKS))
        self._unseen = (tokenizer.special_ids | frozenset(tokenizer.eos_ids)) - marks
        self._marks = marks

    def text(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """The text of a conversation, up to where the assistant is to speak."""
        if not messages:
            raise ChatError("A conversation without messages cannot be rendered; give at least one.")
        check_roles(messages)
        return self._template(tools).text(messages, tools, **self._variables)

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> Ids:
        """The ids of a conversation, up to where the assistant is to speak."""
        return self.tokenizer.encode(self.text(messages, tools))

    def prompt_ids(self, prompt: str | Sequence[Message | Mapping[str, Any]], tools: Tools = ()) -> Ids:
        """The ids of what a task asks: a text as it is, messages (or their JSON form) by the template."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, special=True)
        return self.render([each if isinstance(each, Message) else message_of(each) for each in prompt], tools)

    @property
    def calls(self) -> str | None:
        """The form in which the model calls tools, as its template teaches it; None for one that is not known here."""
        return self._calls

    @property
    def reasons(self) -> bool:
        """Whether its template knows of thinking."""
        return self._reasons

    def parse(
        self, completion: Ids, prompt: Ids | None = None, tools: Tools = (), sampling: SamplingParams | None = None
    ) -> Message:
        """What the model said. A malformed tool call stays text.

        Given the prompt, it is known whether that has opened the reasoning already, and calls made in answer to
        different prompts have different ids. Given the tools, the arguments of a call have the types these declare,
        where the model writes arguments without types. Given how it was sampled, what made it stop is no text.
        """
        return self.reader(prompt, tools, sampling).whole(completion)

    def reader(
        self,
        prompt: Ids | None,
        tools: Tools = (),
        sampling: SamplingParams | None = None,
        *,
        calls: bool = True,
    ) -> Reader:
        """Tells what the model says while it is sampled: in the end, exactly what `parse` says of the whole. Where no
        `calls` are looked for, they are text."""
        teller = Teller(
            FORMS[self._calls] if self._calls is not None and calls else None,
            tools,
            reasons=self._reasons,
            opened=None if prompt is None else self.opens(prompt),
            seed=b"" if prompt is None else np.ascontiguousarray(prompt, np.int32).tobytes(),
        )
        unseen = self._unseen
        if sampling is not None and sampling.stop_ids:
            unseen = unseen | (frozenset(sampling.stop_ids) - self._marks)
        return Reader(teller, self.tokenizer, lambda id: id not in unseen, sampling)

    def completion_ids(
        self, messages: Sequence[Message], answer: Message, tools: Tools = (), *, asked_ids: Ids | None = None
    ) -> Ids:
        """The ids that the model would have to write to give this answer after these messages, the one that ends its
        turn among them. asked_ids: what `render` gives for the messages, where it was called already."""
        text = self._shown(tools)
        asked, said = written(text, messages, answer, self._reasons)
        ends = self.tokenizer.ends
        said, end = ended(said, answer, list(ends))
        if end is None:
            end = self._following([*messages, answer], text, bool(answer.tool_calls))
        last = next(iter(self.tokenizer.eos_ids)) if end is None else ends[end]
        return np.append(self.tokenizer.encode_after(asked, said, known=asked_ids), np.int32(last))

    def shows_reasoning(self) -> bool:
        """Whether an answer's reasoning is among what the model has to write for it."""
        question, answer = Message("user", "?"), Message("assistant", "!", reasoning="etudethought")
        return answer.reasoning in written(self._shown(()), [question], answer, self._reasons)[1]

    def _shown(self, tools: Tools) -> Text:
        """How a conversation is shown, up to where the assistant is to speak or to its end."""
        template = self._template(tools)

        def text(messages: Sequence[Message], generate: bool) -> str:
            check_roles(messages)
            return template.text(messages, tools, generate=generate, **self._variables)

        return text

    def _following(self, messages: Sequence[Message], text: Text, called: bool) -> str | None:
        """The end that a template shows where somebody else speaks next, if it shows it only there."""
        after = Message("tool", "?") if called else Message("user", "?")
        try:
            whole, more = text(messages, False), text([*messages, after], True)
        except ChatError:
            return None
        rest = more[len(whole) :] if more.startswith(whole) else ""
        return next((end for end in self.tokenizer.ends if rest.startswith(end)), None)

    def conversation(self) -> Conversation:
        """A conversation that keeps the very ids it was served with."""
        return Conversation(self.tokenizer, self.text, self.history)

    def opens(self, prompt: Ids) -> bool:
        """Whether a prompt ends where the model is to think."""
        return self.tokenizer.decode(prompt[-_TAIL:], special=True).rstrip().endswith(OPEN)

    def _template(self, tools: Tools) -> Template:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            others = ", ".join(self._templates)
            found = f"no chat template named default (only {others})" if others else "no chat template"
            raise ConfigError(
                f"The tokenizer in {self.tokenizer.directory} has {found}, so messages cannot be rendered: write one "
                "into chat_template.jinja there, set `chat.template`, or give prompts as plain text."
            )
        return self._templates["default"]


class ChatConfig(Config):
    """How conversations are shown to the model."""

    history: History = Field(
        "served",
        description="what the model sees of its earlier answers; served: all it wrote; template: what that keeps",
    )
    template: Path | None = Field(None, description="a jinja file to use in place of the model's own chat template")
    variables: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="what the template is told besides, such as enable_thinking: false"
    )

    def chat(self, tokenizer: Tokenizer) -> Chat:
        """The chat of the model with this tokenizer."""
        if self.template is not None and not self.template.is_file():
            raise ConfigError(f"There is no chat template {self.template}; give the path of a jinja file.")
        source = self.template.read_text(encoding="utf-8") if self.template is not None else None
        return Chat(tokenizer, self.history, template=source, variables=self.variables)

"""A model's chat: messages to the ids it is shown, and the ids it wrote to a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from etude.chat.answer_text import RenderText, render_answer, strip_turn_end
from etude.chat.conversation import Conversation, History
from etude.chat.messages import check_roles, message_from_dict
from etude.chat.reasoning import THINK_CLOSE, THINK_OPEN
from etude.chat.streaming import TextStreamParser, TokenStreamParser
from etude.chat.template import ChatTemplate
from etude.chat.tokenizer import Ids, Tokenizer
from etude.chat.tool_parsers import TOOL_MARKERS, TOOL_PARSERS, detect_tool_format
from etude.config import Config
from etude.errors import ChatError, ConfigError
from etude.records import Message, SamplingParams

__all__ = ["ChatConfig", "ChatRenderer"]

Tools = Sequence[Mapping[str, Any]]
_TAIL = 8  # ids at the end of a prompt that may open the reasoning


class ChatRenderer:
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
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`template` replaces the model's own; `template_kwargs` are its variables beside the conversation."""
        self.tokenizer = tokenizer
        self.history: History = history
        self._template_kwargs = dict(template_kwargs or {})
        sources = {"default": template} if template is not None else tokenizer.templates
        self._templates = {name: ChatTemplate(source, tokenizer.special_tokens) for name, source in sources.items()}
        default = sources.get("default", "")
        self._supports_reasoning = THINK_CLOSE in default
        self._tool_format = detect_tool_format(sources.get("tool_use", default))
        marks = frozenset(tokenizer.token_to_id(token) for token in (THINK_OPEN, THINK_CLOSE, *TOOL_MARKERS))
        self._hidden_ids = (tokenizer.special_ids | frozenset(tokenizer.eos_ids)) - marks
        self._marker_ids = marks

    def render_text(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """The text of a conversation, up to where the assistant is to speak."""
        if not messages:
            raise ChatError("A conversation without messages cannot be rendered; give at least one.")
        check_roles(messages)
        return self._select_template(tools).render(messages, tools, **self._template_kwargs)

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> Ids:
        """The ids of a conversation, up to where the assistant is to speak."""
        return self.tokenizer.encode(self.render_text(messages, tools))

    def prompt_ids(self, prompt: str | Sequence[Message | Mapping[str, Any]], tools: Tools = ()) -> Ids:
        """The ids of what a task asks: a text as it is, messages (or their JSON form) by the template."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        return self.render(
            [message if isinstance(message, Message) else message_from_dict(message) for message in prompt], tools
        )

    @property
    def tool_format(self) -> str | None:
        """The form in which the model calls tools, as its template teaches it; None for one that is not known here."""
        return self._tool_format

    @property
    def supports_reasoning(self) -> bool:
        """Whether its template knows of thinking."""
        return self._supports_reasoning

    def parse(
        self, completion: Ids, prompt: Ids | None = None, tools: Tools = (), sampling: SamplingParams | None = None
    ) -> Message:
        """What the model said. A malformed tool call stays text.

        Given the prompt, it is known whether that has opened the reasoning already, and calls made in answer to
        different prompts have different ids. Given the tools, the arguments of a call have the types these declare,
        where the model writes arguments without types. Given how it was sampled, what made it stop is no text.
        """
        return self.stream_parser(prompt, tools, sampling).parse_all(completion)

    def stream_parser(
        self,
        prompt: Ids | None,
        tools: Tools = (),
        sampling: SamplingParams | None = None,
        *,
        parse_calls: bool = True,
    ) -> TokenStreamParser:
        """Tells what the model says while it is sampled: in the end, exactly what `parse` says of the whole. Where no
        `calls` are looked for, they are text."""
        text_parser = TextStreamParser(
            TOOL_PARSERS[self._tool_format] if self._tool_format is not None and parse_calls else None,
            tools,
            supports_reasoning=self._supports_reasoning,
            reasoning_opened=None if prompt is None else self.opens_reasoning(prompt),
            seed=b"" if prompt is None else np.ascontiguousarray(prompt, np.int32).tobytes(),
        )
        hidden_ids = self._hidden_ids
        if sampling is not None and sampling.stop_ids:
            hidden_ids = hidden_ids | (frozenset(sampling.stop_ids) - self._marker_ids)
        return TokenStreamParser(text_parser, self.tokenizer, lambda id: id not in hidden_ids, sampling)

    def encode_answer(
        self, messages: Sequence[Message], answer: Message, tools: Tools = (), *, prompt_ids: Ids | None = None
    ) -> Ids:
        """The ids that the model would have to write to give this answer after these messages, the one that ends its
        turn among them. prompt_ids: what `render` gives for the messages, where it was called already."""
        render_text = self._bind_template(tools)
        prompt, answer_text = render_answer(render_text, messages, answer, self._supports_reasoning)
        eos_tokens = self.tokenizer.eos_tokens
        answer_text, turn_end = strip_turn_end(answer_text, answer, list(eos_tokens))
        if turn_end is None:
            turn_end = self._find_turn_end([*messages, answer], render_text, bool(answer.tool_calls))
        last_id = next(iter(self.tokenizer.eos_ids)) if turn_end is None else eos_tokens[turn_end]
        return np.append(
            self.tokenizer.encode_after_text(prompt, answer_text, before_ids=prompt_ids), np.int32(last_id)
        )

    def shows_reasoning(self) -> bool:
        """Whether an answer's reasoning is among what the model has to write for it."""
        question, answer = Message("user", "?"), Message("assistant", "!", reasoning="etudethought")
        return (
            answer.reasoning in render_answer(self._bind_template(()), [question], answer, self._supports_reasoning)[1]
        )

    def _bind_template(self, tools: Tools) -> RenderText:
        """How a conversation is shown, up to where the assistant is to speak or to its end."""
        template = self._select_template(tools)

        def render_text(messages: Sequence[Message], add_generation_prompt: bool) -> str:
            check_roles(messages)
            return template.render(
                messages, tools, add_generation_prompt=add_generation_prompt, **self._template_kwargs
            )

        return render_text

    def _find_turn_end(self, messages: Sequence[Message], render_text: RenderText, has_calls: bool) -> str | None:
        """The end that a template shows where somebody else speaks next, if it shows it only there."""
        after = Message("tool", "?") if has_calls else Message("user", "?")
        try:
            rendered, continued = render_text(messages, False), render_text([*messages, after], True)
        except ChatError:
            return None
        suffix = continued[len(rendered) :] if continued.startswith(rendered) else ""
        return next((end for end in self.tokenizer.eos_tokens if suffix.startswith(end)), None)

    def start_conversation(self) -> Conversation:
        """A conversation that keeps the very ids it was served with."""
        return Conversation(self.tokenizer, self.render_text, self.history)

    def opens_reasoning(self, prompt: Ids) -> bool:
        """Whether a prompt ends where the model is to think."""
        return self.tokenizer.decode(prompt[-_TAIL:], keep_special_tokens=True).rstrip().endswith(THINK_OPEN)

    def _select_template(self, tools: Tools) -> ChatTemplate:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            others = ", ".join(self._templates)
            problem = f"no chat template named default (only {others})" if others else "no chat template"
            raise ConfigError(
                f"The tokenizer in {self.tokenizer.directory} has {problem}, so messages cannot be rendered: write one "
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
    template_kwargs: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="what the template is told besides, such as enable_thinking: false"
    )

    def build_renderer(self, tokenizer: Tokenizer) -> ChatRenderer:
        """The chat of the model with this tokenizer."""
        if self.template is not None and not self.template.is_file():
            raise ConfigError(f"There is no chat template {self.template}; give the path of a jinja file.")
        source = self.template.read_text(encoding="utf-8") if self.template is not None else None
        return ChatRenderer(tokenizer, self.history, template=source, template_kwargs=self.template_kwargs)

"""The chat renderer of a model: messages to prompt ids, and sampled ids to a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from etude.chat.answer_text import RenderText, render_answer, strip_turn_end
from etude.chat.conversation import Conversation, History
from etude.chat.images import PromptEncoder, RenderedPrompt, TextEncoder, load_image_encoder
from etude.chat.messages import check_roles, message_from_dict
from etude.chat.reasoning import THINK_CLOSE, THINK_OPEN
from etude.chat.streaming import TextStreamParser, TokenStreamParser
from etude.chat.template import PASSED_VARIABLES, ChatTemplate
from etude.chat.tokenizer import Ids, Tokenizer
from etude.chat.tool_parsers import TOOL_MARKERS, TOOL_PARSERS, detect_tool_format
from etude.config import Config
from etude.errors import ChatError, ConfigError
from etude.records import Message, SamplingParams

Tools = Sequence[Mapping[str, Any]]
_TAIL = 8  # ids at the end of a prompt that may open the reasoning


class ChatRenderer:
    """The chat template of one model, and the parser that inverts it.

    With `history` "served" a conversation keeps all that the model wrote, including its reasoning. With "template" it
    keeps what the model's template keeps, and is rendered again where the template drops earlier reasoning.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        history: History = "served",
        *,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        encoder: PromptEncoder | None = None,
    ) -> None:
        """`template` replaces the model's own; `template_kwargs` are additional variables of the template. encoder:
        for a model that takes images."""
        self.tokenizer = tokenizer
        self.encoder = encoder or TextEncoder(tokenizer)
        self.history: History = history
        self._template_kwargs = dict(template_kwargs or {})
        sources = {"default": template} if template is not None else tokenizer.templates
        self._templates = {name: ChatTemplate(source, tokenizer.special_tokens) for name, source in sources.items()}
        default = sources.get("default", "")
        self._supports_reasoning = THINK_CLOSE in default
        self.tool_format = detect_tool_format(sources.get("tool_use", default))
        """The format of the model's tool calls, according to its template; None if it is unknown."""
        marks = frozenset(tokenizer.token_to_id(token) for token in (THINK_OPEN, THINK_CLOSE, *TOOL_MARKERS))
        self._hidden_ids = (tokenizer.special_ids | frozenset(tokenizer.eos_ids)) - marks
        self._marker_ids = marks

    @property
    def has_template(self) -> bool:
        """True if the model has a chat template."""
        return bool(self._templates)

    @property
    def template_variables(self) -> frozenset[str]:
        """The variables that the model's chat templates read."""
        return frozenset().union(*(template.variables for template in self._templates.values()))

    def render_text(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """Return the text of a conversation up to the start of the assistant's answer."""
        if not messages:
            raise ChatError("A conversation without messages cannot be rendered. Give at least one message.")
        check_roles(messages)
        return self._select_template(tools).render(messages, tools, **self._template_kwargs)

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> RenderedPrompt:
        """Return the ids of a conversation up to the start of the assistant's answer, and its images."""
        images = self.encoder.find(messages)
        return self.encoder.encode(self.render_text(messages, tools), images)

    def render_prompt(self, prompt: str | Sequence[Message | Mapping[str, Any]], tools: Tools = ()) -> RenderedPrompt:
        """Return the ids of a task's prompt: a text as it is; messages (or their JSON form) by the template."""
        if isinstance(prompt, str):
            return RenderedPrompt(self.tokenizer.encode(prompt, add_special_tokens=True))
        return self.render(
            [message if isinstance(message, Message) else message_from_dict(message) for message in prompt], tools
        )

    def prompt_ids(self, prompt: str | Sequence[Message | Mapping[str, Any]], tools: Tools = ()) -> Ids:
        """Return the ids of a task's prompt alone, for callers that count them or whose prompts have no images."""
        return self.render_prompt(prompt, tools).ids

    def parse(
        self, completion: Ids, prompt: Ids | None = None, tools: Tools = (), sampling: SamplingParams | None = None
    ) -> Message:
        """Return the message that the model wrote. A malformed tool call stays text.

        With the prompt, the parser knows if the reasoning is open already, and calls in answer to different prompts get
        different ids. With the tools, arguments get their declared types, if the model writes arguments without types.
        With the sampling parameters, a stop string or stop token is not part of the text.
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
        """Return a parser of an answer while it is sampled; in the end its message equals that of `parse`. If
        `parse_calls` is False, tool calls stay text."""
        text_parser = TextStreamParser(
            TOOL_PARSERS[self.tool_format] if self.tool_format is not None and parse_calls else None,
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
        """Return the ids that the model has to write to give this answer after these messages, including its end token.
        prompt_ids: the result of `render` for the messages, if it is known."""
        render_text = self._bind_template(tools)
        prompt, answer_text = render_answer(render_text, messages, answer, self._supports_reasoning)
        prompt = self.encoder.expand(prompt, self.encoder.find(messages))
        eos_tokens = self.tokenizer.eos_tokens
        answer_text, turn_end = strip_turn_end(answer_text, answer, list(eos_tokens))
        if turn_end is None:
            turn_end = self._find_turn_end([*messages, answer], render_text, bool(answer.tool_calls))
        last_id = next(iter(self.tokenizer.eos_ids)) if turn_end is None else eos_tokens[turn_end]
        return np.append(
            self.tokenizer.encode_after_text(prompt, answer_text, before_ids=prompt_ids), np.int32(last_id)
        )

    def shows_reasoning(self) -> bool:
        """Return whether the model has to write an answer's reasoning."""
        question, answer = Message("user", "?"), Message("assistant", "!", reasoning="etudethought")
        return (
            answer.reasoning in render_answer(self._bind_template(()), [question], answer, self._supports_reasoning)[1]
        )

    def _bind_template(self, tools: Tools) -> RenderText:
        """Return a function that renders a conversation, to its end or up to the start of the assistant's answer."""
        template = self._select_template(tools)

        def render_text(messages: Sequence[Message], add_generation_prompt: bool) -> str:
            check_roles(messages)
            return template.render(
                messages, tools, add_generation_prompt=add_generation_prompt, **self._template_kwargs
            )

        return render_text

    def _find_turn_end(self, messages: Sequence[Message], render_text: RenderText, has_calls: bool) -> str | None:
        """Return the end token that a template only shows before the next message of another role; None if there is
        none."""
        after = Message("tool", "?") if has_calls else Message("user", "?")
        try:
            rendered, continued = render_text(messages, False), render_text([*messages, after], True)
        except ChatError:
            return None
        suffix = continued[len(rendered) :] if continued.startswith(rendered) else ""
        return next((end for end in self.tokenizer.eos_tokens if suffix.startswith(end)), None)

    def start_conversation(self) -> Conversation:
        """Return a conversation that keeps the exact ids of its answers."""
        return Conversation(self.tokenizer, self.render_text, self.history, self.encoder)

    def opens_reasoning(self, prompt: Ids) -> bool:
        """Return whether a prompt ends with the opening of the reasoning."""
        return self.tokenizer.decode(prompt[-_TAIL:], keep_special_tokens=True).rstrip().endswith(THINK_OPEN)

    def may_open_reasoning(self, prompt: Ids) -> bool:
        """Return whether an answer to a prompt may begin with the opening of the reasoning."""
        tail = self.tokenizer.decode(prompt[-_TAIL:], keep_special_tokens=True).rstrip()
        return self._supports_reasoning and not tail.endswith((THINK_OPEN, THINK_CLOSE))

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
    """The way that conversations are rendered for the model."""

    history: History = Field(
        "served",
        description="earlier answers that the model sees; served: all of them; template: what the template keeps",
    )
    template: Path | None = Field(None, description="a jinja file to use in place of the model's own chat template")
    template_kwargs: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="more variables of the template, such as enable_thinking: false"
    )

    def build_renderer(
        self, tokenizer: Tokenizer, model: Path | None = None, max_pixels: int | None = None, *, tower: bool = False
    ) -> ChatRenderer:
        """Return the renderer of the model with this tokenizer.

        model: the model's directory, which says how it takes images; without it, it takes text alone. max_pixels,
        tower: as for `read_image_layout`.
        """
        if self.template is not None and not self.template.is_file():
            raise ConfigError(
                f"The chat template {self.template} does not exist. Set `chat.template` to the path of a jinja file."
            )
        source = self.template.read_text(encoding="utf-8") if self.template is not None else None
        encoder = None if model is None else load_image_encoder(model, tokenizer, max_pixels, tower=tower)
        renderer = ChatRenderer(
            tokenizer, self.history, template=source, template_kwargs=self.template_kwargs, encoder=encoder
        )
        unread = sorted(self.template_kwargs.keys() - renderer.template_variables)
        if unread and not renderer.has_template:
            raise ConfigError(
                f"`chat.template_kwargs.{unread[0]}` sets a variable of the chat template, and the tokenizer in "
                f"{tokenizer.directory} has no chat template. Write one into chat_template.jinja there, or set "
                "`chat.template`; without messages leave the variable out."
            )
        if unread:
            others = sorted(renderer.template_variables - PASSED_VARIABLES - tokenizer.special_tokens.keys())
            raise ConfigError(
                f"`chat.template_kwargs.{unread[0]}` sets a variable that the chat template does not read. It reads "
                f"{', '.join(others) or 'no variable but those of a conversation'}. Correct the name, or leave it out."
            )
        return renderer

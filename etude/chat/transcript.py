"""A rollout of several turns as ids: the observations that the model got, and the answers that it wrote.

Nothing is tokenized twice. The model's answers keep the ids that it sampled. An observation is rendered by itself: by
the chat template in a conversation (see `conversation`), unchanged in a plain text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from etude.chat.images import RenderedPrompt
from etude.chat.messages import is_part, message_from_dict, part_address, read_parts
from etude.chat.renderer import ChatRenderer
from etude.chat.tokenizer import Ids
from etude.errors import ChatError
from etude.records import Completion, Message

ObservationContent: TypeAlias = "str | tuple[Message, ...]"


def check_observation(content: Any) -> ObservationContent:
    """Return an observation as text or messages; messages may come in their JSON form.

    Texts and images alone are one message of the user. Images of programs become data URLs.
    """
    if isinstance(content, str):
        observation: ObservationContent = content
    elif _shows_images(content):
        observation = (Message("user", read_parts(content)),)
    elif isinstance(content, Sequence) and all(isinstance(message, Message | Mapping) for message in content):
        observation = tuple(
            _read_message(message) if isinstance(message, Message) else message_from_dict(message)
            for message in content
        )
    else:
        raise ChatError(
            "An observation is text, a list of messages, or a list of texts and images; "
            f"{_describe_wrong(content)} was given."
        )
    try:
        observation_text(observation).encode()
    except UnicodeEncodeError as error:
        raise ChatError(f"An observation has an unpaired surrogate ({error.reason}). Remove it.") from None
    return observation


def _shows_images(content: Any) -> bool:
    """Return True for a list of images, or of images and texts."""
    return isinstance(content, Sequence) and all(map(is_part, content)) and not all(isinstance(p, str) for p in content)


def _describe_wrong(content: Any) -> str:
    """Return a phrase for a value that is no observation; of a list, about its first wrong entry."""
    if isinstance(content, Mapping | bytes) or not isinstance(content, Sequence):
        return f"a value of type {type(content).__name__}"
    if all(isinstance(part, str) for part in content):
        return "a list of texts alone"
    for place, entry in enumerate(content):
        if not isinstance(entry, Message | Mapping) and not is_part(entry):
            return f"a list whose entry {place} is of type {type(entry).__name__}"
    return "a list of messages and of texts or images beside them"


def _read_message(message: Message) -> Message:
    return message if isinstance(message.content, str) else replace(message, content=read_parts(message.content))


def observation_text(content: ObservationContent) -> str:
    """Return all text of an observation, without the ids of calls."""
    if isinstance(content, str):
        return content
    return "\n".join(f"{message.role}: {message.reasoning}{_message_text(message)}" for message in content)


def _message_text(message: Message) -> str:
    """Return the content and the calls of a message."""
    content = message.content
    text = (
        content
        if isinstance(content, str)
        else "".join(f"{part.kind} {part.text}{part_address(part)}" for part in content)
    )
    return text + "".join(f"\n{call.name} {call.arguments}" for call in message.tool_calls)


class Transcript:
    """One rollout in progress. Used by one coroutine."""

    def __init__(
        self, chat: ChatRenderer, content: ObservationContent, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """content: the first observation; if it is text, the rollout is a text throughout. tools: the tools that the
        model may call."""
        self._chat = chat
        self._tools = tuple(tools)
        self._conversation = None if isinstance(content, str) else chat.start_conversation()
        self._messages: list[Message] = [] if isinstance(content, str) else list(content)
        self._ids: Ids = np.zeros(0, np.int32)  # of a text
        if not isinstance(content, str):
            return
        if tools:
            raise ChatError(
                "A rollout that begins with text has tools, but only a chat template can show them to the model. Begin "
                "it with messages."
            )
        self._ids = chat.render_prompt(content).ids

    @property
    def prompt(self) -> RenderedPrompt:
        """The next prompt."""
        if self._conversation is None:
            return RenderedPrompt(self._ids)
        return self._conversation.render(self._messages, self._tools)

    def count_observed_tokens(self, prompt: RenderedPrompt) -> int | None:
        """Return the number of ids at the end of `prompt` after the last answer; None if the ids show it."""
        if self._conversation is None:
            return None
        return self._conversation.count_observed_tokens(self._messages, self._tools, prompt.ids)

    def add_answer(self, prompt: RenderedPrompt, completion: Completion) -> Message:
        """Add the model's answer to `prompt`, and return its message."""
        if self._conversation is None:
            self._ids = np.concatenate([prompt.ids, completion.ids])
            return Message("assistant", completion.text)
        answer = self._chat.parse(completion.ids, prompt.ids, self._tools)
        self._conversation.remember_answer(
            self._messages, self._tools, prompt.ids, completion.ids, answer, images=prompt.images
        )
        self._messages.append(answer)
        return answer

    def add_observation(self, content: ObservationContent) -> None:
        """Add the next observation."""
        if self._conversation is not None:
            self._messages += [Message("user", content)] if isinstance(content, str) else content
        elif isinstance(content, str):
            self._ids = np.concatenate([self._ids, self._chat.tokenizer.encode_after_ids(self._ids, content)])
        else:
            raise ChatError(
                "A rollout that began with text got messages as an observation. Return text, or begin the rollout with "
                "messages."
            )

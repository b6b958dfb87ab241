"""What one rollout of several turns has shown its model and heard from it, as ids: a conversation, or plain text.

Nothing is tokenised twice. Whatever the model wrote stays the ids that it wrote, and what it is shown next is rendered
alone: by the chat template where it is a conversation (`conversation`), as it stands where it is text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from etude.chat.messages import message_from_dict
from etude.chat.renderer import ChatRenderer
from etude.chat.tokenizer import Ids, Tokenizer
from etude.errors import ChatError
from etude.records import Completion, Message, Turn

__all__ = ["ObservationContent", "Transcript", "check_observation", "decode_conversation", "observation_text"]

ObservationContent: TypeAlias = "str | tuple[Message, ...]"


def check_observation(content: Any) -> ObservationContent:
    """What is to be shown, as text or messages; messages may be given in their JSON form."""
    if isinstance(content, str):
        observation: ObservationContent = content
    elif isinstance(content, Sequence) and all(isinstance(message, Message | Mapping) for message in content):
        observation = tuple(
            message if isinstance(message, Message) else message_from_dict(message) for message in content
        )
    else:
        raise ChatError(
            f"What is shown is text or a list of messages; a value of type {type(content).__name__} was given."
        )
    try:
        observation_text(observation).encode()
    except UnicodeEncodeError as error:
        raise ChatError(f"What is shown has half a character in it ({error.reason}). Leave it out.") from None
    return observation


def observation_text(content: ObservationContent) -> str:
    """All text of what is shown, without the names that calls were given."""
    if isinstance(content, str):
        return content
    return "\n".join(f"{message.role}: {message.reasoning}{_message_text(message)}" for message in content)


def _message_text(message: Message) -> str:
    """Its content and its calls."""
    content = message.content
    text = content if isinstance(content, str) else "".join(f"{part.kind} {part.text}{part.url}" for part in content)
    return text + "".join(f"\n{call.name} {call.arguments}" for call in message.tool_calls)


def decode_conversation(tokenizer: Tokenizer, turns: Sequence[Turn]) -> list[dict[str, str]]:
    """What was said after the first prompt, in its order: by the model as it wrote it, by others as it was shown."""
    entries: list[dict[str, str]] = []
    history = turns[0].prompt if turns else np.zeros(0, np.int32)
    for turn in turns:
        is_continued = np.array_equal(turn.prompt[: len(history)], history)
        observed = tokenizer.decode(turn.prompt[len(history) if is_continued else 0 :])
        if turn.index:
            entries.append({"by": "environment", "text": observed})
        entries.append({"by": "model", "text": turn.completion.text})
        history = np.concatenate([turn.prompt, turn.completion.ids])
    return entries


class Transcript:
    """One rollout, as it goes on. Used by one coroutine."""

    def __init__(
        self, chat: ChatRenderer, content: ObservationContent, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """shown: what it begins with; text makes it text throughout. tools: what the model may call."""
        self._chat, self._tools = chat, tuple(tools)
        self._conversation = None if isinstance(content, str) else chat.start_conversation()
        self._messages: list[Message] = [] if isinstance(content, str) else list(content)
        self._ids = np.zeros(0, np.int32)
        if not isinstance(content, str):
            return
        if tools:
            raise ChatError(
                "Tools were offered in a rollout that begins with text, where no chat template tells the model of "
                "them. Begin it with messages."
            )
        self._ids = chat.prompt_ids(content)

    @property
    def ids(self) -> Ids:
        """What the model is to go on from."""
        if self._conversation is None:
            return self._ids
        return self._conversation.render(self._messages, self._tools)

    def count_observed_tokens(self, prompt: Ids) -> int | None:
        """How many ids at the end of `prompt` were shown after the last answer; None where the ids tell it."""
        if self._conversation is None:
            return None
        return self._conversation.count_observed_tokens(self._messages, self._tools, prompt)

    def add_answer(self, prompt: Ids, completion: Completion) -> Message:
        """Take down what the model wrote after `prompt`, and say what that is."""
        if self._conversation is None:
            self._ids = np.concatenate([prompt, completion.ids])
            return Message("assistant", completion.text)
        answer = self._chat.parse(completion.ids, prompt, self._tools)
        self._conversation.remember_answer(self._messages, self._tools, prompt, completion.ids, answer)
        self._messages.append(answer)
        return answer

    def add_observation(self, content: ObservationContent) -> None:
        """Take down what the model is shown next."""
        if self._conversation is not None:
            self._messages += [Message("user", content)] if isinstance(content, str) else content
        elif isinstance(content, str):
            self._ids = np.concatenate([self._ids, self._chat.tokenizer.encode_after_ids(self._ids, content)])
        else:
            raise ChatError(
                "Messages were shown in a rollout that began with text, which has no place for them. Show text, or "
                "begin with messages."
            )

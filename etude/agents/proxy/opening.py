"""The beginning of an answer that is written for the model: a call that it has to make, or words that the agent gives.

The beginning is context, like the rest of the prompt: the policy did not choose it, and it trains nothing.
"""

from __future__ import annotations

import json

import numpy as np

from etude.agents.proxy.asked import Asked, Refusal
from etude.chat import Chat
from etude.chat.messages import text_of
from etude.chat.reasoning import CLOSE, OPEN
from etude.chat.tokenizer import Ids
from etude.records import Message

__all__ = ["NOTHING", "opening"]

BEGINNINGS = {
    "hermes": ('<tool_call>\n{"name": "', ', "arguments": '),
    "qwen_xml": ("<tool_call>\n<function=", ">\n"),
    "llama3": ('{"name": "', ', "parameters": '),
    "pythonic": ("[", "("),
    "lfm2": ("<|tool_call_start|>[", "("),
}
"""By the form of calls: what stands before a tool's name, and what after it."""
NOTHING = np.zeros(0, np.int32)


def opening(chat: Chat, prompt: Ids, asked: Asked) -> Ids:
    """The ids that an answer has to begin with: those of the beginning that was given, or of a call that it has to
    make, or none. Thinking that the prompt has opened is closed before; none is written where it has not."""
    if asked.begun is not None:
        if asked.choice == "required":
            why = "An answer that has begun cannot be made to call a tool: 'tool_choice' can be 'auto' or 'none'."
            raise Refusal(why, param="tool_choice")
        return chat.tokenizer.after(prompt, _begun(chat, prompt, asked.begun))
    if asked.choice != "required":
        return NOTHING
    known = BEGINNINGS.get(chat.calls or "")
    if known is None:
        raise Refusal(
            "This model's form of tool calls is not one that it can be made to begin with: 'tool_choice' can be 'auto' "
            "or 'none'.",
            param="tool_choice",
        )
    before, after = known
    name = json.dumps(asked.named)[1:-1] + ('"' if before.endswith('"') else "") + after if asked.named else ""
    closed = f"\n{CLOSE}\n\n" if chat.opens(prompt) else ""
    return chat.tokenizer.after(prompt, closed + before + name)


def _begun(chat: Chat, prompt: Ids, begun: Message) -> str:
    """The text of an answer that has begun, its thinking included. Without content it is still thinking."""
    content, opened = text_of(begun.content) or "", chat.opens(prompt)
    if not begun.reasoning:
        return f"\n{CLOSE}\n\n{content}" if opened and content else content
    thought = ("\n" if opened else f"{OPEN}\n") + begun.reasoning
    return f"{thought}\n{CLOSE}\n\n{content}" if content else thought

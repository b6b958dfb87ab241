"""How a model is made to call a tool: the beginning of the call is written for it, and it goes on from there.

The beginning is context, like the rest of the prompt: the policy did not choose it, and it trains nothing.
"""

from __future__ import annotations

import json

import numpy as np

from etude.agents.proxy.asked import Asked, Refusal
from etude.chat import Chat
from etude.chat.reasoning import CLOSE, OPEN
from etude.chat.tokenizer import Ids

__all__ = ["opening"]

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
    """What an answer has to begin with: nothing, unless it has to call a tool."""
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
    text = before + name
    if chat.reasons:
        text = f"\n{CLOSE}\n\n{text}" if chat.opens(prompt) else f"{OPEN}\n\n{CLOSE}\n\n{text}"
    return chat.tokenizer.after(prompt, text)

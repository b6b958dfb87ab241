"""The beginning of an answer that is written for the model: a call that it has to make, or words that the agent gives.

The beginning is context, like the rest of the prompt: the policy did not choose it, and it trains nothing.
"""

from __future__ import annotations

import json

import numpy as np

from etude.agents.proxy.request import APIError, ModelRequest
from etude.chat import ChatRenderer
from etude.chat.messages import content_text
from etude.chat.reasoning import THINK_CLOSE, THINK_OPEN
from etude.chat.tokenizer import Ids
from etude.records import Message

__all__ = ["NO_IDS", "build_prefill"]

CALL_AFFIXES = {
    "hermes": ('<tool_call>\n{"name": "', ', "arguments": '),
    "qwen_xml": ("<tool_call>\n<function=", ">\n"),
    "llama3": ('{"name": "', ', "parameters": '),
    "pythonic": ("[", "("),
    "lfm2": ("<|tool_call_start|>[", "("),
}
"""By the form of calls: what stands before a tool's name, and what after it."""
NO_IDS = np.zeros(0, np.int32)


def build_prefill(chat: ChatRenderer, prompt: Ids, request: ModelRequest) -> Ids:
    """The ids that an answer has to begin with: those of the beginning that was given, or of a call that it has to
    make, or none. Thinking that the prompt has opened is closed before; none is written where it has not."""
    if request.prefill is not None:
        if request.tool_choice == "required":
            message = "An answer that has begun cannot be made to call a tool: 'tool_choice' can be 'auto' or 'none'."
            raise APIError(message, param="tool_choice")
        return chat.tokenizer.encode_after_ids(prompt, _prefill_text(chat, prompt, request.prefill))
    if request.tool_choice != "required":
        return NO_IDS
    affixes = CALL_AFFIXES.get(chat.tool_format or "")
    if affixes is None:
        raise APIError(
            "This model's form of tool calls is not one that it can be made to begin with: 'tool_choice' can be 'auto' "
            "or 'none'.",
            param="tool_choice",
        )
    before, after = affixes
    name = (
        json.dumps(request.tool_name)[1:-1] + ('"' if before.endswith('"') else "") + after if request.tool_name else ""
    )
    closed = f"\n{THINK_CLOSE}\n\n" if chat.opens_reasoning(prompt) else ""
    return chat.tokenizer.encode_after_ids(prompt, closed + before + name)


def _prefill_text(chat: ChatRenderer, prompt: Ids, prefill: Message) -> str:
    """The text of an answer that has begun, its thinking included. Without content it is still thinking."""
    content, opens_reasoning = content_text(prefill.content) or "", chat.opens_reasoning(prompt)
    if not prefill.reasoning:
        return f"\n{THINK_CLOSE}\n\n{content}" if opens_reasoning and content else content
    reasoning = ("\n" if opens_reasoning else f"{THINK_OPEN}\n") + prefill.reasoning
    return f"{reasoning}\n{THINK_CLOSE}\n\n{content}" if content else reasoning

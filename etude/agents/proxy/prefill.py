"""The prefill: the beginning of an answer that is written for the model, either a required tool call or text by the
agent.

It is context, like the rest of the prompt: the policy did not choose it, and it trains nothing.
"""

from __future__ import annotations

import json

import numpy as np

from etude.agents.proxy.request import APIError, ModelRequest
from etude.chat import ChatRenderer
from etude.chat.messages import content_text
from etude.chat.reasoning import THINK_CLOSE, THINK_OPEN
from etude.chat.tokenizer import Ids
from etude.chat.tool_parsers import CALL_AFFIXES
from etude.records import Message

NO_IDS = np.zeros(0, np.int32)


def build_prefill(chat: ChatRenderer, prompt: Ids, request: ModelRequest) -> Ids:
    """Return the ids that the answer has to begin with: those of the agent's prefill, or of a required tool call, or
    none. If the prompt opens the reasoning, a required call closes it first."""
    if request.prefill is not None:
        if request.tool_choice == "required":
            message = "'tool_choice' cannot require a call if the request begins the answer. Use 'auto' or 'none'."
            raise APIError(message, param="tool_choice")
        return chat.tokenizer.encode_after_ids(prompt, _prefill_text(chat, prompt, request.prefill))
    if request.tool_choice != "required":
        return NO_IDS
    affixes = CALL_AFFIXES.get(chat.tool_format or "")
    if affixes is None:
        raise APIError(
            "'tool_choice' cannot require a call: this endpoint cannot begin one in this model's tool format. Use "
            "'auto' or 'none'.",
            param="tool_choice",
        )
    before, after = affixes
    name = (
        json.dumps(request.tool_name)[1:-1] + ('"' if before.endswith('"') else "") + after if request.tool_name else ""
    )
    closed = f"\n{THINK_CLOSE}\n\n" if chat.opens_reasoning(prompt) else ""
    return chat.tokenizer.encode_after_ids(prompt, closed + before + name)


def _prefill_text(chat: ChatRenderer, prompt: Ids, prefill: Message) -> str:
    """Return the text of the agent's prefill, with its reasoning. A prefill without content ends within the
    reasoning."""
    content, opens_reasoning = content_text(prefill.content) or "", chat.opens_reasoning(prompt)
    if not prefill.reasoning:
        return f"\n{THINK_CLOSE}\n\n{content}" if opens_reasoning and content else content
    reasoning = ("\n" if opens_reasoning else f"{THINK_OPEN}\n") + prefill.reasoning
    return f"{reasoning}\n{THINK_CLOSE}\n\n{content}" if content else reasoning

"""How conversations become token ids and token ids become messages, exactly as the model's authors meant.

tokenizer       text and ids, from a Hugging Face directory, with incremental decoding
template        a chat template, rendered as transformers renders it
messages        messages in and out of their JSON form, and when two of them are the same
reasoning       the thinking before an answer, told apart from it
tools           the calls a model wrote, read back
values          the values in them, in JSON and in Python
feed            how all of these are read while they are written
streaming       what a model says, told piece by piece
stops           words at which it stops
remembered      the answers of a conversation, found by what came before them
continuation    a conversation that goes on keeps the very ids it was served with
chat            all of these as one: the `Renderer`
transcript      a rollout of several turns as ids, be it a conversation or text
functions       Python functions as tools: their schemas, and what a call gives them
calls           calls of such functions, beside the event loop and bounded
"""

from __future__ import annotations

from etude.chat.conversation import Conversation
from etude.chat.messages import message_from_dict
from etude.chat.renderer import ChatConfig, ChatRenderer
from etude.chat.streaming import ContentDelta, MessageDelta, ReasoningDelta, TokenStreamParser, ToolCallDelta
from etude.chat.template import ChatTemplate
from etude.chat.tokenizer import DecodeStream, Tokenizer
from etude.chat.toolbox import CallThread, Toolbox
from etude.chat.transcript import Transcript, decode_conversation

__all__ = [
    "CallThread",
    "ChatConfig",
    "ChatRenderer",
    "ChatTemplate",
    "ContentDelta",
    "Conversation",
    "DecodeStream",
    "MessageDelta",
    "ReasoningDelta",
    "TokenStreamParser",
    "Tokenizer",
    "ToolCallDelta",
    "Toolbox",
    "Transcript",
    "decode_conversation",
    "message_from_dict",
]

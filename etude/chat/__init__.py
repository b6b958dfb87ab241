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

from etude.chat.calls import Aside, Toolbox
from etude.chat.chat import Chat, ChatConfig
from etude.chat.continuation import Conversation
from etude.chat.messages import message_of
from etude.chat.streaming import Called, Content, Piece, Reader, Reasoning
from etude.chat.template import Template
from etude.chat.tokenizer import Stream, Tokenizer
from etude.chat.transcript import Transcript, retold

__all__ = [
    "Aside",
    "Called",
    "Chat",
    "ChatConfig",
    "Content",
    "Conversation",
    "Piece",
    "Reader",
    "Reasoning",
    "Stream",
    "Template",
    "Tokenizer",
    "Toolbox",
    "Transcript",
    "message_of",
    "retold",
]

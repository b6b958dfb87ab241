"""Chat: renders conversations to token ids and parses token ids to messages, exactly as the model's authors intended.

tokenizer        text to ids and back, from a Hugging Face directory, with incremental decoding
template         a chat template, rendered as transformers renders it
images           the tokens that stand for the images of a conversation, and their places
messages         messages to JSON and back, and the rules by which two messages are the same
parsing          the primitives of incremental parsers
reasoning        a parser of the reasoning before an answer
tool_parsers     parsers of tool calls
value_parsers    parsers of the values in them, in JSON and in Python
streaming        parsers of a streamed answer, which return deltas
stop_strings     stop strings in a streamed text
answer_index     the answers of a conversation, by the messages before them
conversation     a conversation that keeps the exact ids of its answers
answer_text      the text that a model has to write for a given answer
renderer         all of these as one: the `ChatRenderer`
transcript       a rollout of several turns as ids, either a conversation or text
prompt_reader    the messages of recorded prompts, by role
function_tools   Python functions as tools: their schemas, and the arguments of a call
toolbox          calls of such functions, outside of the event loop and bounded
"""

from __future__ import annotations

from etude.chat.conversation import Conversation
from etude.chat.images import ImageEncoder, RenderedPrompt, find_images, load_image_encoder
from etude.chat.messages import message_from_dict
from etude.chat.prompt_reader import PromptReader
from etude.chat.renderer import ChatConfig, ChatRenderer
from etude.chat.streaming import ContentDelta, MessageDelta, ReasoningDelta, TokenStreamParser, ToolCallDelta
from etude.chat.template import ChatTemplate
from etude.chat.tokenizer import DecodeStream, Tokenizer
from etude.chat.toolbox import CallThread, Toolbox
from etude.chat.transcript import Transcript

__all__ = [
    "CallThread",
    "ChatConfig",
    "ChatRenderer",
    "ChatTemplate",
    "ContentDelta",
    "Conversation",
    "DecodeStream",
    "ImageEncoder",
    "MessageDelta",
    "PromptReader",
    "ReasoningDelta",
    "RenderedPrompt",
    "TokenStreamParser",
    "Tokenizer",
    "ToolCallDelta",
    "Toolbox",
    "Transcript",
    "find_images",
    "load_image_encoder",
    "message_from_dict",
]

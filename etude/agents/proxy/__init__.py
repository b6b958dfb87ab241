"""The model endpoint: any agent that talks to an OpenAI- or Anthropic-compatible server talks to it, unchanged.

asked             what a call asks for, and what comes of it, in no dialect in particular
chat_completions  OpenAI's /v1/chat/completions
completions       OpenAI's /v1/completions
responses         OpenAI's /v1/responses
anthropic         Anthropic's /v1/messages
reading           a stream of ids as reasoning, text and calls
policy            the run's own sampling parameters, and what of the agent's holds beside them
upstream          who samples: an engine in this process, or a server that speaks of token ids
record            what each attempt has said and heard, to the token
gate              how many calls are under way, and how many wait
meter             counts and times
endpoint          all of these as one
app               its routes
"""

from __future__ import annotations

from etude.agents.proxy.endpoint import Endpoint, EndpointConfig
from etude.agents.proxy.upstream import Upstream

__all__ = ["Endpoint", "EndpointConfig", "Upstream"]

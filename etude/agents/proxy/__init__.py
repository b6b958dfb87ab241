"""The model endpoint: any agent that talks to an OpenAI- or Anthropic-compatible server talks to it, unchanged.

asked             what a call asks for, and what comes of it, in no dialect in particular
fields            the fields of a request, and the rules by which each is followed, ignored or refused
chat_completions  OpenAI's /v1/chat/completions
completions       OpenAI's /v1/completions
responses         OpenAI's /v1/responses
items             the conversation of such a request
anthropic         Anthropic's /v1/messages
policy            the run's own sampling parameters, and what of the agent's holds beside them
opening           the beginning of an answer that is written for the model
upstream          who samples: whoever takes ids and gives ids, such as the engine in this process
server            a server that speaks of token ids, as an upstream
external          models of somebody else's, to whom calls are passed on
overheard         what those say, read along
events            server-sent events, as they come
record            what each attempt has said and heard, to the token
recent            the newest entries of a mapping
notary            turns and notes, written to the end
answering         how a call is sampled, read, recorded and given
gate              how many calls are under way, and how many wait
meter             counts and times
endpoint          all of these as one
app               its routes
"""

from __future__ import annotations

from etude.agents.proxy.endpoint import EndpointConfig, ModelEndpoint
from etude.agents.proxy.external import ExternalModel
from etude.agents.proxy.upstream import Upstream

__all__ = ["EndpointConfig", "ExternalModel", "ModelEndpoint", "Upstream"]

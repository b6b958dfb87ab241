"""The model endpoint: a server that is compatible with OpenAI's and Anthropic's APIs, for agents that need no change.

request            a call, its answers and the sampler behind them, independent of any dialect
request_fields     the fields of a request, and the rules by which each is followed, ignored or refused
openai             the parts that OpenAI's dialects share
chat_completions   OpenAI's /v1/chat/completions
completions        OpenAI's /v1/completions
responses          OpenAI's /v1/responses
response_items     the conversation of such a request
anthropic          Anthropic's /v1/messages
request_images     the images of requests: read, stored, and kept for the sampler
image_addresses    images that are fetched, from named public hosts alone
sampling_rules     the choice between the run's sampling parameters and the agent's
external           models of other providers, to which calls are passed on
external_answer    the answers of those models, parsed while they are passed on
session            each attempt's conversations with the model, as token ids; the prompt of a call
turn_recorder      writes turns and notes to the rollout queue
model_call_runner  samples, parses, records and returns the answers of a call
slot_queue         bounds the calls that are active, and those that wait
metrics            counts and times
endpoint_config    the options
endpoint           all of these as one
app                its routes
"""

from __future__ import annotations

from etude.agents.proxy.endpoint import ModelEndpoint
from etude.agents.proxy.endpoint_config import EndpointConfig
from etude.agents.proxy.external import ExternalModel
from etude.agents.proxy.request import Upstream

__all__ = ["EndpointConfig", "ExternalModel", "ModelEndpoint", "Upstream"]

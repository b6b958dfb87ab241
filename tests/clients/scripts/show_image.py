"""A client of PyPI, named on the command line, sends a picture and a question in its own way, and prints the answer."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import sys

from features import MODEL, URL

ADDRESS = os.environ["ETUDE_IMAGE"]
"""The picture, as a data URL."""
ENCODED = ADDRESS.partition(",")[2]
QUESTION = "How many?"


def openai(key: str) -> str:
    from openai import OpenAI

    parts = [{"type": "image_url", "image_url": {"url": ADDRESS}}, {"type": "text", "text": QUESTION}]
    asked = [{"role": "user", "content": parts}]
    client = OpenAI(base_url=f"{URL}/v1", api_key=key)
    return client.chat.completions.create(model=MODEL, messages=asked).choices[0].message.content


def anthropic(key: str) -> str:
    from anthropic import Anthropic

    source = {"type": "base64", "media_type": "image/png", "data": ENCODED}
    asked = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]}]
    return (
        Anthropic(base_url=URL, api_key=key).messages.create(model=MODEL, max_tokens=9, messages=asked).content[0].text
    )


def litellm(key: str) -> str:
    from litellm import completion

    parts = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": ADDRESS, "detail": "high"}}]
    asked = [{"role": "user", "content": parts}]
    done = completion(f"openai/{MODEL}", messages=asked, api_base=f"{URL}/v1", api_key=key)
    return done.choices[0].message.content


def pydantic_ai(key: str) -> str:
    from pydantic_ai import Agent, BinaryContent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=key))
    picture = BinaryContent(base64.b64decode(ENCODED), media_type="image/png")
    return Agent(model).run_sync([QUESTION, picture]).output


def openai_agents(key: str) -> str:
    from agents import Agent, OpenAIResponsesModel, Runner, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIResponsesModel(MODEL, AsyncOpenAI(base_url=f"{URL}/v1", api_key=key))
    parts = [{"type": "input_image", "image_url": ADDRESS, "detail": "auto"}, {"type": "input_text", "text": QUESTION}]
    return Runner.run_sync(Agent("one", model=model), [{"role": "user", "content": parts}]).final_output


def langgraph(key: str) -> str:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    picture = {"type": "image", "base64": ENCODED, "mime_type": "image/png"}
    asked = HumanMessage(content=[{"type": "text", "text": QUESTION}, picture])
    return ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=key).invoke([asked]).content


def autogen(key: str) -> str:
    from autogen_core import Image
    from autogen_core.models import ModelFamily, UserMessage
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info = {
        "vision": True,
        "function_calling": True,
        "json_output": True,
        "structured_output": True,
        "family": ModelFamily.UNKNOWN,
    }
    client = OpenAIChatCompletionClient(model=MODEL, base_url=f"{URL}/v1", api_key=key, model_info=info)
    asked = UserMessage(content=[QUESTION, Image.from_base64(ENCODED)], source="user")
    return asyncio.run(client.create([asked])).content


def smolagents(key: str) -> str:
    import PIL.Image
    from smolagents import OpenAIServerModel

    picture = PIL.Image.open(io.BytesIO(base64.b64decode(ENCODED)))
    parts = [{"type": "text", "text": QUESTION}, {"type": "image", "image": picture}]
    model = OpenAIServerModel(MODEL, api_base=f"{URL}/v1", api_key=key)
    return model.generate([{"role": "user", "content": parts}]).content


def dspy(key: str) -> str:
    import dspy as library

    asked = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ADDRESS}}]}]
    return str(library.LM(f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=key, cache=False)(messages=asked)[0])


CLIENTS = (openai, anthropic, litellm, pydantic_ai, openai_agents, langgraph, autogen, smolagents, dspy)
chosen = next(client for client in CLIENTS if client.__name__ == sys.argv[1])
print("\n" + chosen(os.environ["ETUDE_KEY"]))

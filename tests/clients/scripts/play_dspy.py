"""DSPy's language model, and its predictor with the adapter for JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import dspy
from features import ASK, COUNT, HELLO, MODEL, UNKNOWN, URL, Colour, play


class ServedLM(dspy.LM):
    """A model that takes schemas; DSPy knows this of the models in its own list alone."""

    supports_response_schema = True
    supported_params = frozenset({"response_format"})


def model(key: str, name: str = MODEL) -> dspy.LM:
    return ServedLM(f"openai/{name}", api_base=f"{URL}/v1", api_key=key, cache=False)


def call(key: str, name: str = MODEL) -> str:
    (text,) = model(key, name)(HELLO)
    return text if isinstance(text, str) else text["text"]


class PlainAdapter(dspy.ChatAdapter):
    """An adapter that takes a whole answer as the only field."""

    def parse(self, signature: type[dspy.Signature], completion: str) -> dict[str, str]:
        return {"answer": completion}


async def texts(key: str, question: str) -> AsyncIterator[str]:
    """Yield the pieces of an answer as they come."""
    program = dspy.streamify(dspy.Predict("question -> answer"), is_async_program=True)
    with dspy.context(lm=model(key), adapter=PlainAdapter()):
        async with aclosing(program(question=question)) as parts:
            async for part in parts:
                if not isinstance(part, dspy.Prediction):
                    yield part.choices[0].delta.content or ""


async def stream(key: str) -> str:
    return "".join([text async for text in texts(key, HELLO)])


async def drop(key: str) -> str:
    async with aclosing(texts(key, COUNT)) as parts:
        async for text in parts:
            if text:
                return "dropped"
    return "ended"


class Answer(dspy.Signature):
    """Say which colour it is."""

    question: str = dspy.InputField()
    answer: Colour = dspy.OutputField()


def structured(key: str) -> str:
    with dspy.context(lm=model(key), adapter=dspy.JSONAdapter()):
        return dspy.Predict(Answer)(question=ASK).answer.colour


play(call=call, stream=stream, structured=structured, error=lambda key: call(key, UNKNOWN), drop=drop)

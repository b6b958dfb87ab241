"""DSPy's language model, and its predictor with the adapter for JSON."""

from __future__ import annotations

import dspy
from features import ASK, HELLO, MODEL, UNKNOWN, URL, Colour, play


class ServedLM(dspy.LM):
    """A model that takes schemas; DSPy knows this of the models in its own list alone."""

    supports_response_schema = True
    supported_params = frozenset({"response_format"})


def model(key: str, name: str = MODEL) -> dspy.LM:
    return ServedLM(f"openai/{name}", api_base=f"{URL}/v1", api_key=key, cache=False)


def call(key: str, name: str = MODEL) -> str:
    (text,) = model(key, name)(HELLO)
    return text if isinstance(text, str) else text["text"]


class Answer(dspy.Signature):
    """Say which colour it is."""

    question: str = dspy.InputField()
    answer: Colour = dspy.OutputField()


def structured(key: str) -> str:
    with dspy.context(lm=model(key), adapter=dspy.JSONAdapter()):
        return dspy.Predict(Answer)(question=ASK).answer.colour


play(call=call, structured=structured, error=lambda key: call(key, UNKNOWN))

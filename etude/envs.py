"""Environments: what a language model practises in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["LanguageModelEnv"]


@dataclass
class LanguageModelEnv:
    """A model that writes, what it is asked, and what an answer is worth: what `etude.PPOTrainer` practises in."""

    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    """Trained in place, in the dtype that it was loaded in."""
    prompts: Sequence[str | Sequence[Mapping[str, Any]] | Mapping[str, Any]] | None = None
    """Texts, conversations (lists of messages), or rows of a dataset; None has the model write from the beginning."""
    reward: Callable[..., Any] | None = None
    """`f(prompt, answer)` or `f(answer)` gives a number; or a reward of `etude.rewards`."""

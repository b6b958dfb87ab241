"""The reward models of a run, loaded: from the reward that names one to the reward that asks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from etude.chat import Chat, Tokenizer, message_of
from etude.errors import DataError
from etude.models import load
from etude.protocols import Ids
from etude.recipes.folder import check_model
from etude.records import Message, Task
from etude.rewards import Combined, RewardFunction, ScoredByModel
from etude.train import ModelScorer
from etude.train.optim import PRECISIONS

__all__ = ["live", "sequence"]


def live(reward: RewardFunction, device: torch.device) -> RewardFunction:
    """The reward, with every model that it names loaded onto a device and ready to be asked."""
    if isinstance(reward, ScoredByModel):
        return _asking(reward, device)
    if isinstance(reward, Combined):
        return reward.model_copy(update={"parts": {name: live(part, device) for name, part in reward.parts.items()}})
    return reward


def sequence(chat: Chat, prompt: str | Sequence[Mapping[str, Any]], answer: str) -> Ids:
    """A prompt with its answer as a reward model was shown such: by its own template, with the end of it."""
    if isinstance(prompt, str):
        asked = chat.tokenizer.encode(prompt, special=True)
        said = chat.tokenizer.encode_after(prompt, answer, special=True, known=asked)
        ends = chat.tokenizer.eos_ids
        if not len(said) or int(said[-1]) not in ends:
            said = np.append(said, np.int32(ends[0]))
        return np.concatenate([asked, said]).astype(np.int32)
    messages = [message_of(form) for form in prompt]
    asked = chat.render(messages)
    said = chat.completion_ids(messages, Message("assistant", answer), asked_ids=asked)
    return np.concatenate([asked, said]).astype(np.int32)


def _asking(reward: ScoredByModel, device: torch.device) -> ScoredByModel:
    check_model(reward.path, "reward.path")
    model = load(reward.path, dtype=PRECISIONS[reward.precision], device=device, head="score")
    chat, scorer = Chat(Tokenizer.load(reward.path)), ModelScorer(model, reward.micro_tokens)

    async def asked(task: Task, answer: str) -> float:
        prompt: Any = task.fields["prompt"]
        ids = sequence(chat, prompt, answer)
        if len(ids) > model.context:
            raise DataError(
                f"the prompt and its answer have {len(ids)} tokens by the tokenizer of the reward model, whose context "
                f"holds {model.context}"
            )
        return float((await scorer.score([ids]))[0])

    return reward.scored_by(asked)

"""The reward models of a run, loaded: from the reward that names one to the reward that asks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from etude.chat import ChatRenderer, Tokenizer, message_from_dict
from etude.errors import DataError
from etude.models import load
from etude.protocols import Ids
from etude.recipes.run.directory import check_model
from etude.records import Message, Task
from etude.rewards import CombinedReward, RewardFunction, RewardModelScore
from etude.train import ModelScorer
from etude.train.optim import PRECISIONS

__all__ = ["encode_prompt_and_answer", "load_reward_models"]


def load_reward_models(reward: RewardFunction, device: torch.device) -> RewardFunction:
    """The reward, with every model that it names loaded onto a device and ready to be asked."""
    if isinstance(reward, RewardModelScore):
        return _load_reward_model(reward, device)
    if isinstance(reward, CombinedReward):
        return reward.model_copy(
            update={"parts": {name: load_reward_models(part, device) for name, part in reward.parts.items()}}
        )
    return reward


def encode_prompt_and_answer(chat: ChatRenderer, prompt: str | Sequence[Mapping[str, Any]], answer: str) -> Ids:
    """A prompt with its answer as a reward model was shown such: by its own template, with the end of it."""
    if isinstance(prompt, str):
        asked = chat.tokenizer.encode(prompt, add_special_tokens=True)
        said = chat.tokenizer.encode_after_text(prompt, answer, add_special_tokens=True, before_ids=asked)
        ends = chat.tokenizer.eos_ids
        if not len(said) or int(said[-1]) not in ends:
            said = np.append(said, np.int32(ends[0]))
        return np.concatenate([asked, said]).astype(np.int32)
    messages = [message_from_dict(form) for form in prompt]
    asked = chat.render(messages)
    said = chat.encode_answer(messages, Message("assistant", answer), prompt_ids=asked)
    return np.concatenate([asked, said]).astype(np.int32)


def _load_reward_model(reward: RewardModelScore, device: torch.device) -> RewardModelScore:
    check_model(reward.path, "reward.path")
    model = load(reward.path, dtype=PRECISIONS[reward.precision], device=device, head="score")
    chat, scorer = ChatRenderer(Tokenizer.load(reward.path)), ModelScorer(model, reward.micro_tokens)

    async def asked(task: Task, answer: str) -> float:
        prompt: Any = task.fields["prompt"]
        ids = encode_prompt_and_answer(chat, prompt, answer)
        if len(ids) > model.context_length:
            raise DataError(
                f"the prompt and its answer have {len(ids)} tokens by the tokenizer of the reward model, whose context "
                f"holds {model.context_length}"
            )
        return float((await scorer.score([ids]))[0])

    return reward.with_scorer(asked)

"""Loads the reward models of a run into the rewards that name them."""

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
from etude.rewards import RewardFunction, RewardModelScore
from etude.train import ModelScorer
from etude.train.optim import PRECISIONS


def load_reward_models(reward: RewardFunction, device: torch.device) -> RewardFunction:
    """Return the reward with every model that it names loaded onto a device."""
    if isinstance(reward, RewardModelScore):
        return _load_reward_model(reward, device)
    return reward.with_members({name: load_reward_models(part, device) for name, part in reward.members().items()})


def encode_prompt_and_answer(chat: ChatRenderer, prompt: str | Sequence[Mapping[str, Any]], answer: str) -> Ids:
    """Encode a prompt with its answer as in the reward model's training: by its own template, with the end token."""
    if isinstance(prompt, str):
        prompt_ids = chat.tokenizer.encode(prompt, add_special_tokens=True)
        answer_ids = chat.tokenizer.encode_after_text(prompt, answer, add_special_tokens=True, before_ids=prompt_ids)
        eos_ids = chat.tokenizer.eos_ids
        if not len(answer_ids) or int(answer_ids[-1]) not in eos_ids:
            answer_ids = np.append(answer_ids, np.int32(eos_ids[0]))
        return np.concatenate([prompt_ids, answer_ids]).astype(np.int32)
    messages = [message_from_dict(form) for form in prompt]
    prompt_ids = chat.render(messages).ids  # an image is refused: the renderer takes text alone
    answer_ids = chat.encode_answer(messages, Message("assistant", answer), prompt_ids=prompt_ids)
    return np.concatenate([prompt_ids, answer_ids]).astype(np.int32)


def _load_reward_model(reward: RewardModelScore, device: torch.device) -> RewardModelScore:
    check_model(reward.path, "reward.path")
    model = load(reward.path, dtype=PRECISIONS[reward.precision], device=device, head="score")
    chat, scorer = ChatRenderer(Tokenizer.load(reward.path)), ModelScorer(model, reward.max_tokens_per_micro_batch)

    async def score_answer(task: Task, answer: str) -> float:
        prompt: Any = task.fields["prompt"]
        ids = encode_prompt_and_answer(chat, prompt, answer)
        if len(ids) > model.context_length:
            raise DataError(
                f"the prompt and its answer have {len(ids)} tokens by the tokenizer of the reward model, whose "
                f"context holds {model.context_length}"
            )
        return float((await scorer.score([ids]))[0])

    return reward.with_scorer(score_answer)

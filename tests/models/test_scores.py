"""Models with a score head: critics and reward models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from etude.errors import ConfigError
from etude.models import PackedAttention, create, load, save
from etude.models.tiny import FAMILIES, tiny_config
from tests.models.packs import FOREST, pack_of

PACK = pack_of(FOREST, vocabulary=32)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_those_of_transformers_at_every_token(family: str, tmp_path: Path) -> None:
    model = create(tiny_config(32, family=family), seed=0, dtype=torch.float64, head="score")
    save(model, tmp_path / "judge")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge", dtype=torch.float64)
    row = pack_of([(-1, 5)], vocabulary=32)
    ours = model.logits(model.hidden(row.ids, row.positions, PackedAttention(row)))
    assert ours.shape == (5, 1)
    for end in range(1, 6):
        assert torch.allclose(theirs(input_ids=row.ids[None, :end].long()).logits[0], ours[end - 1], atol=1e-9)


def test_a_new_critic_has_the_policys_body_and_zero_scores_and_a_judge_needs_its_head(tmp_path: Path) -> None:
    policy = create(tiny_config(32), seed=0)
    save(policy, tmp_path / "policy")
    critic = load(tmp_path / "policy", dtype=torch.float32, head="value")
    hidden = critic.hidden(PACK.ids, PACK.positions, PackedAttention(PACK))
    assert torch.equal(hidden, policy.hidden(PACK.ids, PACK.positions, PackedAttention(PACK)))
    assert critic.has_score_head and not critic.logits(hidden).any()
    assert critic.vocab_size == policy.vocab_size == 32
    with pytest.raises(ConfigError, match=r"no score head \(`score.weight`\).*reward model"):
        load(tmp_path / "policy", dtype=torch.float32, head="score")


def test_critics_and_judges_read_a_trained_head(tmp_path: Path) -> None:
    judge = create(tiny_config(32), seed=0, head="score")
    save(judge, tmp_path / "judge")
    for head in ("score", "value"):
        assert torch.equal(load(tmp_path / "judge", dtype=torch.float32, head=head).head_weight, judge.head_weight)  # type: ignore[arg-type]


def test_a_classifier_of_several_labels_is_no_judge(tmp_path: Path) -> None:
    config = tiny_config(32)
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "labels")
    with pytest.raises(ConfigError, match=r"score.weight: \[3, 64\] instead of \[1, 64\]"):
        load(tmp_path / "labels", dtype=torch.float32, head="score")

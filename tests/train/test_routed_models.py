"""Several frozen models that share the rollouts of a batch by data source."""

from __future__ import annotations

import pytest
import torch

from etude.batch import Batch
from etude.errors import BatchError, MissingColumnError
from etude.train import FrozenModel, RoutedModels
from tests.train.tasks import VOCABULARY, model, rollouts


def of_two_sources() -> Batch:
    batch = rollouts(groups=4)
    return batch.replace(source=torch.tensor([1, 0, 1, 0])[batch.group], source_names=("code", "math"))


def test_each_model_computes_the_rollouts_of_its_source() -> None:
    batch, models = of_two_sources(), [FrozenModel(model(seed=seed), 40) for seed in (1, 2)]
    routed = RoutedModels(dict(zip(batch.source_names, models, strict=True)))
    whole = [each.logp(batch) for each in models]
    assert not torch.allclose(whole[0][batch.action], whole[1][batch.action], atol=1e-2)
    is_math = batch.require("source").repeat_interleave(batch.rollout_token_offsets.diff()).bool()
    expected = torch.where(is_math, whole[1], whole[0])
    torch.testing.assert_close(routed.logp(batch), expected, rtol=0, atol=1e-12, equal_nan=True)

    tops = [each.top_tokens(batch, 3, VOCABULARY) for each in models]
    ids, logp = routed.top_tokens(batch, 3, VOCABULARY)
    assert torch.equal(ids, torch.where(is_math[:, None], tops[1][0], tops[0][0]))
    expected = torch.where(is_math[:, None], tops[1][1], tops[0][1])
    torch.testing.assert_close(logp, expected, rtol=0, atol=1e-12, equal_nan=True)


def test_a_model_of_several_sources_computes_their_rollouts_together() -> None:
    """The micro-batches are those of one model for all, and so are the bits."""
    batch, one = of_two_sources(), FrozenModel(model("fp32", seed=1), 40)
    routed = RoutedModels({"math": one, "code": one})
    assert torch.equal(routed.logp(batch).nan_to_num(), one.logp(batch).nan_to_num())


def test_a_source_without_a_model_is_refused() -> None:
    batch, routed = of_two_sources(), RoutedModels({"math": FrozenModel(model(), 40)})
    with pytest.raises(BatchError, match=r"the data source `code`, and the models are for `math`\. .*`teacher.paths`"):
        routed.logp(batch)
    with pytest.raises(MissingColumnError, match="A model for each data source needs the column `source`"):
        routed.logp(batch.replace(source=None))

"""Whole runs that sample from real servers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.cli import main
from etude.data.samples import build_samples
from etude.models import save
from etude.models.model import stored_buffers
from etude.rollout import ServerPool
from etude.store import open_store
from tests.components import require, require_environment
from tests.families import family_model
from tests.recipes.runs import Captured, options, refused_run, step_metrics, train
from tests.rollout import vllm_on_cpu
from tests.rollout.test_recorded_routes import in_order, trainer_pass
from tests.served import bring, joined, on, options_of, started
from tests.worlds import make_model, make_tasks, make_tokenizer

KINDS = [pytest.param(kind, marks=on(kind)) for kind in ("vllm", "sglang")]


@pytest.fixture
def sums(tmp_path: Path, served_models: tuple[Path, Path]) -> Path:
    """Tasks, and the model of the shared servers."""
    shutil.copytree(served_models[0], tmp_path / "model")
    make_tasks(tmp_path / "tasks.jsonl", 20)
    make_tasks(tmp_path / "held_out.jsonl", 4, seed=1)
    return tmp_path


CUT = {
    "sampling.top_p": 0.9,
    "sampling.top_k": 40,
    "correction.center": "true",
    "correction.alternatives": 40,
    "correction.weight": "truncate",
}
"""The options of runs whose tokens are cut off, with all that are left as alternatives."""


def assert_followed(line: dict[str, float]) -> None:
    """Assert that the trainer's log-probs over the sets are the server's."""
    assert line["mismatch/k3"] < 1e-9 and line["support/bound_share"] == 1
    assert 1 < line["support/size"] < 40
    assert line["center/mass"] > 1 - 1e-5, "all that could be drawn is among the alternatives"


@pytest.mark.smoke
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_samples_for_a_run(
    kind: str,
    request: pytest.FixtureRequest,
    sums: Path,
    served_models: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step's answers are sampled with its weights: the trainer's log-probs equal the server's."""
    engine: ServerPool = request.getfixturevalue(f"{kind}_server")
    reached = joined(engine, monkeypatch)
    given = {"rollout": kind, "rollout.max_num_seqs": 32, **reached}
    try:
        run = train(sums, sums / "run", **given, steps=3, data__val=f"[{sums / 'held_out.jsonl'}]", evaluate__every=3)
        for line in step_metrics(run):
            assert line["mismatch/k3"] < 1e-5 and line["publish_bytes"] > 0
            assert line["engine/new_tokens"] > 0 and line["engine/replicas"] == 1
        assert not (run / "published").exists()
        stale = {"max_staleness": 1, "correction.weight": "truncate", "sampling.max_tokens": 24, "steps": 4}
        for line in step_metrics(train(sums, sums / "stale", **given | stale)):
            assert line["staleness/max"] <= 1 and line["reward"] >= 0, "it samples while the policy trains"
        if kind == "sglang":
            for line in step_metrics(train(sums, sums / "cut", **given | CUT, steps=2)):
                assert_followed(line)
        scored = ["eval", str(run), f"rollout={kind}", *(f"{name}={value}" for name, value in reached.items())]
        assert main([*scored, f"data.val=[{sums / 'held_out.jsonl'}]"]) == 0
    finally:
        bring(engine, served_models[0], 0)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_starts_its_server_and_ends_it(kind: str, sums: Path) -> None:
    """The model has a tied head, which is trained."""
    given = {f"rollout.{name}": value for name, value in options_of(kind, sums).items()}
    given["model.path"] = make_model(sums / "tied", hidden=64)
    run = train(sums, sums / "run", rollout=kind, **given, steps=12, collect__tasks=8)
    lines = step_metrics(run)
    assert all(line["mismatch/k3"] < 1e-5 for line in lines)
    assert sum(line["reward"] for line in lines[-3:]) > sum(line["reward"] for line in lines[:3])
    assert (run / "servers" / f"{kind}-0.log").exists()


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_sends_its_weights_through_shared_memory(kind: str, sums: Path) -> None:
    """The server is started with the options for that, and with a model that has a tied head."""
    given = {f"rollout.{name}": value for name, value in options_of(kind, sums).items()}
    given |= {
        "model.path": make_model(sums / "tied", hidden=64),
        "rollout.weight_transport": "shm",
        "rollout.bucket_mib": 1,
    }
    run = train(sums, sums / "run", rollout=kind, **given, steps=3)
    for line in step_metrics(run):
        assert line["mismatch/k3"] < 1e-5 and line["publish_bytes"] > 0 and line["publish_pause_ms"] > 0
    assert not (run / "published").exists()


@pytest.mark.parametrize("kind", [pytest.param("vllm", marks=on("vllm"))])
def test_a_run_trains_on_answers_of_which_a_server_cuts_tokens_off(kind: str, sums: Path) -> None:
    """The trainer's log-probs over the reported sets equal the server's. Scored answers are greedy."""
    given = {f"rollout.{name}": value for name, value in options_of(kind, sums).items()}
    given["rollout.python"] = vllm_on_cpu.python(require_environment(kind), sums)
    given |= CUT | {"sampling.max_tokens": 8, "evaluate.sampling.temperature": 0}
    scored = {"data.val": f"[{sums / 'held_out.jsonl'}]", "evaluate.every": 2}
    for line in step_metrics(train(sums, sums / "run", rollout=kind, **given, **scored, steps=2)):
        assert_followed(line)


@pytest.fixture(scope="module")
def plugged(served_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """vLLM's server, which every weight transport can reach."""
    with started("vllm", served_models[0], tmp_path_factory.mktemp("plugged"), with_plugin=True) as engine:
        yield engine


@pytest.mark.parametrize(
    ("cluster", "weight_transport"),
    [("local", "shm"), ("ray", "shm"), pytest.param("local", "gloo", marks=pytest.mark.soak)],
)
@pytest.mark.xdist_group("vllm")
@pytest.mark.timeout(900)
def test_the_ranks_of_a_run_send_its_weights_to_a_server(
    cluster: str, weight_transport: str, plugged: ServerPool, sums: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cluster == "ray":
        require("ray")
    given = {"rollout": "vllm", "rollout.max_num_seqs": 32, **joined(plugged, monkeypatch)}
    given |= {"rollout.weight_transport": weight_transport, "rollout.bucket_mib": 1, "ranks": 2, "cluster": cluster}
    for line in step_metrics(train(sums, sums / "run", **given, steps=3)):
        assert line["mismatch/k3"] < 1e-5 and line["publish_bytes"] > 0 and line["publish_failed_replicas"] == 0


LATENT = {"head_dim": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""The widths of DeepSeek V3, which vLLM has kernels for."""
ROUTED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""Further fields of the files of DeepSeek V3 that vLLM reads."""


@pytest.mark.parametrize("kind", [pytest.param("vllm", marks=on("vllm"))])
def test_a_server_samples_for_a_run_of_latent_attention_and_experts(kind: str, sums: Path) -> None:
    """Its positions, packed experts and biases of routers are the trainer's, in each version of the weights."""
    given = {f"rollout.{name}": value for name, value in options_of(kind, sums).items()}
    given |= {"rollout.weight_transport": "shm", "train.learning_rate": 0.01}
    more = {"vocab_size": make_tokenizer(sums / "latent"), "hidden_size": 64, "moe_intermediate_size": 32}
    model = family_model("deepseek_v3", **LATENT, **ROUTED, **more)
    for buffer in stored_buffers(model.module).values():
        buffer.copy_(torch.rand(buffer.shape, generator=torch.Generator().manual_seed(4)))
    save(model, sums / "latent")
    given["model.path"] = sums / "latent"
    lines = step_metrics(train(sums, sums / "run", rollout=kind, **given, steps=3))
    for line in lines:
        assert line["mismatch/k3"] < 1e-9 and line["publish_bytes"] > 0
    assert lines[-1]["mismatch/sampler_perplexity"] < lines[0]["mismatch/sampler_perplexity"] / 2, "it has learnt"


@pytest.mark.parametrize(
    "kind", [pytest.param("vllm", marks=on("vllm")), pytest.param("sglang", marks=[*on("sglang"), pytest.mark.soak])]
)
def test_a_run_replays_the_experts_that_a_server_reports(kind: str, sums: Path) -> None:
    """They are the trainer's own. A later turn reports those of new tokens alone."""
    given = {f"rollout.{name}": value for name, value in options_of(kind, sums).items()}
    if kind == "vllm":
        given["rollout.python"] = vllm_on_cpu.python(require_environment(kind), sums)
    given |= {"rollout.weight_transport": "shm", "train.router_replay": "r3", "mini_batches": 2}
    given |= {"env.path": "tests.recipes.partners:Echo", "env.kwargs.turns": 2, "reward": "environment"}
    more: dict[str, Any] = {"vocab_size": make_tokenizer(sums / "mixture"), "hidden_size": 64, "head_dim": 32}
    more |= {"moe_intermediate_size": 32}
    if kind == "vllm":  # of a layer without experts SGLang's log-probs on a CPU are no numbers
        more |= {"num_hidden_layers": 3, "mlp_only_layers": [0]}
    model = family_model("qwen3_moe", **more)
    save(model, sums / "mixture")
    given |= {"model.path": sums / "mixture", "reward.path": None}
    run = train(sums, sums / "run", rollout=kind, **given, steps=2)
    for line in step_metrics(run):
        assert line["mismatch/k3"] < 1e-5 and line["publish_bytes"] > 0
    with closing(open_store(run / "journal.sqlite", read_only=True)) as store:
        for id in store.admitted()[1]:
            first, second = store.turns(id)
            assert second.completion.routes is not None
            assert second.completion.routes.start == len(first.prompt) + len(first.completion.ids) - 1
            (sample,) = build_samples([first, second], id)
            assert sample.routes is not None
            expected, _ = trainer_pass(model, sample.ids)
            assert torch.equal(in_order(torch.from_numpy(sample.routes.copy()))[:-1], in_order(expected)[:-1])


def test_options_that_servers_lack_are_refused(sums: Path, capsys: Captured) -> None:
    server = {"rollout": "vllm", "rollout.url": "http://127.0.0.1:9"}
    place = sums / "refused"
    assert "no server computes in" in refused_run(capsys, sums, place, **server, train__precision="fp64")
    assert "on a GPU only" in refused_run(capsys, sums, place, **server, device="cpu", train__offload="true")
    assert "servers get merged weights" in refused_run(
        capsys, sums, place, **server, lora__rank=2, lora__publish="merged"
    )
    for name, value in (("bucket_mib", 8), ("update_timeout", 9)):
        assert "`rollout.weight_transport=files` has none" in refused_run(
            capsys, sums, place, **server, **{f"rollout.{name}": value}
        )
    carried = {**server, "rollout.weight_transport": "shm"}
    assert "where servers reach the trainer, and with `rollout.weight_transport=shm` they do not" in refused_run(
        capsys, sums, place, **carried, rollout__address="10.0.0.1"
    )
    only = {"rollout.adapters": "only"}
    assert "there are none. Set `lora.rank`" in refused_run(capsys, sums, place, **server, **only)
    assert "the adapter that it began with" in refused_run(
        capsys, sums, place, **server, **only, lora__rank=2, rollout__running="finish"
    )
    assert "sends whole weights" in refused_run(capsys, sums, place, **carried, **only, lora__rank=2)
    assert "could not be reached" in failed(capsys, sums, place, **server)


def failed(capsys: Captured, world: Path, directory: Path, **changes: object) -> str:
    """Return the error of a run that cannot start."""
    capsys.readouterr()
    assert main(["train", *options(world, directory=directory, **changes)]) != 0
    return capsys.readouterr().err

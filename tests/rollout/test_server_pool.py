"""Servers as one engine: they share the work, replace each other, come back, and end with their owner."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from etude.errors import ConfigError, DataError, EngineError
from etude.protocols import Ids
from etude.records import Completion, SamplingParams
from etude.rollout import ServerConfig, ServerPool, SglangConfig, VllmConfig
from etude.rollout.held_adapters import AdapterSpec
from etude.rollout.launch import launch_specs, start_servers
from etude.rollout.reported_sets import LOGPROBS_ALONE, Recording
from etude.rollout.server_backend import LaunchSpec
from etude.rollout.server_engine import ModelShape, ServerEngine
from etude.rollout.server_process import find_free_port
from etude.rollout.vllm import VllmBackend
from tests.processes import gone
from tests.rollout.stand_in import V, logp_of, next_token, set_of
from tests.waits import blocked_until as until

ROOT = Path(__file__).parents[2]
SIZES = {
    "vocab_size": V,
    "max_position_embeddings": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 16,
}
SLOW = "--pace=0.02"


def weights(directory: Path, salt: int) -> Path:
    """Write the stand-in's model."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SIZES))
    (directory / "salt").write_text(str(salt))
    return directory


def python(directory: Path) -> Path:
    """Write a Python that always runs the stand-in."""
    directory.mkdir(parents=True, exist_ok=True)
    file, program = directory / "python", Path(__file__).with_name("stand_in.py")
    command = " ".join(shlex.quote(str(word)) for word in (sys.executable, "-I", program))
    file.write_text(f'#!/bin/sh\nshift 2\nexec {command} "$@"\n')
    file.chmod(0o755)
    return file


@contextmanager
def served(
    directory: Path, recording: Recording = LOGPROBS_ALONE, *, enable_sleep: bool = False, **options: Any
) -> Iterator[ServerPool]:
    """Start servers with the salt 5."""
    options = {"python": python(directory), "restarts": 1, "start_timeout": 60.0} | options
    config = VllmConfig(**options)
    model = weights(directory / "model", 5)
    more: dict[str, Any] = {"logs": directory / "logs", "enable_sleep": enable_sleep, "recording": recording}
    with start_servers(config, model, None, dtype="float32", device="cpu", **more) as engine:
        yield engine


def expected(prompt: list[int], count: int, salt: int = 5) -> list[int]:
    """Return the expected answer of the stand-in."""
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context, salt))
    return context[len(prompt) :]


def ids(prompt: list[int]) -> Ids:
    return np.array(prompt, np.int32)


def pids(directory: Path) -> list[int]:
    """Return the stand-ins that serve a model in a directory."""
    result = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if any(word.endswith("stand_in.py") for word in words) and words[0] != "/bin/sh":
                result += [int(entry.name)] if any(word.startswith(str(directory)) for word in words) else []
    return sorted(result)


def ask(engine: ServerPool, prompts: list[list[int]], tokens: int) -> list[Completion]:
    return engine.generate_all([ids(prompt) for prompt in prompts], [SamplingParams(max_tokens=tokens)] * len(prompts))


def test_servers_share_the_work_and_report_it(tmp_path: Path) -> None:
    prompts = [[n, n + 1] for n in range(12)]
    with served(tmp_path, replicas=2, server_args=("--pace=0.005",)) as engine:
        answers = ask(engine, prompts, 6)
        assert len(pids(tmp_path)) == 2
        assert all(server.finished for server in engine.servers)
        metrics = engine.stats().reduce()
        assert (metrics["engine/new_tokens"], metrics["engine/finished"], metrics["engine/replicas"]) == (72, 12, 2)
        assert metrics["engine/busy_seconds"] > 0 and engine.stats().reduce()["engine/new_tokens"] == 0
    for prompt, answer in zip(prompts, answers, strict=True):
        wanted = expected(prompt, 6)
        assert answer.ids.tolist() == wanted and answer.finish_reason == "length"
        assert np.allclose(answer.logp, [logp_of(token) for token in wanted])
        assert answer.raw_logp is not None and set(answer.version.tolist()) == {0}
    assert not pids(tmp_path)


def test_when_a_server_dies_another_continues_from_its_tokens(tmp_path: Path) -> None:
    prompts = [[n] for n in range(8)]
    with served(tmp_path, replicas=2, server_args=(SLOW,)) as engine, ThreadPoolExecutor() as pool:
        pending = pool.submit(ask, engine, prompts, 40)
        until(lambda: sum(server.new_tokens for server in engine.servers) > 40)
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        answers = pending.result(60)
        assert [answer.ids.tolist() for answer in answers] == [expected(prompt, 40) for prompt in prompts]
        metrics = engine.stats().reduce()
        assert metrics["engine/requests_resumed"] >= 1 and metrics["engine/requests_restarted"] == 0
        until(lambda: all(server.is_up for server in engine.servers))
        assert engine.stats().reduce()["engine/restarts"] == 1
        assert len(pids(tmp_path)) == 2


CUT = SamplingParams(max_tokens=20, top_p=0.9, top_k=2, support=True, alternatives=24)


def test_an_answer_keeps_its_sets_and_alternatives_when_another_server_continues_it(tmp_path: Path) -> None:
    recording = Recording.of(CUT)
    with (
        served(tmp_path, recording, replicas=2, server_args=(SLOW,)) as engine,
        ThreadPoolExecutor() as pool,
    ):
        pending = pool.submit(engine.generate_all, [ids([n]) for n in range(8)], [CUT] * 8)
        until(lambda: sum(server.new_tokens for server in engine.servers) > 40)
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        answers = pending.result(60)
        assert engine.stats().reduce()["engine/requests_resumed"] >= 1
        greedy = replace(CUT, temperature=0)
        (likeliest,) = engine.generate_all([ids([3])], [greedy])
        with pytest.raises(ConfigError, match=r"takes no request without `top_k`\. Set `top_k`"):
            engine.generate_all([ids([3])], [SamplingParams()])
    for answer in answers:
        assert answer.support is not None and answer.alternative_ids is not None
        assert answer.alternative_logp is not None and answer.alternative_logp.shape == (20, 24)
        for place, token in enumerate(answer.ids.tolist()):
            assert answer.support.mask(place, V).nonzero()[0].tolist() == sorted(set_of(token))
            drawn = answer.alternative_ids[place] == token
            assert np.allclose(answer.alternative_logp[place][drawn], logp_of(token))
        assert np.isfinite(answer.alternative_logp).sum(1).tolist() == [2] * 20
    assert likeliest.support is not None and likeliest.support.sizes(V).tolist() == [1] * 20
    assert not likeliest.logp.any() and likeliest.raw_logp is None


def test_a_server_that_does_not_report_what_a_run_needs_is_refused(tmp_path: Path) -> None:
    recording = Recording.of(CUT)
    with served(tmp_path, recording) as engine:
        with pytest.raises(ConfigError, match=r"`top_p=0\.9` cuts tokens off an answer.*has vLLM report no sets"):
            VllmConfig().create_backend().check_sampling(CUT)
        be(engine.servers[0].url, astray=True)
        with pytest.raises(DataError, match=r"vLLM at http\S+ reports 1 tokens that could be drawn at token 0 of"):
            engine.generate_all([ids([3])], [CUT])
    with (
        served(tmp_path, recording, server_args=("--max-logprobs", "20")) as engine,
        pytest.raises(ConfigError, match=r"returns 19 log-probs a token.*=24`\. Start it with `--max-logprobs 25`"),
    ):
        engine.generate_all([ids([3])], [CUT])
    with served(tmp_path) as engine:
        engine.servers[0].backend.recording = recording  # as for a server that somebody else has started
        with pytest.raises(ConfigError, match=r"does not report the tokens that are left\. Start it with `--return-"):
            engine.generate_all([ids([3])], [replace(CUT, alternatives=0)])
    with (
        pytest.raises(ConfigError, match=r"vLLM 0\.27\.1, does not report which\. Use vLLM from 0\.28"),
        served(tmp_path, recording, server_args=("--version", "0.27.1")),
    ):
        pass


def test_a_server_that_hangs_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.rollout.server_engine.HEALTH_TIMEOUT", 1.0)
    monkeypatch.setattr("etude.rollout.server_process.GRACE_SECONDS", 0.5)
    with served(tmp_path, server_args=(SLOW,)) as engine, ThreadPoolExecutor() as pool:
        pending = pool.submit(ask, engine, [[3], [4]], 30)
        until(lambda: engine.servers[0].new_tokens > 5)
        os.kill(pids(tmp_path)[0], signal.SIGSTOP)
        answers = pending.result(120)
    assert [answer.ids.tolist() for answer in answers] == [expected([3], 30), expected([4], 30)]


def test_the_loss_of_the_last_server_is_reported_with_its_log(tmp_path: Path) -> None:
    with served(tmp_path, restarts=0, server_args=(SLOW,)) as engine, ThreadPoolExecutor() as pool:
        pending = pool.submit(ask, engine, [[3]], 60)
        until(lambda: engine.servers[0].new_tokens > 2)
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        with pytest.raises(
            EngineError, match=r"(?s)no server left.*vllm-0 ended \(killed by SIGKILL\).*a server begins"
        ):
            pending.result(60)
        with pytest.raises(EngineError, match="no server left"):
            ask(engine, [[3]], 1)


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    wrong = r"(?s)did not start.*ended \(exit code 3\).*there is no such kernel"
    with pytest.raises(EngineError, match=wrong), served(tmp_path / "a", server_args=("--dies",)):
        pass
    with (
        pytest.raises(ConfigError, match=r"is vLLM 0\.11\.2, and does not list the endpoint /abort_requests"),
        served(tmp_path / "b", server_args=("--version=0.11.2",)),
    ):
        pass
    with pytest.raises(ConfigError, match="is not a file"), served(tmp_path / "c", python=tmp_path / "nothing"):
        pass
    assert not pids(tmp_path)


def test_a_server_of_another_version_is_used_if_it_has_every_endpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listed = sorted(VllmBackend.paths)
    with served(tmp_path / "a", server_args=("--version=0.33.1", "--lists", *listed)):
        pass
    assert [record.args[2:] for record in caplog.records if "is tested" in record.msg] == [("0.33.1", "0.32")]
    with (
        pytest.raises(ConfigError, match=r"is vLLM 0\.33\.1, and does not list the endpoint /weight_info"),
        served(
            tmp_path / "b", server_args=("--version=0.33.1", "--lists", *(p for p in listed if p != "/weight_info"))
        ),
    ):
        pass


def test_new_weights_apply_and_a_server_that_refuses_them_is_left_out(tmp_path: Path) -> None:
    new = weights(tmp_path / "new", 11)
    with served(tmp_path, replicas=2) as engine:
        asyncio.run(engine.load(new, 3))
        (answer,) = ask(engine, [[1, 2]], 5)
        assert answer.ids.tolist() == expected([1, 2], 5, salt=11) and set(answer.version.tolist()) == {3}
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        until(lambda: engine.stats().reduce()["engine/restarts"] == 1)
        until(lambda: all(server.is_up for server in engine.servers))
        assert [server.version for server in engine.servers] == [3, 3]  # it started with the new ones
        answers = ask(engine, [[n] for n in range(8)], 5)
        assert [answer.ids.tolist() for answer in answers] == [expected([n], 5, salt=11) for n in range(8)]


def test_an_error_is_raised_if_no_server_takes_new_weights(tmp_path: Path) -> None:
    with served(tmp_path, server_args=("--poor",)) as engine:
        with pytest.raises(EngineError, match="the weights do not fit"):
            asyncio.run(engine.load(weights(tmp_path / "new", 11), 3))
        assert engine.servers[0].withdrawn


def test_an_answer_is_restarted_if_the_weights_have_changed(tmp_path: Path) -> None:
    """One server breaks off; the other has newer weights, so no token of the answer is kept."""
    new = weights(tmp_path / "new", 11)
    with served(tmp_path, replicas=2, restarts=0, server_args=(SLOW,)) as engine, ThreadPoolExecutor() as pool:
        pending = pool.submit(ask, engine, [[3]], 40)
        until(lambda: any(server.active_requests for server in engine.servers))
        busy = next(server for server in engine.servers if server.active_requests)
        until(lambda: busy.new_tokens > 3)

        async def other(server: ServerEngine) -> None:
            if server is not busy:
                await server.load(new, 1)

        asyncio.run(engine.run_on_all(other))
        os.kill(next(pid for pid in pids(tmp_path) if f"{busy.url.rpartition(':')[2]}" in words(pid)), signal.SIGKILL)
        (answer,) = pending.result(60)
        assert answer.ids.tolist() == expected([3], 40, salt=11) and set(answer.version.tolist()) == {1}
        assert engine.stats().reduce()["engine/requests_restarted"] == 1


def words(pid: int) -> list[str]:
    """Return the command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")


def test_impossible_requests_are_refused_before_they_are_sent(tmp_path: Path) -> None:
    with served(tmp_path) as engine:
        with pytest.raises(DataError, match=f"token id {V}; the model knows 0 to {V - 1}"):
            ask(engine, [[V]], 3)
        with pytest.raises(DataError, match="context is 64"):
            ask(engine, [[1] * 64], 3)
        with pytest.raises(ConfigError, match="without a tokenizer"):
            engine.generate_all([ids([1])], [SamplingParams(stop=("e",))])
        with pytest.raises(ConfigError, match="logit bias of 200"):
            engine.generate_all([ids([1])], [SamplingParams(logit_bias={1: 200.0})])
        assert len(ask(engine, [[1] * 60], 30)[0].ids) == 4  # cut off at the context


async def reached(holds: Callable[[], bool]) -> None:
    """Wait in an event loop until a condition holds."""
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


def test_a_full_queue_refuses_and_a_cancelled_wait_leaves_it(tmp_path: Path) -> None:
    async def scenario(engine: ServerPool) -> None:
        running = asyncio.create_task(engine.generate(ids([1]), SamplingParams(max_tokens=60)))
        await reached(lambda: engine.servers[0].active_requests == 1)
        waiting = asyncio.create_task(engine.generate(ids([2]), SamplingParams(max_tokens=3)))
        await reached(lambda: engine.router.waiting == 1)
        with pytest.raises(EngineError, match=r"1 requests wait .* raise `rollout\.max_waiting`"):
            await engine.generate(ids([3]), SamplingParams(max_tokens=3))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await reached(lambda: engine.router.waiting == 0)
        third = asyncio.create_task(engine.generate(ids([4]), SamplingParams(max_tokens=3)))
        await reached(lambda: engine.router.waiting == 1)
        running.cancel()  # which gives its slot to the third
        assert (await third).ids.tolist() == expected([4], 3)
        with pytest.raises(asyncio.CancelledError):
            await running
        numbers = (await asyncio.to_thread(engine.stats)).reduce()
        assert numbers["engine/requests_refused"] == 1 and 0.5 < numbers["engine/slot_usage"] <= 1

    with served(tmp_path, max_num_seqs=1, max_waiting=1, server_args=(SLOW,)) as engine:
        asyncio.run(scenario(engine))


def test_an_answer_that_broke_off_is_never_refused_and_goes_first(tmp_path: Path) -> None:
    async def scenario(engine: ServerPool) -> None:
        interrupted = asyncio.create_task(engine.generate(ids([1]), SamplingParams(max_tokens=40)))
        await reached(lambda: engine.servers[0].new_tokens > 2)
        waiting = asyncio.create_task(engine.generate(ids([2]), SamplingParams(max_tokens=3)))
        await reached(lambda: engine.router.waiting == 1)  # the limit of the queue
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        assert (await interrupted).ids.tolist() == expected([1], 40) and not waiting.done()
        assert (await waiting).ids.tolist() == expected([2], 3)

    with served(tmp_path, max_num_seqs=1, max_waiting=1, server_args=(SLOW,)) as engine:
        asyncio.run(scenario(engine))


def test_a_stream_comes_piece_by_piece_and_ends_when_it_is_left(tmp_path: Path) -> None:
    async def scenario(engine: ServerPool) -> None:
        pieces = [delta async for delta in engine.stream(ids([1]), SamplingParams(max_tokens=5))]
        whole = pieces[-1].completion
        assert whole is not None and whole.ids.tolist() == expected([1], 5)
        assert sum(len(delta.ids) for delta in pieces) == 5 and len(pieces) > 1
        left = engine.stream(ids([1]), SamplingParams(max_tokens=60))
        await anext(left)
        await left.aclose()
        async with asyncio.timeout(10):
            while engine.servers[0].active_requests:
                await asyncio.sleep(0.01)

    with served(tmp_path, server_args=(SLOW,)) as engine:
        asyncio.run(scenario(engine))


def test_a_weight_sender_withdraws_drains_and_labels_servers(tmp_path: Path) -> None:
    with served(tmp_path, replicas=2, server_args=(SLOW,)) as engine, ThreadPoolExecutor() as pool:
        pending = pool.submit(ask, engine, [[n] for n in range(4)], 20)
        until(lambda: all(server.active_requests for server in engine.servers))
        first, second = engine.servers

        async def brought(server: ServerEngine) -> None:
            if server is first:
                server.withdraw()
                await server.drain()
                assert not server.active_requests
                await server.post("/collective_rpc", {"kwargs": {"weights_path": str(weights(tmp_path / "new", 9))}})

        asyncio.run(engine.run_on_all(brought))
        assert len(pending.result(60)) == 4
        before = first.finished
        assert ask(engine, [[7], [8]], 3)[0].ids.tolist() == expected([7], 3)
        assert first.finished == before and second.finished > 0

        async def stamped(server: ServerEngine) -> None:
            if server is first:
                await server.set_version(1)

        asyncio.run(engine.run_on_all(stamped))
        answers = ask(engine, [[7], [8]], 3)  # only the newest version gets requests
        assert [answer.ids.tolist() for answer in answers] == [expected([7], 3, salt=9), expected([8], 3, salt=9)]
        assert all(set(answer.version.tolist()) == {1} for answer in answers)


class Theirs:
    """A server with another owner, who restarts it at any time."""

    def __init__(self, model: Path) -> None:
        program, port = Path(__file__).with_name("stand_in.py"), find_free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-I", str(program), "--model", str(model), "--port", str(port)]
        self.begin()

    def begin(self) -> None:
        """Start it, and return when it answers."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        until(self._answers)

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()

    def be(self, **how: object) -> None:
        """Change its behavior."""
        be(self.url, **how)

    def _answers(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/health").status_code == 200
        except httpx2.HTTPError:
            return False


@contextmanager
def theirs(directory: Path) -> Iterator[Theirs]:
    """Start a server with the salt 5 that requires no key."""
    server = Theirs(weights(directory / "theirs", 5))
    try:
        yield server
    finally:
        server.end()


def be(url: str, **how: object) -> None:
    """Change the behavior of a stand-in; its docstring lists the options."""
    httpx2.post(f"{url}/be", json=how).raise_for_status()


def joining(owner: ServerPool, monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """Return the options that join a server of another owner."""
    monkeypatch.setenv("THEIR_KEY", owner.servers[0].address.key)
    return VllmConfig(url=(owner.servers[0].url,), api_key_env="THEIR_KEY")


def test_running_servers_are_joined_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path) as owner:
        config = joining(owner, monkeypatch)
        with start_servers(
            config, tmp_path / "model", None, dtype="float32", device="cpu", logs=tmp_path / "b"
        ) as engine:
            assert ask(engine, [[2]], 4)[0].ids.tolist() == expected([2], 4)
        assert ask(owner, [[2]], 4)[0].ids.tolist() == expected([2], 4)
        assert len(pids(tmp_path)) == 1


def test_a_joined_server_that_its_owner_restarts_gets_the_newest_weights(tmp_path: Path) -> None:
    """The server continues the interrupted answer."""
    new = weights(tmp_path / "new", 11)
    with theirs(tmp_path) as server, ThreadPoolExecutor() as pool:
        server.be(pace=0.05)
        config = VllmConfig(url=(server.url,))
        with start_servers(
            config, tmp_path / "theirs", None, dtype="float32", device="cpu", logs=tmp_path / "b"
        ) as engine:
            asyncio.run(engine.load(new, 3))
            pending = pool.submit(ask, engine, [[2]], 40)
            until(lambda: engine.servers[0].new_tokens > 3)
            server.end()
            server.begin()
            (answer,) = pending.result(60)
            assert answer.ids.tolist() == expected([2], 40, salt=11) and set(answer.version.tolist()) == {3}
            assert ask(engine, [[4]], 4)[0].ids.tolist() == expected([4], 4, salt=11)


def test_new_weights_wait_for_a_joined_server_that_is_away(tmp_path: Path) -> None:
    new, config = weights(tmp_path / "new", 11), {"dtype": "float32", "device": "cpu"}
    with theirs(tmp_path) as server, ThreadPoolExecutor() as pool:
        options = VllmConfig(url=(server.url,))
        with start_servers(options, tmp_path / "theirs", None, logs=tmp_path / "b", **config) as engine:
            server.end()  # no health check has failed yet
            (replica,) = engine.replicas
            patience, replica.start_timeout = replica.start_timeout, 0.1
            with pytest.raises(EngineError, match="No server is up to take the new weights"):
                asyncio.run(engine.load(new, 1))
            replica.start_timeout = patience
            loading = pool.submit(asyncio.run, engine.load(new, 2))
            server.begin()
            loading.result(60)
            assert ask(engine, [[4]], 4)[0].ids.tolist() == expected([4], 4, salt=11)


def test_an_answer_that_a_server_aborts_by_itself_is_continued(tmp_path: Path) -> None:
    with served(tmp_path) as engine:
        asyncio.run(engine.run_on_all(lambda server: server.post("/be", {"gives_up": 2})))
        answers = ask(engine, [[3], [4], [5]], 20)
        assert [answer.ids.tolist() for answer in answers] == [expected([n], 20) for n in (3, 4, 5)]
        assert {answer.finish_reason for answer in answers} == {"length"}
        assert engine.stats().reduce()["engine/requests_resumed"] == 2


def test_no_server_outlives_its_owner(tmp_path: Path) -> None:
    """The owner is killed at once, without time to end anything."""
    program = (
        "import sys, time; from pathlib import Path; from tests.rollout.test_server_pool import served\n"
        "with served(Path(sys.argv[1]), replicas=2): print('there', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None and b"there\n" in owner.stdout, "a slow start prints its progress first"
        servers = pids(tmp_path)
        assert len(servers) == 2
    finally:
        owner.kill()
        owner.wait()
    assert all(gone(pid, 60) for pid in servers)


def test_each_option_is_on_the_command_line(tmp_path: Path) -> None:
    shape = ModelShape.read(weights(tmp_path / "model", 0))

    def command(
        node: int = 0,
        device: Any = "cuda",
        enable_sleep: bool = False,
        adapters: AdapterSpec | None = None,
        kind: type[ServerConfig] = VllmConfig,
        recording: Recording = LOGPROBS_ALONE,
        **options: Any,
    ) -> tuple[str, dict[str, str]]:
        config = kind(**options)
        requested: dict[str, Any] = {"enable_sleep": enable_sleep, "adapters": adapters}
        common = LaunchSpec(config, tmp_path / "model", Path("python"), "bfloat16", device, **requested)
        launch = launch_specs(common, shape)[-1]
        backend = config.create_backend(recording=recording)
        return " ".join(backend.command(launch, node)), backend.environment_variables(launch)

    assert "--max-num-seqs 7" in command(max_num_seqs=7)[0]
    assert "--max-num-seqs" not in command(max_num_seqs=None)[0], "the server has its own"
    assert "--tensor-parallel-size 2" in command(tensor_parallel=2)[0]
    assert "--gpu-memory-utilization 0.5" in command(gpu_memory_utilization=0.5)[0]
    assert "--kv-cache-memory-bytes 1073741824" in command(kv_gib=1)[0]
    assert command(server_args=("--extra", "1"))[0].endswith("--extra 1")
    assert command(replicas=2, tensor_parallel=2, devices=(4, 5, 6, 7))[1]["CUDA_VISIBLE_DEVICES"] == "6,7"
    line, variables = command(device="cpu")
    assert variables["CUDA_VISIBLE_DEVICES"] == "" and "--enforce-eager" in line and "-rotary_embedding" in line
    assert "-rotary_embedding" not in command()[0]
    assert "--enable-sleep-mode" in command(enable_sleep=True)[0]
    assert "--enable-memory-saver" in command(enable_sleep=True, kind=SglangConfig)[0]
    nodes = {"nodes": 2, "tensor_parallel": 4, "rendezvous": "10.0.0.1:2900"}
    first, other = command(**nodes)[0], command(node=1, **nodes)[0]
    assert "--nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 2900" in first and "--headless" not in first
    assert "--node-rank 1" in other and "--headless" in other
    line, variables = command(adapters=AdapterSpec(3, 9))
    assert "--max-lora-rank 16 --enable-lora --max-loras 3 --max-cpu-loras 6" in line
    assert variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1" and "--enable-lora" not in command()[0]
    line, _ = command(adapters=AdapterSpec(3, 9, ("q_proj", "v_proj")), kind=SglangConfig)
    assert "--max-lora-rank 9 --enable-lora --max-loras-per-batch 3 --lora-target-modules q_proj v_proj" in line
    line, _ = command(recording=Recording(512, 32))
    assert "--max-logprobs 33" in line and "--return-sampling-mask" in line
    assert "--max-logprobs 20" in command()[0] and "--return-sampling-mask" not in command()[0]
    line, _ = command(recording=Recording(3000), kind=SglangConfig)
    assert "--sampling-mask-max-tokens 6000" in line
    assert "--sampling-mask" not in command(recording=Recording(512), kind=SglangConfig)[0]
    with pytest.raises(ConfigError, match=r"adapter rank is 513, and vLLM takes 512 at most. Lower `lora\.rank`"):
        command(adapters=AdapterSpec(3, 513))


def test_a_python_without_the_memory_saver_is_refused_before_a_start(tmp_path: Path) -> None:
    backend = SglangConfig().create_backend()
    for code in (0, 1):
        python = tmp_path / f"python{code}"
        python.write_text(f'#!/bin/sh\ntest "$2" = "import torch_memory_saver" && exit {code}\n')
        python.chmod(0o755)
        refused = pytest.raises(ConfigError, match=r"python1 cannot import it\. Install it") if code else nullcontext()
        with refused:
            backend.check_sleep(python)


def test_conflicting_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"would sample from another model\. Set `rollout\.weight_transport=shm`"):
        VllmConfig().check_experts("cpu")
    for config, device in (
        (VllmConfig(weight_transport="shm"), "cpu"),
        (VllmConfig(), "cuda"),
        (SglangConfig(), "cpu"),
    ):
        config.check_experts(device)
    with pytest.raises(ConfigError, match=r"rollout\.replicas` is for servers to start"):
        VllmConfig(url="http://127.0.0.1:1", replicas=2)
    with pytest.raises(ConfigError, match="names 1 GPUs"):
        VllmConfig(devices=(0,), tensor_parallel=2)
    with pytest.raises(ConfigError, match="share one replica"):
        VllmConfig(nodes=2, tensor_parallel=3)
    with pytest.raises(ConfigError, match=r"several `rollout\.nodes` meet"):
        VllmConfig(rendezvous="10.0.0.1:2")

"""Rollouts of several turns: exact tokens, rewards of turns, and an outcome for every failure of an environment."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from etude import call_task
from etude.chat import ChatRenderer, RenderedPrompt, Tokenizer
from etude.chat import toolbox as calls
from etude.data.samples import build_samples
from etude.errors import ConfigError, EngineError, EnvError
from etude.images import PromptImages
from etude.protocols import Ids
from etude.recipes.collect.environment import EnvConfig, Environment
from etude.recipes.collect.episodes import EpisodePlayer
from etude.recipes.collect.player import EnginePlayer
from etude.recipes.collect.rollouts import PlayedRollout
from etude.records import Completion, Outcome, SamplingParams, Task
from etude.rewards import EnvironmentReward, Judge
from tests.learn.games import make_tokenizer
from tests.recipes import partners
from tests.worlds import make_tokenizer as make_plain

PARTNERS = "tests.recipes.partners"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
MORE = 'ijklmnopqrstuvwxyzE`:., +-=\n{}"<>_/'


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    partners.stop.clear()
    partners.Odd.closed.clear()
    partners.Odd.threads.clear()
    yield
    partners.stop.set()


@pytest.fixture(scope="module")
def without_template(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """The renderer of a model without a chat template."""
    directory = tmp_path_factory.mktemp("plain")
    make_plain(directory)
    return ChatRenderer(Tokenizer.load(directory))


@pytest.fixture(scope="module")
def with_template(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """The renderer of a model whose chat template has tool calls."""
    return ChatRenderer(make_tokenizer(tmp_path_factory.mktemp("spoken"), MORE))


class Speaker:
    """An engine whose script gives the answer to each prompt: a text, an exception to raise, or seconds to wait."""

    def __init__(self, chat: ChatRenderer, script: Callable[[str, int], Any]) -> None:
        self._tokenizer, self._script = chat.tokenizer, script
        self.asked: list[SamplingParams] = []
        self.answering = self.most = 0

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        """Return the scripted answer, up to the allowed length."""
        assert on_start is not None
        on_start()
        self.asked.append(sampling)
        self.answering += 1
        self.most = max(self.most, self.answering)
        try:
            answer = self._script(self._tokenizer.decode(prompt, keep_special_tokens=True), len(self.asked))
            await asyncio.sleep(answer if isinstance(answer, float) else 0)
        finally:
            self.answering -= 1
        if isinstance(answer, Exception):
            raise answer
        ids = [*self._tokenizer.encode(str(answer)), self._tokenizer.eos_ids[0]]
        is_cut = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        text = self._tokenizer.decode(ids)
        return Completion(ids, np.full(len(ids), -0.5), np.zeros(len(ids), int), "length" if is_cut else "stop", text)


def play(
    chat: ChatRenderer,
    script: Callable[[str, int], Any] | Speaker,
    task: Task,
    *,
    reward: Any = None,
    longest: int = 200,
    timeout: float = 5.0,
    tokens: int = 60,
    environment_timeout: float = 5.0,
    **options: Any,
) -> PlayedRollout:
    """Play one attempt at a task."""
    engine = script if isinstance(script, Speaker) else Speaker(chat, script)

    async def run_play() -> PlayedRollout:
        with Judge(reward or EnvironmentReward()) as judge:
            episodes = EpisodePlayer(Environment(EnvConfig(**options, timeout=environment_timeout)), chat, longest)
            player = EnginePlayer(
                render=chat.render_prompt,
                engine=engine,
                judge=judge,
                timeout=timeout,
                max_concurrency=8,
                episodes=episodes,
            )
            return await player.play(task, SamplingParams(max_tokens=tokens), lambda turn: 100 + turn)

    return asyncio.run(run_play())


def make_task(prompt: Any = "1+1=", **fields: Any) -> Task:
    """Return a task."""
    return Task(3, {"prompt": prompt, "row": 0, **fields})


ECHO = f"{PARTNERS}:Echo"


# -- turns ------------------------------------------------------------------------------------------------------------


def test_turns_continue_the_exact_tokens_and_each_has_its_reward(without_template: ChatRenderer) -> None:
    script = {1: "12ab", 2: "x", 3: "7"}
    speaker = Speaker(without_template, lambda _, n: script[n])
    attempt = play(without_template, speaker, make_task(), path=ECHO)
    assert attempt.verdict.outcome is Outcome.SUCCEEDED and not attempt.truncated
    assert [turn.reward for turn in attempt.turns] == [
        0.25,
        0.0,
        0.125,
    ] and attempt.total == attempt.turn_rewards == 0.375
    assert [params.seed for params in speaker.asked] == [100, 101, 102]
    texts = [without_template.tokenizer.decode(turn.prompt, keep_special_tokens=True) for turn in attempt.turns]
    assert texts == ["1+1=", "1+1=12ab<end>12a:", "1+1=12ab<end>12a:x<end>x:"]
    (row,) = build_samples(attempt.turns, 0)
    assert without_template.tokenizer.decode(row.ids[row.action], keep_special_tokens=True) == "12ab<end>x<end>7<end>"
    assert row.reward is not None and row.reward[row.action].tolist() == [0, 0, 0, 0, 0.25, 0, 0, 0, 0.125]
    assert row.turn[row.action].tolist() == [0] * 5 + [1] * 2 + [2] * 2


def test_too_many_turns_truncate_a_rollout(without_template: ChatRenderer) -> None:
    attempt = play(without_template, lambda *_: "1", make_task(), path=ECHO, kwargs={"turns": 9}, max_turns=4)
    assert len(attempt.turns) == 4 and attempt.truncated and attempt.verdict.outcome is Outcome.SUCCEEDED
    assert attempt.turn_rewards == 0.5, "the last answer has a reward too"


def test_a_full_context_truncates_a_rollout(without_template: ChatRenderer) -> None:
    speaker = Speaker(without_template, lambda *_: "123456789")
    attempt = play(without_template, speaker, make_task(), path=ECHO, kwargs={"turns": 9}, max_tokens=30)
    assert [params.max_tokens for params in speaker.asked] == [26, 12]
    assert [len(turn.completion.ids) for turn in attempt.turns] == [10, 10] and attempt.truncated
    assert len(attempt.turns[-1].prompt) + 10 <= 30 < len(attempt.turns[-1].prompt) + 10 + 4
    (first,) = play(without_template, lambda *_: "1" * 90, make_task(), path=ECHO, longest=20).turns
    assert len(first.prompt) + len(first.completion.ids) == 20, "an answer ends where the context ends"


def test_a_prompt_that_fills_the_context_is_a_failure(without_template: ChatRenderer) -> None:
    attempt = play(without_template, lambda *_: "1", make_task("1" * 40), path=ECHO, max_tokens=40)
    assert not attempt.turns and attempt.verdict.outcome is Outcome.FAILED
    assert "The first prompt of task 3 has 40 tokens, and a rollout may have 40 in all" in attempt.verdict.error


def test_a_last_answer_that_is_cut_off_truncates_a_rollout(without_template: ChatRenderer) -> None:
    assert play(without_template, lambda *_: "123456", make_task(), path=ECHO, kwargs={"turns": 1}, tokens=4).truncated
    assert not play(without_template, lambda *_: "123", make_task(), path=ECHO, kwargs={"turns": 1}, tokens=4).truncated
    cut_in_the_middle = play(
        without_template, lambda _, n: "123456" if n == 1 else "1", make_task(), path=ECHO, tokens=4
    )
    assert not cut_in_the_middle.truncated and len(cut_in_the_middle.turns) == 3


def test_states_are_the_observations(without_template: ChatRenderer) -> None:
    def states(*script: str) -> list[int | None]:
        return [
            turn.anchor for turn in play(without_template, lambda _, n: script[n - 1], make_task(), path=ECHO).turns
        ]

    first, second = states("ab", "cd", "ef"), states("ab", "x", "ab")
    assert first[:2] == second[:2] and first[2] != second[2] and len(set(first)) == 3


# -- tools ------------------------------------------------------------------------------------------------------------

QUESTION = [{"role": "user", "content": "2+3"}]
TOOLS = (f"{PARTNERS}:add",)


def right(task: Task, answer: str) -> float:
    return float(answer == "5")


def test_a_tool_call_is_executed_and_the_last_answer_judged(with_template: ChatRenderer) -> None:
    def script(prompt: str, n: int) -> str:
        return prompt.split("<tool>")[1].split("<end>")[0] if "<tool>" in prompt else CALL

    attempt = play(with_template, script, make_task(QUESTION), tools=TOOLS, reward=right)
    assert len(attempt.turns) == 2 and attempt.verdict.reward == attempt.total == 1.0 and not attempt.verdict.parts
    assert (attempt.calls, attempt.failed_calls, attempt.truncated) == (1, 0, False)
    whole = with_template.tokenizer.decode(attempt.turns[1].prompt, keep_special_tokens=True)
    assert whole == f"<user>2+3<end><model>{CALL}<end><tool>5<end><model>"
    assert len(build_samples(attempt.turns, 0)) == 1


def test_the_error_of_a_tool_call_is_shown_to_the_model(with_template: ChatRenderer) -> None:
    wrong = CALL.replace("2,", '"z",')
    script = {1: wrong, 2: wrong, 3: "5"}
    attempt = play(with_template, lambda _, n: script[n], make_task(QUESTION), tools=TOOLS, reward=right, longest=900)
    assert (attempt.calls, attempt.failed_calls, attempt.total) == (2, 2, 1.0)
    assert "Error: `add` cannot be called with" in with_template.tokenizer.decode(attempt.turns[1].prompt)


def test_a_tool_call_in_the_last_turn_is_not_executed(with_template: ChatRenderer) -> None:
    attempt = play(with_template, lambda *_: CALL, make_task(QUESTION), tools=TOOLS, reward=right, max_turns=2)
    assert len(attempt.turns) == 2 and attempt.truncated and attempt.calls == 1


def test_tools_can_be_combined_with_an_environment(with_template: ChatRenderer) -> None:
    """Tool calls are executed, and the environment gets all other answers."""
    script = {1: CALL, 2: "5", 3: "x"}
    attempt = play(with_template, lambda _, n: script[n], make_task(QUESTION), tools=TOOLS, path=f"{PARTNERS}:Talks")
    assert [turn.reward for turn in attempt.turns] == [None, 1.0, 0.0] and attempt.total == 1.0


def test_tools_of_the_options_and_of_the_environment_are_a_failure(with_template: ChatRenderer) -> None:
    attempt = play(with_template, lambda *_: "5", make_task(QUESTION), tools=TOOLS, path=f"{PARTNERS}:Offers")
    assert attempt.verdict.outcome is Outcome.FAILED and "offers its own tools" in attempt.verdict.error


def test_tools_with_a_text_prompt_are_a_failure(with_template: ChatRenderer) -> None:
    attempt = play(with_template, lambda *_: "5", make_task("2+3"), tools=TOOLS, reward=right)
    assert "A rollout that begins with text has tools" in attempt.verdict.error


# -- rewards ----------------------------------------------------------------------------------------------------------


def test_named_rewards_are_parts(without_template: ChatRenderer) -> None:
    attempt = play(without_template, lambda *_: "1", make_task(act="end", at=2), path=f"{PARTNERS}:Odd")
    assert [turn.reward for turn in attempt.turns] == [0.25, 1.5] and attempt.total == 1.75
    assert attempt.verdict.parts == {"environment": 0.25, "won": 1.0, "style": 0.5} and attempt.verdict.reward == 0.0


def test_the_reward_function_also_judges_the_last_answer(without_template: ChatRenderer) -> None:
    task = make_task(act="end", at=2)
    attempt = play(
        without_template, lambda _, n: str(n), task, path=f"{PARTNERS}:Odd", reward=lambda task, answer: float(answer)
    )
    assert attempt.verdict.reward == 2.0 and attempt.total == 3.75
    assert attempt.verdict.parts == {"environment": 0.25, "won": 1.0, "style": 0.5, "answer": 2.0}
    attempt = play(
        without_template,
        lambda *_: "1",
        make_task(),
        path=ECHO,
        reward=lambda task, answer: {"environment": 1.0, "a": 2.0},
    )
    assert attempt.verdict.parts == {"environment": 1.375, "a": 2.0} and attempt.total == 3.375


def test_rewards_without_names_have_no_parts(without_template: ChatRenderer) -> None:
    assert play(without_template, lambda *_: "1", make_task(), path=ECHO).verdict.parts == {}


def test_a_failed_judge_is_a_failure_of_the_attempt(without_template: ChatRenderer) -> None:
    def never(task: Task, answer: str) -> float:
        raise ValueError("no judge today")

    attempt = play(without_template, lambda *_: "1", make_task(), path=ECHO, reward=never)
    assert attempt.verdict.outcome is Outcome.FAILED and len(attempt.turns) == 3


# -- failures of environments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            "crash",
            r"The environment tests\.recipes\.partners:Odd failed on task 3: .* failed: KeyError: 'board' \(part",
        ),
        ("leave", r"RuntimeError: SystemExit was raised \(partners\.py"),
        ("text", "returned a value of type str; it returns an Observation"),
        (
            "typo",
            "The observation shown on task 3 is invalid: .* a list of texts and images; a value of type int was given",
        ),
        ("half", "unpaired surrogate"),
        ("wrong", "gave 'white' for `role`"),
    ],
)
@pytest.mark.parametrize("at", [0, 2])
def test_an_error_of_an_environment_is_an_outcome(
    act: str, message: str, at: int, without_template: ChatRenderer
) -> None:
    attempt = play(without_template, lambda *_: "1", make_task(act=act, at=at), path=f"{PARTNERS}:Odd")
    assert attempt.verdict.outcome is Outcome.FAILED and len(attempt.turns) == at
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(attempt.verdict.error)
    assert partners.Odd.closed == [3], "the environment is always closed"
    assert len(set(partners.Odd.threads)) == 1, "all calls are on one thread"


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("none", "`step` shows nothing, and does not say that it is over"),
        ("unpaid", "the reward of `step` cannot be used: .*nan"),
        ("chat", "A rollout that began with text got messages"),
    ],
)
def test_an_invalid_result_of_a_step_is_an_outcome(act: str, message: str, without_template: ChatRenderer) -> None:
    attempt = play(without_template, lambda *_: "1", make_task(act=act, at=1), path=f"{PARTNERS}:Odd")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(attempt.verdict.error)


def test_an_environment_that_is_over_after_reset_is_reported(without_template: ChatRenderer) -> None:
    attempt = play(without_template, lambda *_: "1", make_task(act="end", at=0), path=f"{PARTNERS}:Odd")
    assert "`reset` says that it is over" in attempt.verdict.error


@pytest.mark.parametrize("act", ["hang", "late", "stubborn"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_step_that_takes_too_long_is_an_outcome(
    act: str, at: int, without_template: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_task, "CANCEL_S", 0.05)
    began = time.monotonic()
    attempt = play(
        without_template, lambda *_: "1", make_task(act=act, at=at), path=f"{PARTNERS}:Odd", environment_timeout=0.1
    )
    assert time.monotonic() - began < 20
    assert attempt.verdict.outcome is Outcome.TIMED_OUT and len(attempt.turns) == at
    assert f"longer than `env.timeout` = 0.1 seconds for `{'step' if at else 'reset'}`" in attempt.verdict.error


@pytest.mark.parametrize("env", ["Odd", "OddlyClosed"])
def test_an_environment_that_hangs_is_closed_when_its_step_has_ended(env: str, without_template: ChatRenderer) -> None:
    try:
        attempt = play(
            without_template,
            lambda *_: "1",
            make_task(act="hang", at=2),
            path=f"{PARTNERS}:{env}",
            environment_timeout=0.1,
        )
        assert attempt.verdict.outcome is Outcome.TIMED_OUT and partners.Odd.closed == []
    finally:
        partners.stop.set()
    until = time.monotonic() + 10
    while not partners.Odd.closed and time.monotonic() < until:
        time.sleep(0.01)
    assert partners.Odd.closed == [3]


def test_an_environment_can_truncate_a_rollout(without_template: ChatRenderer) -> None:
    attempt = play(without_template, lambda *_: "1", make_task(act="cut", at=2), path=f"{PARTNERS}:Odd")
    assert attempt.truncated and attempt.verdict.outcome is Outcome.SUCCEEDED and attempt.turn_rewards == 0.25


def test_an_answer_that_takes_too_long_ends_the_rollout(without_template: ChatRenderer) -> None:
    attempt = play(
        without_template, lambda _, n: 30.0 if n == 2 else "1", make_task(), path=f"{PARTNERS}:Odd", timeout=0.1
    )
    assert attempt.verdict.outcome is Outcome.TIMED_OUT and "`collect.timeout` = 0.1" in attempt.verdict.error
    assert len(attempt.turns) == 1 and partners.Odd.closed == [3]


def test_an_engine_error_stops_the_run_and_closes_the_environment(without_template: ChatRenderer) -> None:
    with pytest.raises(EngineError, match="out of memory"):
        play(without_template, lambda *_: EngineError("out of memory"), make_task(), path=f"{PARTNERS}:Odd")
    assert partners.Odd.closed == [3]


def test_messages_for_a_model_without_a_template_stop_the_run(without_template: ChatRenderer) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        play(without_template, lambda *_: "1", make_task(QUESTION), path=f"{PARTNERS}:Talks")


def test_environments_that_hang_for_ever_stop_the_run(
    without_template: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_ABANDONED_THREADS", 2)
    with pytest.raises(EnvError, match="took too long and still run"):
        for _ in range(4):
            play(
                without_template,
                lambda *_: "1",
                make_task(act="hang", at=1),
                path=f"{PARTNERS}:Odd",
                environment_timeout=0.05,
            )


@pytest.mark.parametrize("name", ["Waits", "make_echo", "Blocks"])
def test_environments_with_coroutines_functions_or_blocking_code_are_played(
    name: str, without_template: ChatRenderer
) -> None:
    attempt = play(without_template, lambda *_: "1", make_task(), path=f"{PARTNERS}:{name}")
    assert attempt.verdict.outcome is Outcome.SUCCEEDED and attempt.turn_rewards == 0.125 * len(attempt.turns)


def test_many_rollouts_do_not_wait_for_each_others_environments(without_template: ChatRenderer) -> None:
    """Each step sleeps on its own thread, and the number of concurrent steps is limited."""
    engine = Speaker(without_template, lambda *_: "1")

    async def run_play(at_once: int) -> float:
        with Judge(EnvironmentReward()) as judge:
            config = EnvConfig(path=f"{PARTNERS}:Blocks", max_concurrency=at_once)
            player = EnginePlayer(
                render=lambda _: RenderedPrompt(np.zeros(1, np.int32)),
                engine=engine,
                judge=judge,
                timeout=5.0,
                max_concurrency=64,
                episodes=EpisodePlayer(Environment(config), without_template, 200),
            )
            began = time.monotonic()
            tries = (player.play(make_task(), SamplingParams(max_tokens=4), lambda turn: turn) for _ in range(12))
            assert {len(attempt.turns) for attempt in await asyncio.gather(*tries)} == {3}
            return time.monotonic() - began

    assert asyncio.run(run_play(12)) < 0.9 * asyncio.run(run_play(2))
    assert threading.active_count() < 40


# -- one answer -------------------------------------------------------------------------------------------------------


def test_without_an_environment_an_attempt_is_one_answer(without_template: ChatRenderer) -> None:
    async def run_play() -> PlayedRollout:
        with Judge(lambda task, answer: float(len(answer))) as judge:
            engine = Speaker(without_template, lambda *_: "123")
            player = EnginePlayer(
                render=without_template.render_prompt,
                engine=engine,
                judge=judge,
                timeout=1.0,
                max_concurrency=1,
                episodes=None,
            )
            return await player.play(make_task(), SamplingParams(max_tokens=9), lambda turn: 7)

    attempt = asyncio.run(run_play())
    assert len(attempt.turns) == 1 and attempt.total == 3.0 and attempt.turns[0].anchor is None

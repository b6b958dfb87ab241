"""Rollouts of several turns: exact tokens, rewards in their turns, and an outcome for whatever the other side does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from etude.chat import ChatRenderer, Tokenizer
from etude.chat import toolbox as calls
from etude.data.samples import build_samples
from etude.errors import ConfigError, EngineError, EnvError
from etude.protocols import Ids
from etude.recipes.collect.environment import EnvConfig
from etude.recipes.collect.episodes import EpisodePlayer
from etude.recipes.collect.player import EnginePlayer
from etude.recipes.collect.rollouts import PlayedRollout
from etude.recipes.collect.sampling import SamplingConfig
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
def plain(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """A model without a chat template."""
    directory = tmp_path_factory.mktemp("plain")
    make_plain(directory)
    return ChatRenderer(Tokenizer.load(directory))


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """A model with a chat template that knows calls."""
    return ChatRenderer(make_tokenizer(tmp_path_factory.mktemp("spoken"), MORE))


class Speaker:
    """An engine that says what it is told to after a prompt's text, or raises it, or takes so many seconds."""

    def __init__(self, chat: ChatRenderer, says: Callable[[str, int], Any]) -> None:
        self._tokenizer, self._says = chat.tokenizer, says
        self.asked: list[SamplingParams] = []
        self.answering = self.most = 0

    async def generate(
        self, prompt: Ids, sampling: SamplingParams, *, on_start: Callable[[], None] | None = None
    ) -> Completion:
        """What it says, up to the length that is allowed."""
        assert on_start is not None
        on_start()
        self.asked.append(sampling)
        self.answering += 1
        self.most = max(self.most, self.answering)
        try:
            said = self._says(self._tokenizer.decode(prompt, keep_special_tokens=True), len(self.asked))
            await asyncio.sleep(said if isinstance(said, float) else 0)
        finally:
            self.answering -= 1
        if isinstance(said, Exception):
            raise said
        ids = [*self._tokenizer.encode(str(said)), self._tokenizer.eos_ids[0]]
        cut = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        text = self._tokenizer.decode(ids)
        return Completion(ids, np.full(len(ids), -0.5), np.zeros(len(ids), int), "length" if cut else "stop", text)


def play(
    chat: ChatRenderer,
    says: Callable[[str, int], Any] | Speaker,
    task: Task,
    *,
    reward: Any = None,
    longest: int = 200,
    timeout: float = 5.0,
    tokens: int = 60,
    patience: float = 5.0,
    **options: Any,
) -> PlayedRollout:
    """One attempt at a task."""
    engine = says if isinstance(says, Speaker) else Speaker(chat, says)

    async def act() -> PlayedRollout:
        with Judge(reward or EnvironmentReward()) as judge:
            episodes = EpisodePlayer(EnvConfig(**options, timeout=patience), chat, longest)
            player = EnginePlayer(
                prompt_ids=lambda task: chat.prompt_ids(str(task.fields["prompt"])),
                engine=engine,
                judge=judge,
                timeout=timeout,
                max_concurrency=8,
                episodes=episodes,
            )
            return await player.play(task, SamplingConfig(max_tokens=tokens), lambda turn: 100 + turn)

    return asyncio.run(act())


def make_task(prompt: Any = "1+1=", **fields: Any) -> Task:
    """A task."""
    return Task(3, {"prompt": prompt, "row": 0, **fields})


ECHO = f"{PARTNERS}:Echo"


# -- turns ------------------------------------------------------------------------------------------------------------


def test_turns_go_on_from_the_very_tokens_and_each_is_paid(plain: ChatRenderer) -> None:
    says = {1: "12ab", 2: "x", 3: "7"}
    speaker = Speaker(plain, lambda _, n: says[n])
    attempt = play(plain, speaker, make_task(), path=ECHO)
    assert attempt.verdict.outcome is Outcome.SUCCEEDED and not attempt.truncated
    assert [turn.reward for turn in attempt.turns] == [
        0.25,
        0.0,
        0.125,
    ] and attempt.total == attempt.turn_rewards == 0.375
    assert [params.seed for params in speaker.asked] == [100, 101, 102]
    texts = [plain.tokenizer.decode(turn.prompt, keep_special_tokens=True) for turn in attempt.turns]
    assert texts == ["1+1=", "1+1=12ab<end>12a:", "1+1=12ab<end>12a:x<end>x:"]
    (row,) = build_samples(attempt.turns, 0)
    assert plain.tokenizer.decode(row.ids[row.action], keep_special_tokens=True) == "12ab<end>x<end>7<end>"
    assert row.reward is not None and row.reward[row.action].tolist() == [0, 0, 0, 0, 0.25, 0, 0, 0, 0.125]
    assert row.turn[row.action].tolist() == [0] * 5 + [1] * 2 + [2] * 2


def test_too_many_turns_truncate_a_rollout(plain: ChatRenderer) -> None:
    attempt = play(plain, lambda *_: "1", make_task(), path=ECHO, kwargs={"turns": 9}, max_turns=4)
    assert len(attempt.turns) == 4 and attempt.truncated and attempt.verdict.outcome is Outcome.SUCCEEDED
    assert attempt.turn_rewards == 0.5, "the last answer is paid for as well"


def test_what_leaves_no_room_truncates_a_rollout(plain: ChatRenderer) -> None:
    speaker = Speaker(plain, lambda *_: "123456789")
    attempt = play(plain, speaker, make_task(), path=ECHO, kwargs={"turns": 9}, max_tokens=30)
    assert [params.max_tokens for params in speaker.asked] == [26, 12]
    assert [len(turn.completion.ids) for turn in attempt.turns] == [10, 10] and attempt.truncated
    assert len(attempt.turns[-1].prompt) + 10 <= 30 < len(attempt.turns[-1].prompt) + 10 + 4
    (first,) = play(plain, lambda *_: "1" * 90, make_task(), path=ECHO, longest=20).turns
    assert len(first.prompt) + len(first.completion.ids) == 20, "an answer ends where the room does"


def test_a_beginning_that_leaves_no_room_is_a_failure(plain: ChatRenderer) -> None:
    attempt = play(plain, lambda *_: "1", make_task("1" * 40), path=ECHO, max_tokens=40)
    assert not attempt.turns and attempt.verdict.outcome is Outcome.FAILED
    assert "The first prompt of task 3 has 40 tokens, and a rollout may have 40 in all" in attempt.verdict.error


def test_an_answer_cut_off_in_the_end_truncates_a_rollout(plain: ChatRenderer) -> None:
    assert play(plain, lambda *_: "123456", make_task(), path=ECHO, kwargs={"turns": 1}, tokens=4).truncated
    assert not play(plain, lambda *_: "123", make_task(), path=ECHO, kwargs={"turns": 1}, tokens=4).truncated
    cut_in_the_middle = play(plain, lambda _, n: "123456" if n == 1 else "1", make_task(), path=ECHO, tokens=4)
    assert not cut_in_the_middle.truncated and len(cut_in_the_middle.turns) == 3


def test_states_are_what_was_shown(plain: ChatRenderer) -> None:
    def states(*says: str) -> list[int | None]:
        return [turn.anchor for turn in play(plain, lambda _, n: says[n - 1], make_task(), path=ECHO).turns]

    one, other = states("ab", "cd", "ef"), states("ab", "x", "ab")
    assert one[:2] == other[:2] and one[2] != other[2] and len(set(one)) == 3


# -- tools ------------------------------------------------------------------------------------------------------------

QUESTION = [{"role": "user", "content": "2+3"}]
TOOLS = (f"{PARTNERS}:add",)


def right(task: Task, answer: str) -> float:
    return float(answer == "5")


def test_a_call_is_made_and_the_last_answer_judged(spoken: ChatRenderer) -> None:
    def says(prompt: str, n: int) -> str:
        return prompt.split("<tool>")[1].split("<end>")[0] if "<tool>" in prompt else CALL

    attempt = play(spoken, says, make_task(QUESTION), tools=TOOLS, reward=right)
    assert len(attempt.turns) == 2 and attempt.verdict.reward == attempt.total == 1.0 and not attempt.verdict.parts
    assert (attempt.calls, attempt.failed_calls, attempt.truncated) == (1, 0, False)
    whole = spoken.tokenizer.decode(attempt.turns[1].prompt, keep_special_tokens=True)
    assert whole == f"<user>2+3<end><model>{CALL}<end><tool>5<end><model>"
    assert len(build_samples(attempt.turns, 0)) == 1


def test_what_goes_wrong_with_a_call_is_shown(spoken: ChatRenderer) -> None:
    wrong = CALL.replace("2,", '"z",')
    says = {1: wrong, 2: wrong, 3: "5"}
    attempt = play(spoken, lambda _, n: says[n], make_task(QUESTION), tools=TOOLS, reward=right, longest=900)
    assert (attempt.calls, attempt.failed_calls, attempt.total) == (2, 2, 1.0)
    assert "Error: `add` cannot be called with" in spoken.tokenizer.decode(attempt.turns[1].prompt)


def test_a_call_whose_result_is_never_read_is_not_made(spoken: ChatRenderer) -> None:
    attempt = play(spoken, lambda *_: CALL, make_task(QUESTION), tools=TOOLS, reward=right, max_turns=2)
    assert len(attempt.turns) == 2 and attempt.truncated and attempt.calls == 1


def test_tools_may_stand_before_an_environment(spoken: ChatRenderer) -> None:
    """Calls are made; every other answer is the environment's."""
    says = {1: CALL, 2: "5", 3: "x"}
    attempt = play(spoken, lambda _, n: says[n], make_task(QUESTION), tools=TOOLS, path=f"{PARTNERS}:Talks")
    assert [turn.reward for turn in attempt.turns] == [None, 1.0, 0.0] and attempt.total == 1.0


def test_tools_in_two_places_are_a_failure(spoken: ChatRenderer) -> None:
    attempt = play(spoken, lambda *_: "5", make_task(QUESTION), tools=TOOLS, path=f"{PARTNERS}:Offers")
    assert attempt.verdict.outcome is Outcome.FAILED and "offers its own tools" in attempt.verdict.error


def test_tools_and_text_do_not_go_together(spoken: ChatRenderer) -> None:
    attempt = play(spoken, lambda *_: "5", make_task("2+3"), tools=TOOLS, reward=right)
    assert "A rollout that begins with text has tools" in attempt.verdict.error


# -- rewards ----------------------------------------------------------------------------------------------------------


def test_named_rewards_are_parts(plain: ChatRenderer) -> None:
    attempt = play(plain, lambda *_: "1", make_task(act="end", at=2), path=f"{PARTNERS}:Odd")
    assert [turn.reward for turn in attempt.turns] == [0.25, 1.5] and attempt.total == 1.75
    assert attempt.verdict.parts == {"environment": 0.25, "won": 1.0, "style": 0.5} and attempt.verdict.reward == 0.0


def test_the_reward_function_judges_the_last_answer_besides(plain: ChatRenderer) -> None:
    task = make_task(act="end", at=2)
    attempt = play(plain, lambda _, n: str(n), task, path=f"{PARTNERS}:Odd", reward=lambda task, answer: float(answer))
    assert attempt.verdict.reward == 2.0 and attempt.total == 3.75
    assert attempt.verdict.parts == {"environment": 0.25, "won": 1.0, "style": 0.5, "answer": 2.0}
    attempt = play(
        plain, lambda *_: "1", make_task(), path=ECHO, reward=lambda task, answer: {"environment": 1.0, "a": 2.0}
    )
    assert attempt.verdict.parts == {"environment": 1.375, "a": 2.0} and attempt.total == 3.375


def test_what_is_paid_without_a_name_alone_has_no_parts(plain: ChatRenderer) -> None:
    assert play(plain, lambda *_: "1", make_task(), path=ECHO).verdict.parts == {}


def test_a_judge_that_fails_is_the_attempt_s_failure(plain: ChatRenderer) -> None:
    def never(task: Task, answer: str) -> float:
        raise ValueError("no judge today")

    attempt = play(plain, lambda *_: "1", make_task(), path=ECHO, reward=never)
    assert attempt.verdict.outcome is Outcome.FAILED and len(attempt.turns) == 3


# -- whatever the other side does -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (
            "crash",
            r"The environment tests\.recipes\.partners:Odd failed on task 3: .* failed: KeyError: 'board' \(part",
        ),
        ("leave", r"RuntimeError: SystemExit was raised \(partners\.py"),
        ("text", "returned a value of type str; it returns an Observation"),
        (
            "typo",
            "The observation shown on task 3 is invalid: .* text or a list of messages; a value of type int was given",
        ),
        ("half", "unpaired surrogate"),
        ("wrong", "gave 'white' for `role`"),
    ],
)
@pytest.mark.parametrize("at", [0, 2])
def test_what_an_environment_does_wrong_is_an_outcome(act: str, what: str, at: int, plain: ChatRenderer) -> None:
    attempt = play(plain, lambda *_: "1", make_task(act=act, at=at), path=f"{PARTNERS}:Odd")
    assert attempt.verdict.outcome is Outcome.FAILED and len(attempt.turns) == at
    with pytest.raises(AssertionError, match=what):
        raise AssertionError(attempt.verdict.error)
    assert partners.Odd.closed == [3], "it is closed whatever it did"
    assert len(set(partners.Odd.threads)) == 1, "all of it on one thread"


@pytest.mark.parametrize(
    ("act", "what"),
    [
        ("none", "`step` shows nothing, and does not say that it is over"),
        ("unpaid", "the reward of `step` cannot be used: .*nan"),
        ("chat", "A rollout that began with text got messages"),
    ],
)
def test_so_is_what_a_step_does_wrong(act: str, what: str, plain: ChatRenderer) -> None:
    attempt = play(plain, lambda *_: "1", make_task(act=act, at=1), path=f"{PARTNERS}:Odd")
    with pytest.raises(AssertionError, match=what):
        raise AssertionError(attempt.verdict.error)


def test_what_is_over_before_it_began_is_reported(plain: ChatRenderer) -> None:
    attempt = play(plain, lambda *_: "1", make_task(act="end", at=0), path=f"{PARTNERS}:Odd")
    assert "`reset` says that it is over" in attempt.verdict.error


@pytest.mark.parametrize("act", ["hang", "late"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_step_that_takes_too_long_is_an_outcome(act: str, at: int, plain: ChatRenderer) -> None:
    began = time.monotonic()
    attempt = play(plain, lambda *_: "1", make_task(act=act, at=at), path=f"{PARTNERS}:Odd", patience=0.1)
    assert time.monotonic() - began < 5
    assert attempt.verdict.outcome is Outcome.TIMED_OUT and len(attempt.turns) == at
    assert f"longer than `env.timeout` = 0.1 seconds for `{'step' if at else 'reset'}`" in attempt.verdict.error


@pytest.mark.parametrize("env", ["Odd", "OddlyClosed"])
def test_who_hangs_is_closed_when_the_step_has_ended(env: str, plain: ChatRenderer) -> None:
    try:
        attempt = play(plain, lambda *_: "1", make_task(act="hang", at=2), path=f"{PARTNERS}:{env}", patience=0.1)
        assert attempt.verdict.outcome is Outcome.TIMED_OUT and partners.Odd.closed == []
    finally:
        partners.stop.set()
    until = time.monotonic() + 10
    while not partners.Odd.closed and time.monotonic() < until:
        time.sleep(0.01)
    assert partners.Odd.closed == [3]


def test_an_environment_that_cuts_off_truncates(plain: ChatRenderer) -> None:
    attempt = play(plain, lambda *_: "1", make_task(act="cut", at=2), path=f"{PARTNERS}:Odd")
    assert attempt.truncated and attempt.verdict.outcome is Outcome.SUCCEEDED and attempt.turn_rewards == 0.25


def test_an_answer_that_does_not_come_ends_the_rollout(plain: ChatRenderer) -> None:
    attempt = play(plain, lambda _, n: 30.0 if n == 2 else "1", make_task(), path=f"{PARTNERS}:Odd", timeout=0.1)
    assert attempt.verdict.outcome is Outcome.TIMED_OUT and "`collect.timeout` = 0.1" in attempt.verdict.error
    assert len(attempt.turns) == 1 and partners.Odd.closed == [3]


def test_an_engine_that_breaks_stops_the_run_and_the_environment_is_closed(plain: ChatRenderer) -> None:
    with pytest.raises(EngineError, match="out of memory"):
        play(plain, lambda *_: EngineError("out of memory"), make_task(), path=f"{PARTNERS}:Odd")
    assert partners.Odd.closed == [3]


def test_messages_for_a_model_without_a_template_stop_the_run(plain: ChatRenderer) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        play(plain, lambda *_: "1", make_task(QUESTION), path=f"{PARTNERS}:Talks")


def test_environments_that_hang_for_ever_stop_the_run(plain: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_ABANDONED_THREADS", 2)
    with pytest.raises(EnvError, match="took too long and still run"):
        for _ in range(4):
            play(plain, lambda *_: "1", make_task(act="hang", at=1), path=f"{PARTNERS}:Odd", patience=0.05)


@pytest.mark.parametrize("name", ["Waits", "make_echo", "Blocks"])
def test_coroutines_functions_and_code_that_blocks_are_all_played(name: str, plain: ChatRenderer) -> None:
    attempt = play(plain, lambda *_: "1", make_task(), path=f"{PARTNERS}:{name}")
    assert attempt.verdict.outcome is Outcome.SUCCEEDED and attempt.turn_rewards == 0.125 * len(attempt.turns)


def test_many_rollouts_do_not_wait_for_each_others_environments(plain: ChatRenderer) -> None:
    """Each step sleeps on its own thread; as many as may are under way, and no more."""
    engine = Speaker(plain, lambda *_: "1")

    async def act(at_once: int) -> float:
        with Judge(EnvironmentReward()) as judge:
            config = EnvConfig(path=f"{PARTNERS}:Blocks", max_concurrency=at_once)
            player = EnginePlayer(
                prompt_ids=lambda task: np.zeros(1, np.int32),
                engine=engine,
                judge=judge,
                timeout=5.0,
                max_concurrency=64,
                episodes=EpisodePlayer(config, plain, 200),
            )
            began = time.monotonic()
            tries = (player.play(make_task(), SamplingConfig(max_tokens=4), lambda turn: turn) for _ in range(12))
            assert {len(attempt.turns) for attempt in await asyncio.gather(*tries)} == {3}
            return time.monotonic() - began

    assert asyncio.run(act(12)) < 0.9 * asyncio.run(act(2))
    assert threading.active_count() < 40


# -- one answer -------------------------------------------------------------------------------------------------------


def test_without_an_environment_an_attempt_is_one_answer(plain: ChatRenderer) -> None:
    async def act() -> PlayedRollout:
        with Judge(lambda task, answer: float(len(answer))) as judge:
            engine = Speaker(plain, lambda *_: "123")
            ids = lambda task: plain.prompt_ids(str(task.fields["prompt"]))  # noqa: E731
            player = EnginePlayer(
                prompt_ids=ids, engine=engine, judge=judge, timeout=1.0, max_concurrency=1, episodes=None
            )
            assert not player.episodic and player.decode_conversation([]) == []
            return await player.play(make_task(), SamplingConfig(max_tokens=9), lambda turn: 7)

    attempt = asyncio.run(act())
    assert len(attempt.turns) == 1 and attempt.total == 3.0 and attempt.turns[0].anchor is None

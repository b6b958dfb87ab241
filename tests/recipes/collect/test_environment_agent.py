"""An environment that runners play by calls of the model endpoint: its rewards, states and roles are those of a run
that plays it itself."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from etude.agents.agent import as_agent
from etude.agents.environment_agent import EnvironmentAgent
from etude.envs import Observation, TextEnv
from etude.errors import AgentError
from etude.records import Message
from etude.store import open_store
from tests.recipes.players import TALKS
from tests.recipes.runs import step_metrics, train


class Repeat(TextEnv):
    """A game of three answers: each digit pays, and the state is named by their number so far."""

    max_turns = 5

    def begin(self) -> Observation:
        """Show the prompt."""
        self.digits = self.turns = 0
        return Observation(str(self.task["prompt"]), anchor="0 digits", role=1)

    def play(self, answer: str) -> Observation:
        """Count the digits of an answer."""
        earned = sum(character.isdigit() for character in answer)
        self.digits += earned
        self.turns += 1
        return Observation("+1=", reward=float(earned), done=self.turns == 3, anchor=f"{self.digits} digits")


@pytest.mark.slow
def test_runners_play_an_environment_as_the_run_itself_does(world: Path, tmp_path: Path) -> None:
    """The journal has, of each rollout, what the environment says of its answers."""
    options = TALKS | {"agent.path": f"{__file__}:Repeat", "sampling.max_tokens": 20, "steps": 2}
    run = train(world, tmp_path / "run", **options)
    states: dict[int, set[str]] = {}
    longest = 0
    with closing(open_store(run / "journal.sqlite", read_only=True)) as store:
        admitted = [id for ids in store.admitted().values() for id in ids]
        for id in admitted:
            turns, last = store.turns(id), store.rollout(id).last
            game = Repeat()
            shown = game.reset(store.task(store.rollout(id).task).task)
            for turn in turns:
                states.setdefault(turn.anchor or 0, set()).add(shown.anchor or "")
                shown = game.step(Message("assistant", turn.completion.text))
                longest = max(longest, len(turn.completion.ids))
                assert turn.reward == shown.reward
            assert shown.done and last is not None and last.role == 1
            assert last.truncated == (turns[-1].completion.finish_reason == "length")
            assert last.total == sum(turn.reward or 0.0 for turn in turns)
    assert longest == 20, "an answer has as many tokens as the run allows"
    assert len(states) > 1 and all(len(names) == 1 for names in states.values()), "a state has one number"
    assert [step["agents/branches"] for step in step_metrics(run)] == [1, 1], "a rollout is one row of exact tokens"


class Endless(TextEnv):
    """A game that never ends."""

    max_turns = 2

    def play(self, answer: str) -> str:
        """Go on."""
        return "+1="


@pytest.mark.slow
def test_a_game_that_exceeds_its_answers_is_truncated(world: Path, tmp_path: Path) -> None:
    run = train(world, tmp_path / "run", **TALKS | {"agent.path": f"{__file__}:Endless", "steps": 1})
    with closing(open_store(run / "journal.sqlite", read_only=True)) as store:
        last = [store.rollout(id).last for ids in store.admitted().values() for id in ids]
    assert last and all(attempt is not None and attempt.truncated and attempt.turns == 2 for attempt in last)


class Talk(TextEnv):
    """A conversation of two answers."""

    max_turns = 2

    def begin(self) -> Observation:
        """Show messages."""
        self.turns = 0
        return Observation([{"role": "system", "content": "1"}, {"role": "user", "content": "2"}])

    def play(self, answer: str) -> Observation:
        """Answer by a text, which is a message of the user."""
        self.turns += 1
        return Observation("3", reward=float(len(answer)), done=self.turns == 2)


@pytest.mark.slow
def test_a_conversation_is_one_row(world: Path, tmp_path: Path) -> None:
    """Each prompt continues the answer before it, with the exact tokens."""
    shutil.copytree(world, tmp_path / "world")
    template = "{% for m in messages %}={{ m['content'] }}+{% endfor %}"
    (tmp_path / "world" / "model" / "chat_template.jinja").write_text(template)
    options = TALKS | {"agent.path": f"{__file__}:Talk", "sampling.max_tokens": 4}
    run = train(tmp_path / "world", tmp_path / "run", **options)
    (step,) = step_metrics(run)
    assert step["turns"] == 2 and step["agents/branches"] == 1
    with closing(open_store(run / "journal.sqlite", read_only=True)) as store:
        turns = [turn for ids in store.admitted().values() for id in ids for turn in store.turns(id)]
    assert all(turn.reward == len(turn.completion.text) for turn in turns)


def test_a_class_is_an_agent_or_an_environment() -> None:
    agent = as_agent(Repeat, "The agent 'Repeat'")
    assert isinstance(agent, EnvironmentAgent) and agent.title == "Repeat" and agent.call_signature().is_async
    with pytest.raises(AgentError, match="give it `reset` and `step`"):
        as_agent(int, "The agent 'int'")

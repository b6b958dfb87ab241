"""A taskset of verifiers for tests: its program asks for a digit, says whether it is right, and asks once more."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class DigitData(vf.TaskData):
    """The digit that is right."""

    digit: int


class DigitTask(vf.Task[DigitData, vf.State, vf.TaskConfig]):
    """One digit to find."""


class DigitTaskset(vf.Taskset[DigitTask, vf.TasksetConfig]):
    """Ten digits."""

    def load(self) -> Iterator[DigitTask]:
        for digit in range(10):
            yield DigitTask(DigitData(name=f"digit-{digit}", prompt=f"{digit}+0=", digit=digit), self.config.task)


class DigitConfig(vf.EnvConfig):
    """One player."""

    player: vf.AgentConfig = vf.AgentConfig()


class DigitEnv(vf.Env[DigitConfig]):
    """Two questions to each player."""

    async def run(self, task: DigitTask, agents: vf.Agents) -> None:
        if task.data.digit == 9:
            raise ValueError("nine is not a digit here")
        right = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(2):
                if segment.terminated:
                    break
                right += str(task.data.digit) in (segment.last_reply or "")
                segment = await interaction.turn("again:")
        interaction.trace.record_reward("right", right, 0.5)


__all__ = ["DigitEnv", "DigitTaskset"]

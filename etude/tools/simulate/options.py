"""The options of `etude simulate`: the cluster, the rollouts, and the values to try."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from etude.config import Config
from etude.errors import ConfigError
from etude.recipes.collect.config import CollectionConfig
from etude.tools.simulate.cluster import Cluster

UPDATE_FLOPS, ANNOTATE_FLOPS = 6.0, 2.0
"""Operations for each parameter and token: forward and backward of an update, and a forward pass before it."""
WEIGHT_BYTES = 2.0
SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
"""The shares of GPUs that train, to try."""


class SimulateOptions(Config):
    """A run on a cluster. Seconds and rates are estimates: give those that were measured where they are known."""

    gpus: int = Field(64, ge=2, le=1_000_000, description="GPUs of the cluster, which sample or train")
    trainer_gpus: list[int] = Field([], description="numbers of GPUs that train, to try; empty tries shares of `gpus`")
    engine_gpus: int = Field(1, ge=1, description="GPUs of one engine; more hold a larger model and draw faster")
    slots: int = Field(64, ge=1, description="requests that an engine works on at once; more wait less and draw slower")
    parameters: float = Field(7.0, gt=0, description="10⁹ parameters of the model; of a mixture, the active ones")
    gpu_tflops: float = Field(
        400.0, gt=0, description="10¹² operations per second that a GPU reaches in training, all overheads included"
    )
    gpu_gbs: float = Field(2000.0, gt=0, description="10⁹ bytes per second that a GPU reaches in decoding")
    decode_ms: float | None = Field(
        None, gt=0, description="milliseconds of a decoding step; null is the time to read the weights"
    )
    request_ms: float = Field(0.1, ge=0, description="milliseconds that each request adds to a decoding step")
    train_s: float = Field(2.0, ge=0, description="seconds of an update beside its operations")
    publish_s: float = Field(5.0, ge=0, description="seconds until the engines have new weights; the trainer waits")
    pause_s: float | None = Field(
        None, ge=0, description="last seconds of a publish, in which engines stand still; null is all of them"
    )
    switch_s: float = Field(
        15.0, ge=0, description="seconds to change between sampling and training where GPUs do both in turns"
    )
    between_s: float = Field(0.0, ge=0, description="seconds of evaluating and saving after a step")
    judge_s: float = Field(0.5, ge=0, description="seconds from the last token of a rollout to its reward")
    engine_failures_per_day: float = Field(0.0, ge=0, description="times that each engine is lost in a day")
    restart_s: float = Field(300.0, gt=0, description="seconds until an engine that was lost works again")

    tokens: float = Field(3000.0, ge=1, description="median of a turn's tokens")
    spread: float = Field(0.9, ge=0, le=5, description="standard deviation of the logarithm of a turn's tokens")
    max_tokens: int = Field(16_384, ge=1, description="most tokens of a rollout, which is cut off there")
    turns: float = Field(1.0, ge=1, le=64, description="mean number of turns of a rollout")
    wait_s: float = Field(0.0, ge=0, description="median seconds of a tool or environment between turns")
    wait_spread: float = Field(1.0, ge=0, le=5, description="standard deviation of the logarithm of these seconds")
    attempts: int | None = Field(
        None,
        ge=1,
        description="rollouts at a time, as `agent.runners` times `agent.max_concurrency`; null is no limit, "
        "or that of the run",
    )
    failing: float = Field(0.0, ge=0, lt=1, description="share of attempts at a rollout that fail")
    zero_variance: float = Field(0.2, ge=0, lt=1, description="share of groups with equal rewards")

    tasks: list[Annotated[int, Field(ge=1)]] = Field(
        [128], min_length=1, description="numbers of tasks per step to try, as `collect.tasks`"
    )
    group_size: int = Field(8, ge=1, description="rollouts per task, as `collect.group_size`")
    refill: int = Field(0, ge=0, description="replacement of groups with equal rewards, as `collect.refill`")
    retries: int = Field(1, ge=0, description="further attempts at a rollout that failed, as `collect.retries`")
    max_staleness: list[Annotated[int, Field(ge=0)]] = Field(
        [0, 1, 2, 4, 8], min_length=1, description="staleness bounds to try; larger waits less and trains on older data"
    )
    order: Literal["ordinal", "windowed"] = Field(
        "ordinal", description="groups of a step, as `collect.order`; `windowed` compares both orders at each bound"
    )
    window: int | None = Field(None, ge=2, description="groups of `order=windowed`, as `collect.window`")
    steps: int = Field(20, ge=1, description="steps that are measured, after those in which the cluster fills up")
    seed: int = Field(0, ge=0, description="seed of all random numbers")

    @field_validator("trainer_gpus", "tasks", "max_staleness", mode="before")
    @classmethod
    def _accept_one_number(cls, value: Any) -> Any:
        return [value] if isinstance(value, int) else value

    def check(self) -> None:
        """Refuse values that fit no cluster. A replay of a run has other options than a search."""
        if self.gpus < 2 * self.engine_gpus and not self.trainer_gpus:
            raise ConfigError(
                f"`gpus={self.gpus}` leaves no GPU to train beside an engine of `engine_gpus={self.engine_gpus}`. Give "
                "more GPUs, or fewer to an engine."
            )
        for number in self.trainer_gpus:
            if not 1 <= number <= self.gpus - self.engine_gpus:
                raise ConfigError(
                    f"`trainer_gpus={number}` leaves no engine of `engine_gpus={self.engine_gpus}` among "
                    f"`gpus={self.gpus}`. Give 1 to {self.gpus - self.engine_gpus}."
                )
        if self.order == "windowed" and not any(self.windows(tasks)[1:] for tasks in self.tasks):
            raise ConfigError(
                "`order=windowed` needs a bound of `max_staleness` that lets `window` groups wait: at least `window` "
                "divided by `tasks`. Give a larger bound, or a smaller `window`."
            )

    def windows(self, tasks: int, bound: int | None = None) -> list[int | None]:
        """Return the values of `window` to try for a bound: None for the order of tasks, and the window if it fits.

        bound: None stands for the largest one.
        """
        try:
            collect = CollectionConfig(tasks=tasks, order=self.order, window=self.window)
        except ConfigError as error:  # the options of a simulation have no section
            message = str(error).removeprefix(f"{CollectionConfig.__name__}: ").replace("`collect.", "`")
            raise ConfigError(message) from error
        window, largest = collect.candidates, max(self.max_staleness) if bound is None else bound
        return [None] if window is None or window > largest * tasks else [None, window]

    @property
    def splits(self) -> tuple[int, ...]:
        """The numbers of training GPUs to try, in order."""
        if self.trainer_gpus:
            return tuple(sorted(set(self.trainer_gpus)))
        largest = self.gpus - self.engine_gpus
        return tuple(sorted({min(max(round(share * self.gpus), 1), largest) for share in SHARES}))

    def engines(self, trainer_gpus: int) -> int:
        """Return the number of engines on the other GPUs."""
        return (self.gpus - trainer_gpus) // self.engine_gpus

    def token_s(self, running: int) -> float:
        """Return the seconds of a decoding step with so many requests: each one gets a token."""
        weights_ms = WEIGHT_BYTES * self.parameters / (self.gpu_gbs * self.engine_gpus) * 1e3
        fixed_ms = weights_ms if self.decode_ms is None else self.decode_ms
        return (fixed_ms + self.request_ms * running) / 1e3

    def update_s(self, tokens: float, trainer_gpus: int) -> float:
        """Return the seconds of an update."""
        operations = (UPDATE_FLOPS + ANNOTATE_FLOPS) * self.parameters * 1e9 * tokens
        return self.train_s + operations / (self.gpu_tflops * 1e12 * trainer_gpus)

    def cluster(self, trainer_gpus: int, scale: int = 1, *, in_turns: bool = False) -> Cluster:
        """Return the cluster of a split.

        scale: the number that GPUs and batch are divided by. in_turns: all GPUs sample, then all train.
        """
        engines = self.gpus // self.engine_gpus if in_turns else self.engines(trainer_gpus)
        training = self.gpus if in_turns else trainer_gpus
        switch_s = self.switch_s if in_turns else 0.0
        publish_s = self.publish_s + switch_s
        pause_s = publish_s if self.pause_s is None or in_turns else min(self.pause_s, publish_s)
        return Cluster(
            engines=max(round(engines / scale), 1),
            slots=self.slots,
            token_s=self.token_s,
            update_s=lambda step, tokens: switch_s + self.update_s(tokens * scale, training),  # noqa: ARG005
            publish_s=publish_s,
            pause_s=pause_s,
            attempts=None if self.attempts is None else max(round(self.attempts / scale), 1),
            between_s=lambda step: self.between_s,  # noqa: ARG005
            judge_s=self.judge_s,
            failures_per_day=self.engine_failures_per_day,
            restart_s=self.restart_s,
        )

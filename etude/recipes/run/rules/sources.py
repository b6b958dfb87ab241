"""The data sources of a run: those that its data has, and those that its options name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from etude.data.sampler import Sampler
from etude.errors import ConfigError


class DataSources:
    """The data sources of some data."""

    def __init__(self, option: str, sources: Iterable[str], sampler: Sampler | None = None) -> None:
        """option: the option that names the data. sources: that of each row, empty where a row has none. sampler: takes
        rows, maybe not of all sources."""
        self._option = option
        self._names = sorted(set(sources))
        self._used = [name for name in self._names if sampler is None or not sampler.leaves_out(name)]

    def check_teachers(self, teachers: Collection[str]) -> None:
        """Refuse a source without a teacher. teachers: the sources that have one; none if one teacher is for all."""
        self._check_complete("`teacher.paths` has no teacher", teachers)

    def check_rewards(self, rewards: Collection[str]) -> None:
        """Refuse a source without a reward. rewards: the sources that have one; none if one reward is for all."""
        self._check_complete("`reward.sources` has no reward", rewards)

    def check_players(self, rewards_source: Callable[[str], bool]) -> None:
        """Refuse a source that no environment or agent gives rewards, where `reward=environment` leaves them to one.
        rewards_source: returns whether one of them may reward a source."""
        left = [name for name in self._used if not rewards_source(name)]
        if left:
            subject = f"of the data source `{left[0]}`" if left[0] else "without a data source"
            raise ConfigError(
                f"`reward=environment` leaves rewards to environments and agents, and `{self._option}` has rows "
                f"{subject}, which none plays that gives rewards. Name one for them, or choose a reward for each "
                "source: `reward=by_source`."
            )

    def _check_complete(self, lacking: str, named: Collection[str]) -> None:
        missing = [name for name in self._used if name not in named]
        if named and missing:
            subject = f"of the data source `{missing[0]}`" if missing[0] else "without a data source"
            raise ConfigError(
                f"`{self._option}` has rows {subject}, for which {lacking}: it has one for "
                f"{_listed(named)}. {self._describe()} Give each of them one, or leave its rows out."
            )

    def refuse_others(self, option: str, named: Collection[str]) -> None:
        """Refuse a source that an option names and no row has. named: the sources that the option names."""
        absent = [name for name in named if name not in self._names]
        if absent:
            raise ConfigError(
                f"`{option}` names the data source `{absent[0]}`, and `{self._option}` has no row of it. "
                f"{self._describe()} Correct the name, or leave it out."
            )

    def _describe(self) -> str:
        names = [name for name in self._names if name]
        if not names:
            return (
                "The rows have no data source; `data.columns.source` names the column that has it, and "
                "`data.train=[maths=tasks.parquet]` names it for a file."
            )
        return f"The rows have the data sources {_listed(names)}."


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)

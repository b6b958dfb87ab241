"""Where ranks are to stand: pools of places, each for one rank, shared by the roles that are named together.

    ResourcePool(("policy", "critic"), ranks=4, cpus=2)     four places of two processors; a policy and a critic on each
    ResourcePool(("judge",), ranks=1, cpus=1)               a place of its own

A role that shares a place gets its part of what the place has, so that all of them fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from etude.errors import ConfigError

__all__ = ["ResourcePool", "count_bundles", "describe_shortage"]


@dataclass(frozen=True)
class ResourcePool:
    """Places, one for each rank of the roles that share them."""

    roles: tuple[str, ...]
    """Who stands there; of each of them, one rank on each place."""
    ranks: int
    cpus: float
    """Processors of a place."""
    gpus: float = 0.0
    """GPUs of a place."""

    def __post_init__(self) -> None:
        if not self.roles or len(set(self.roles)) < len(self.roles):
            raise ConfigError(
                f"A pool is shared by one role or several, each named once; these are {list(self.roles)}. "
                f"Name each once."
            )
        if self.ranks < 1:
            raise ConfigError(
                f"A pool has a place for each rank, and {self.ranks} were asked for. Ask for one or more."
            )

    @property
    def bundle(self) -> Mapping[str, float]:
        """What one place has."""
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}

    def role_resources(self, role: str) -> Mapping[str, float]:
        """What a role gets of its place: the same as every other that stands there."""
        if role not in self.roles:
            raise ConfigError(f"The role `{role}` has no place in a pool of {', '.join(self.roles)}. Add it there.")
        return {name: amount / len(self.roles) for name, amount in self.bundle.items()}


def describe_shortage(pool: ResourcePool, total: Mapping[str, float], free: Mapping[str, float]) -> str | None:
    """What a cluster has too little of for a pool, as a sentence: what is asked, what there is, and what of it is free.
    None where all of it is free, which does not say that it is so on one machine."""
    lacking = [name for name, amount in pool.bundle.items() if amount * pool.ranks > free.get(name, 0.0)]
    if not lacking:
        return None
    details = "; ".join(
        f"{name}: {pool.ranks} × {_number(pool.bundle[name])} are asked for, the cluster has "
        f"{_number(total.get(name, 0.0))}, of which {_number(free.get(name, 0.0))} are free"
        for name in lacking
    )
    return f"{details}."


def count_bundles(pool: ResourcePool, nodes: Iterable[Mapping[str, float]]) -> int:
    """How many places of a pool there are on nodes that have so much, were all of it free."""
    rounding = 1e-9
    return sum(
        min(int(node.get(name, 0.0) / amount + rounding) for name, amount in pool.bundle.items()) for node in nodes
    )


def _number(amount: float) -> str:
    return f"{amount:g}"

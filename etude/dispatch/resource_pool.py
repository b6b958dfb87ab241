"""Resource pools: bundles of resources, one for each rank, shared by the roles that are named together.

    ResourcePool(("policy", "critic"), ranks=4, cpus=2)     four bundles of two CPUs; a policy and a critic on each
    ResourcePool(("judge",), ranks=1, cpus=1)               a separate bundle

A role that shares a bundle gets its part of the resources, so that all of them fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from etude.errors import ConfigError


@dataclass(frozen=True)
class ResourcePool:
    """Bundles of resources, one for each rank of the roles that share them."""

    roles: tuple[str, ...]
    """The roles that share the bundles. Each has one rank on each bundle."""
    ranks: int
    cpus: float
    """CPUs of a bundle."""
    gpus: float = 0.0
    """GPUs of a bundle."""

    def __post_init__(self) -> None:
        if not self.roles or len(set(self.roles)) < len(self.roles):
            raise ConfigError(
                f"A pool has one or more roles, and no role twice; these are {list(self.roles)}. Name each once."
            )
        if self.ranks < 1:
            raise ConfigError(
                f"A pool has a place for each rank, and {self.ranks} were requested. Request one or more."
            )

    @property
    def bundle(self) -> Mapping[str, float]:
        """The resources of one bundle."""
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}

    def role_resources(self, role: str) -> Mapping[str, float]:
        """Return a role's part of its bundle: the same as that of every other role there."""
        if role not in self.roles:
            raise ConfigError(f"The role `{role}` has no place in a pool of {', '.join(self.roles)}. Add it there.")
        return {name: amount / len(self.roles) for name, amount in self.bundle.items()}


def describe_shortage(pool: ResourcePool, total: Mapping[str, float], free: Mapping[str, float]) -> str | None:
    """Return what a cluster lacks for a pool, as a sentence: the amounts needed, present and free.

    None if all of it is free. It need not be free on one machine then.
    """
    lacking = [name for name, amount in pool.bundle.items() if amount * pool.ranks > free.get(name, 0.0)]
    if not lacking:
        return None
    details = "; ".join(
        f"{name}: {pool.ranks} × {_number(pool.bundle[name])} are requested, the cluster has "
        f"{_number(total.get(name, 0.0))}, of which {_number(free.get(name, 0.0))} are free"
        for name in lacking
    )
    return f"{details}."


def count_bundles(pool: ResourcePool, nodes: Iterable[Mapping[str, float]]) -> int:
    """Return how many bundles of a pool fit on nodes with these resources, if all of them were free."""
    rounding = 1e-9
    return sum(
        min(int(node.get(name, 0.0) / amount + rounding) for name, amount in pool.bundle.items()) for node in nodes
    )


def _number(amount: float) -> str:
    return f"{amount:g}"

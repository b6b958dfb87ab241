"""Bringing weights from where they are trained to where they are sampled."""

from __future__ import annotations

from etude.sync.local import LocalCarrier

__all__ = ["LocalCarrier"]

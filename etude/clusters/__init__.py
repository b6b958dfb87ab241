"""Runs as jobs of a cluster: what is written and submitted for them, and their state (`etude launch`)."""

from __future__ import annotations

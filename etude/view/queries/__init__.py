"""The queries behind the pages: functions from a run's files to records."""

from __future__ import annotations

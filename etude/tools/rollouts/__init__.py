"""`etude export rollouts`: what a run has collected, as files that others read.

    journal ─reading─► rollouts ─┬─ sets ──► Parquet or JSONL that `etude sft` and `etude dpo` learn from
                                 ├─ lines ─► JSONL, a rollout a line, with all that is known of it
                                 └─ spans ─► OTLP, a trace for each rollout

The journal may be written meanwhile. One rollout is in memory at a time, of pairs one task with all tries at it.
"""

from __future__ import annotations

from etude.tools.rollouts.export import ExportOptions, ExportResult, export_rollouts, to_dict

__all__ = ["ExportOptions", "ExportResult", "export_rollouts", "to_dict"]

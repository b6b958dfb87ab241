"""`etude export rollouts`: the rollouts of a run as files.

    journal ─ reader ─► rollouts ─┬─ datasets ─► Parquet or JSONL for `etude sft` and `etude dpo`
                                  ├─ jsonl ────► JSONL, one rollout a line, with everything recorded
                                  └─ otlp ─────► OTLP, one trace for each rollout

The run may write to the journal at the same time. One rollout is in memory at a time; for pairs, the rollouts of one
task.
"""

from __future__ import annotations

from etude.tools.rollouts.export import ExportOptions, ExportResult, export_rollouts, to_dict

__all__ = ["ExportOptions", "ExportResult", "export_rollouts", "to_dict"]

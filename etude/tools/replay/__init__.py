"""`etude replay RUN --step K loss=gspo …`: a recorded step under another algorithm, without sampling.

checkpoint, then the steps in between ─┬─► the step with the run's options ────┬─► comparison ─► files, report
journal: the rollouts of each step ────┴─► the step with the changed options ──┘

`files` and `report` need no torch, so that the viewer can read a replay. `options` needs none either, so that a mistake
in a command line is refused at once.
"""

from __future__ import annotations

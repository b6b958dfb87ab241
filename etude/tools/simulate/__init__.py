"""`etude simulate`: the steps of a run on a given cluster, played by discrete events with the run's own scheduler.

    workload ─ turns of a rollout ─► engines ─ scores ─► scheduler ─ AdmitStep ─► trainer ─ versions ─► scheduler

The scheduler is `recipes/collect/scheduler.py`, the same object as in a run. Everything else here stands for a machine:
seconds pass only in the simulation.
"""

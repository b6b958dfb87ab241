"""The rollout queue: a trainer enqueues rollouts, runners claim them and report how they ended.

rollout_queue    the operations, for callers that need not know where the queue is
verbs            what makes a method a verb, and the rules of one
bounds           the bounds of the values that it takes
records          the records that they take and return
rollout_limits   the use, the time limits and the retries of a rollout
local_queue      the queue over a journal in this process
queue_state      its state: the open work in memory, and the events of each operation
writer_thread    the thread that writes them, many in one transaction
checks           requests compared with what is recorded
lease_table      queued rollouts, and the attempts that runners have
waiters          claims and waits that are not answered yet
owner_lease      the run that owns the queue, its epoch and its lease
keys             the keys of trainers, runners and attempts
"""

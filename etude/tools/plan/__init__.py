"""`etude plan`: the memory and the time of a run's step, before it starts.

The planner has its own memory tracker, because that of torch (`torch.distributed._tools.MemTracker`, torch 2.13) was
measured and does not hold. It would also replace only a thirteenth of the planner's lines. On three cases of
`bench.plan`, with the allocator's peak and each prediction's ratio to it:

    case      measured    this planner   MemTracker, fake floats   MemTracker, model and optimizer alone
    fp32      78.4 MiB           1.001                     0.898                                   1.356
    sft       73.1 MiB           1.001                     0.933                                   1.121
    critic    96.0 MiB           1.001                     0.917                                   1.108

MemTracker refuses a second forward pass of a module. So micro-batches and engine steps needed its module hooks removed.
It keeps one peak; phases, offloaded memory and deep models need the whole trace. `FakeTensorMode` alone ends at the
first value that the code reads, such as the length of a row. `RuntimeEstimator` needs a GPU.
"""

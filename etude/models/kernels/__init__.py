"""Triton kernels for the steps between matrix products of a decode step, and the trial that decides if they are used.

    probe.py             which kernels hold on this machine, and the reason for each that does not
    reference.py         the same steps in torch's operations
    paged_attention.py   attention over the blocks of a KV cache
    decode_ops.py        norms with residuals, rotary positions with the write to the cache, the gated activation

Only the last two import Triton, which a CUDA build of torch brings. They load when the trial first runs a kernel.
"""

"""Triton kernels for the steps between matrix products of a decode step, and the trial that decides if they are used.

    probe.py             which kernels hold on this machine, and the reason for each that does not
    step.py              the operations of a step by the kernels that hold
    paged_attention.py   attention over the blocks of a KV cache
    decode_ops.py        norms with residuals, rotary positions with the write to the cache, the gated activation
    shapes.py            the sizes that kernels have, and the list of work of attention

Triton comes with torch's CUDA builds. The two files of kernels import it, and load when the trial first runs one.
"""

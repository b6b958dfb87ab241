"""The code inside a sandbox, at the other end of its pipe, which runs an untrusted program.

A separate interpreter loads these files without the rest of Etude, so they use the standard library alone.
`etude.rewards.sandbox.sandbox` starts them. `init_process` is their main module.
"""

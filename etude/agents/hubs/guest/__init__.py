"""The guests: programs that play the environments of a hub, run by the hub's own Python.

They use the standard library and the hub's package, and nothing of Etude.
"""

"""What runs in a box, on the far side of its pipe: the keeper of a program that nobody trusts.

These files are loaded by an interpreter of their own, without the rest of Etude, and keep to the standard library:
`etude.rewards.sandbox.sandbox` says how they are started, and `init_process` what they do.
"""

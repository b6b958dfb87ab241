"""The work of one rank: to train the policy, to sample from it, and to send its weights."""

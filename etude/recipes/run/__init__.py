"""A reinforcement-learning run: its options, the parts it is built from, its loop, its directory."""

"""A reinforcement-learning run: its options, the rules across them, what builds it, its loop, its directory."""

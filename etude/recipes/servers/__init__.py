"""The inference servers of a run, and the weights that are published to them."""

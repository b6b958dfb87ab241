"""Agents: where they call the model, how they are written, and who runs them."""

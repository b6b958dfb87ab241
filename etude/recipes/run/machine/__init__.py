"""The devices and the processor threads that a run computes with."""

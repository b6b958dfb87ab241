"""The services that agents of a run need: a rollout queue, a model endpoint, and runners."""

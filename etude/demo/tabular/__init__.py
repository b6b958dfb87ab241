"""The tabular demo, `etude demo algorithms`: every algorithm on a problem whose expected reward is known exactly."""

"""The demos of `etude demo`: small enough to watch, with results that can be checked exactly."""

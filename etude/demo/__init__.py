"""Demonstrations small enough to be watched, and exact enough to be believed."""

"""The files that `etude init` writes."""

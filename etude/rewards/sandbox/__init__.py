"""The sandbox in which programs of a model run; `guest` is what runs inside it."""

"""The runs of Etude's commands, each built from the packages below."""

"""The runs that Etude's commands make, each built from the packages below."""

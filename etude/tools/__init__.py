"""Tools around a run: its curves, the plan of its memory, and checks of the installation."""

"""Tools around a run: its curves, and what is installed and found here."""

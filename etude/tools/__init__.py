"""Tools around a run: what is installed and found here."""

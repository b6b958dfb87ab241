"""The input files, the precision and the earlier sessions that a run continues with."""

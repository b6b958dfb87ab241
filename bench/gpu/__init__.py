"""What one GPU does with Etude, in ten minutes and one file: `python -m bench.gpu --json FILE`."""

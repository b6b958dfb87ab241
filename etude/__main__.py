"""`python -m etude` is the command `etude`."""

from etude.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

"""Shell completion: commands, flags, presets, options of a run, choices and paths.

shells/         the scripts of the shells, which call `etude complete`
suggest.py      the suggestions, from the parser and the options; it imports only the standard library
options.json    the options of all commands, generated from their classes by `python -m tests.pages.document`
"""

from __future__ import annotations

__all__: list[str] = []

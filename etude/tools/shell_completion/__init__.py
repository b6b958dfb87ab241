"""Shell completion: commands, flags, presets, options of a run, choices and paths.

    shells/            the scripts of the shells, which call `etude complete`
    suggest.py         the suggestions, from the parser and the option cache; it imports only the standard library
    option_cache.py    the options of all commands, read from their classes into the user's cache directory

A key press needs an immediate reply, and the options are fields of classes that import torch. So a separate process
reads the options once for each state of the sources. Until it is done, the previous cache is used.
"""

from __future__ import annotations

__all__: list[str] = []

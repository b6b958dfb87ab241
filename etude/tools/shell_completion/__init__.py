"""What a shell offers for a half-written command line: commands, flags, presets, options of a run, choices, paths.

    shells/       the scripts, which only ask and show
    offers.py     the answer, from the parser and from what is kept; it loads nothing heavy
    words.py      every option of every command, read from the classes and kept in the user's cache directory

A key press must be answered at once, and the options are fields of classes that load torch. So they are read once for
each state of the sources, by a process of its own, and until it is done what was kept before is offered.
"""

from __future__ import annotations

__all__: list[str] = []

"""`etude view`: a local web server that shows runs, from their files alone.

    run directory ─ RunReader ─► queries ─► records ─ server ─► JSON, CSV, bytes ─► pages (`static/`)
    root directory ─ RunCatalog ─► names of runs

The reader keeps an index of a growing journal and reads the metrics on from where it stopped. A query is a function
from a reader to a record (`queries/`), and knows nothing of HTTP. Nothing is ever written, and nothing in a run's
directory is imported or executed. torch is not loaded.
"""

from __future__ import annotations

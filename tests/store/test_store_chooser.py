"""`open_store` imports only the needed database."""

from __future__ import annotations

import subprocess
import sys

from etude.store import MemoryJournal, open_store


def test_without_a_path_it_is_in_memory_and_loads_no_database() -> None:
    code = "import sys; from etude.store import open_store; open_store(); print('sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
    assert isinstance(open_store(), MemoryJournal)

"""A store in another process, to be killed: `python -m tests.store.http.serving JOURNAL PORT`."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from etude.store import open_store
from etude.store.http.server import serve
from etude.store.queue.keys import Keyring
from etude.store.queue.local_queue import LocalRolloutQueue
from tests.store.http.served import SECRET

if __name__ == "__main__":
    keyring = Keyring(SECRET)
    queue = LocalRolloutQueue(open_store(Path(sys.argv[1])), keyring)
    with serve(queue, keyring, port=int(sys.argv[2])):
        print("ready", flush=True)
        threading.Event().wait(300)

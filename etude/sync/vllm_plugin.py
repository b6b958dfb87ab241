"""Making the plug-in available to a vLLM server, for any Python that runs the server.

The plug-in is a separate distribution: users who start servers by hand install it into the servers' environment. For a
server that Etude starts, this module writes the same files to a directory, in the layout of an installer. The server
gets this directory in its PYTHONPATH, so no environment is changed.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from etude.errors import EngineError

PACKAGE = "etude_vllm_weights"
_THIS_FILE = Path(__file__).resolve()
_SOURCES = (_THIS_FILE.parents[2] / "plugins" / "vllm_weights" / PACKAGE, _THIS_FILE.with_name(PACKAGE))
"""The places of the plug-in: in the repository, and in an installed Etude."""


def install_plugin(cache: Path) -> Path:
    """Return the directory for PYTHONPATH, below `cache`; write it if it is missing.

    Its name holds a hash of the plug-in's files, so another version gets another directory.
    """
    source = next((path for path in _SOURCES if path.is_dir()), None)
    if source is None:
        raise EngineError(f"Etude's plug-in for vLLM was not found: {_SOURCES[1]} is missing. Reinstall Etude.")
    files = sorted(source.glob("*.py"))
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]
    made = cache / f"{PACKAGE}-{digest}"
    if not made.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{made.name}.", dir=cache) as own:  # other processes may write the same now
            draft = Path(own) / made.name
            _write(draft, files)
            try:
                draft.rename(made)
            except OSError:
                if not made.is_dir():
                    raise
    return made


def _write(draft: Path, files: Sequence[Path]) -> None:
    """Write these files in the layout of an installed distribution."""
    (draft / PACKAGE).mkdir(parents=True)
    for file in files:
        shutil.copyfile(file, draft / PACKAGE / file.name)
    info = draft / f"{PACKAGE}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: etude-vllm-weights\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\netude_weights = {PACKAGE}:register\n", "utf-8")

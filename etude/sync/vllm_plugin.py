"""Putting the plug-in within a vLLM server's reach, whichever Python serves.

The plug-in is a distribution of its own, for whoever starts servers by hand and installs it into their environment. For
a server that Etude starts, the same files are laid out as an installer would, in a folder of their own that goes into
the server's PYTHONPATH: nobody's environment is changed.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from etude.errors import EngineError

__all__ = ["PACKAGE", "install_plugin"]

PACKAGE = "etude_vllm_weights"
_THIS_FILE = Path(__file__).resolve()
_SOURCES = (_THIS_FILE.parents[2] / "plugins" / "vllm_weights" / PACKAGE, _THIS_FILE.with_name(PACKAGE))
"""Where it is: in the repository, and in an installed Etude."""


def install_plugin(cache: Path) -> Path:
    """The folder for PYTHONPATH, below `cache`: the one that is there, or one written now. Another plug-in gets another
    folder."""
    source = next((path for path in _SOURCES if path.is_dir()), None)
    if source is None:
        raise EngineError(f"Etude's plug-in for vLLM is not there: {_SOURCES[1]} is missing. Install Etude anew.")
    files = sorted(source.glob("*.py"))
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]
    made = cache / f"{PACKAGE}-{digest}"
    if not made.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{made.name}.", dir=cache) as own:  # others may write the same just now
            draft = Path(own) / made.name
            _write(draft, files)
            try:
                draft.rename(made)
            except OSError:
                if not made.is_dir():
                    raise
    return made


def _write(draft: Path, files: Sequence[Path]) -> None:
    """Lay these files out as a distribution."""
    (draft / PACKAGE).mkdir(parents=True)
    for file in files:
        shutil.copyfile(file, draft / PACKAGE / file.name)
    info = draft / f"{PACKAGE}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: etude-vllm-weights\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\netude_weights = {PACKAGE}:register\n", "utf-8")

"""Write the links of the package's metadata, and of its description on the package index.

`ETUDE_REPOSITORY` names the repository that a package is built from, such as `https://github.com/OWNER/etude`. The
workflow that publishes a release sets it from its own address, so no address is written down that can be wrong. Without
it the package has no links, and its description is README.md as it stands.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^()\s]+)\)")


class Links(MetadataHookInterface):
    """The fields `urls` and `readme` of the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set both fields; hatchling has set the version before."""
        repository = os.environ.get("ETUDE_REPOSITORY", "").rstrip("/")
        tag = f"v{metadata['version']}"
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["urls"] = project_urls(repository, tag) if repository else {}
        text = with_whole_links(readme, repository, tag) if repository else readme
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def project_urls(repository: str, tag: str) -> dict[str, str]:
    """Return the links that the package index shows beside the description."""
    return {
        "Source": repository,
        "Documentation": f"{repository}/tree/{tag}/docs",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def with_whole_links(markdown: str, repository: str, tag: str) -> str:
    """Return a page with each link to a file of the repository as a link to the web: the index has no such files."""

    def whole(link: re.Match[str]) -> str:
        picture, words, path = link.groups()
        kind = "raw" if picture else "blob"
        return f"{picture}{words}({repository}/{kind}/{tag}/{path})"

    return LINK.sub(whole, markdown)

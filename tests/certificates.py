"""One certificate in place of all that a machine trusts.

An HTTP client loads them when it is created, which takes 50 milliseconds, and the servers of these tests use no TLS. A
`conftest.py` imports the fixture for the tests beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest

END = "-----END CERTIFICATE-----\n"


@pytest.fixture(scope="module", autouse=True)
def one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let clients that are created here trust one authority."""
    path = tmp_path_factory.mktemp("certificates") / "one.pem"
    first, end, _ = Path(certifi.where()).read_text(encoding="utf-8").partition(END)
    path.write_text(first + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield

"""The fixture that all these tests share: HTTP clients that load one certificate."""

from tests.certificates import one_certificate as one_certificate

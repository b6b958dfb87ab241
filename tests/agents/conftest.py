"""Shared by these tests: HTTP clients that load one certificate."""

from tests.certificates import one_certificate as one_certificate

"""What these tests share: clients that load one certificate."""

from tests.certificates import one_certificate as one_certificate

"""The golden numbers that need no checkpoint."""

import golden
import pytest


@pytest.fixture(scope="session")
def formats():
    return golden.read("formats")

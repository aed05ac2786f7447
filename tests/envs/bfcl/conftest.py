"""Tests of this folder stand on the pinned wheel."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def backend(bfcl_wheel):
    """The simulators."""
    return bfcl_wheel

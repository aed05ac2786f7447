"""Something to hang on."""

import threading

import pytest


@pytest.fixture
def gate():
    """Something to hang on; opened after the test, so that no thread outlives it for long."""
    event = threading.Event()
    yield event
    event.set()

"""What tests of several packages share: the clouds' emulators, started when a test first asks for one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is.
settings.register_profile("shardckpt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shardckpt")

sys.path.insert(0, str(Path(__file__).parent))

from emulators import environment, gcs_emulator, s3_emulator


@pytest.fixture(scope="session")
def gcs_server():
    """A fake-gcs-server for this worker's whole run; its environment variables are not set."""
    with gcs_emulator() as emulator:
        yield emulator


@pytest.fixture(scope="session")
def s3_server():
    """A moto server for this worker's whole run; its environment variables are not set."""
    with s3_emulator() as emulator:
        yield emulator


@pytest.fixture(params=["gs", "s3"])
def cloud(request):
    """An emulator of each kind, with this process's environment set for it."""
    emulator = request.getfixturevalue("gcs_server" if request.param == "gs" else "s3_server")
    with environment(emulator.env()):
        yield emulator

"""Two runs with metrics and layouts, and a service over them."""

import pytest
from serving import save_run, serving


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """The directory of two runs."""
    top = tmp_path_factory.mktemp("served") / "runs"
    save_run(top / "llama", (10, 20, 30))
    save_run(top / "tiny-gpt", (10,), loss="nan")
    return top


@pytest.fixture(scope="session")
def service(runs):
    """The service over them, as `lab`."""
    with serving(("lab", runs)) as running:
        yield running

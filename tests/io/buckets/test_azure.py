"""Azure by obstore: urls, credentials, errors in words, and repeated requests. `test_contract` and
`test_added_storage` have the rest."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest
from emulators import AZURE_ACCOUNT, environment
from fault_proxy import FaultProxy
from fault_rules import Rule

import shardckpt
from shardckpt.errors import NotFoundError, StorageError, UrlError
from shardckpt.io.store import Store
from shardckpt.io.url import parse


@pytest.fixture
def azure(azure_server):
    """An Azurite, with this process's environment set for it."""
    with environment(azure_server.env()):
        yield azure_server


@pytest.fixture
def proxy(azure_server):
    """A proxy before Azurite, with this process's environment set for it."""
    with (
        FaultProxy(azure_server.endpoint) as proxy,
        environment({**azure_server.env(proxy.url), "SHARDCKPT_RETRY_SECONDS": "2"}),
    ):
        yield proxy


@pytest.mark.parametrize("scheme", ["abfs", "abfss"])
def test_a_url_with_the_account_leads_to_the_same_objects(azure, monkeypatch, scheme):
    name = uuid.uuid4().hex
    shardckpt.save(azure.url(name), {"w": 1})
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    url = f"{scheme}://{azure.bucket}@{AZURE_ACCOUNT}.dfs.core.windows.net/{name}"
    assert shardckpt.restore(url) == {"w": 1}
    assert str(parse(url)) == f"abfs://{azure.bucket}@{AZURE_ACCOUNT}.dfs.core.windows.net/{name}"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "az://A_B/run",
            "'A_B' is not a container name; container names are .* Write az://container/path",
        ),
        ("az://a--b/run", "with single dashes between them"),
        ("az:///run", "is not a container name"),
        ("abfs://container/run", "Write abfs://container@account.dfs.core.windows.net/path"),
        ("abfs://container@account/run", "is not a container@account.dfs.core.windows.net"),
    ],
)
def test_a_url_that_names_no_container_is_refused(url, message):
    with pytest.raises(UrlError, match=message):
        parse(url)


def test_a_container_that_is_not_there_is_an_error_that_says_so(azure):
    store = Store.open("az://no-such-container/run")
    for use in (
        store.list,
        store.list_children,
        store.delete_prefix,
        lambda: store.write("key", b""),
        lambda: store.read("key"),
    ):
        with pytest.raises(StorageError, match=r"no such bucket .*create it"):
            use()


def test_credentials_that_are_refused_are_an_error_that_says_so(azure, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "bm8=")
    store = Store.open(azure.url("run"))
    for use in (store.list, lambda: store.write("key", b""), lambda: store.read("key")):
        with pytest.raises(
            StorageError, match=r"403 Forbidden.*give these credentials permission"
        ) as error:
            use()
        assert "\n" not in str(error.value)


def test_a_missing_account_is_an_error_that_names_the_variable(azure, monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(StorageError, match="set AZURE_STORAGE_ACCOUNT_NAME, or write abfs://"):
        Store.open(azure.url("run"))


@pytest.mark.parametrize("refused", [True, False])
def test_a_machine_without_credentials_and_identity_is_an_error_that_says_so(
    azure, monkeypatch, refused
):
    """The service of identities refuses connections; or it answers that it knows none."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv(
        "AZURE_MSI_ENDPOINT", "http://127.0.0.1:9/token" if refused else f"{azure.endpoint}/token"
    )
    monkeypatch.setenv(
        "AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{9 if refused else azure.port}/another"
    )
    with pytest.raises(
        StorageError,
        match=r"Error performing token request.*set AZURE_STORAGE_ACCOUNT_KEY or other credentials",
    ):
        Store.open(azure.url("run")).read("key")


@pytest.mark.long
def test_an_endpoint_that_refuses_connections_is_given_up_soon(azure, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:9/{AZURE_ACCOUNT}")
    with pytest.raises(
        StorageError,
        match=r"connections are refused, and nothing there has answered .*check the endpoint",
    ):
        Store.open(azure.url("run")).read("key")


@pytest.mark.long
@pytest.mark.parametrize(
    "fault", [{"fault": "status", "status": 503}, {"fault": "reset"}], ids=["503", "reset"]
)
def test_requests_are_repeated_until_they_succeed(azure_server, proxy, fault):
    store = Store.open(azure_server.url(uuid.uuid4().hex))
    uses = {
        "write": lambda: store.write("a/key", b"bytes"),
        "read": lambda: store.read("a/key"),
        "size": lambda: store.size("a/key"),
        "list": lambda: store.list("a/"),
        "children": store.list_children,
        "delete": lambda: store.delete("a/key"),
    }
    for name, use in uses.items():
        with proxy.rules.during(Rule(times=2, **fault)):
            proxy.traffic.reset()
            assert use() == {
                "read": b"bytes",
                "size": 5,
                "list": ["a/key"],
                "children": ["a/"],
            }.get(name)
        assert len(proxy.traffic.exchanges()) == 3, name
    with (
        proxy.rules.during(Rule(times=None, **fault)),
        pytest.raises(StorageError, match=r"cannot write .*attempts failed"),
    ):
        store.write("key", b"")


def test_a_write_whose_answer_was_lost_is_a_success(azure_server, proxy):
    store = Store.open(azure_server.url(uuid.uuid4().hex))
    with proxy.rules.during(Rule("lost-answer", kinds=("upload",))):
        assert store.create("record", b"mine")
    assert store.read("record") == b"mine"


def test_a_listing_that_breaks_goes_on_without_the_names_that_it_gave(
    azure_server, proxy, monkeypatch
):
    from shardckpt.io.stores.azure import AzureContainer

    monkeypatch.setattr(AzureContainer, "page", 2)
    store = Store.open(azure_server.url(uuid.uuid4().hex))
    keys = [f"a/{i}" for i in range(7)]
    for key in keys:
        store.write(key, b"")
    pages = AzureContainer(azure_server.bucket).pages(f"{store.location.object_prefix}a/")
    names = [one.name for one in next(pages).objects]
    with proxy.rules.during(Rule("reset", times=1)):
        names += [one.name for page in pages for one in page.objects]
    assert names == [f"{store.location.object_prefix}{key}" for key in keys]


def test_a_listing_has_every_name_in_whatever_order_the_service_gives_them(azure, monkeypatch):
    """Azurite goes by UTF-16, and Python by code points; accounts with directories by component."""
    from shardckpt.io.stores.azure import AzureContainer

    monkeypatch.setattr(AzureContainer, "page", 2)
    store = Store.open(azure.url(uuid.uuid4().hex))
    keys = [f"a/{name}" for name in ("\U0001f600", "\U0001f601", "\uff5e", "\uff5d", "z")]
    for key in keys:
        store.write(key, b"")
    assert store.list("a/") == sorted(keys)
    store.delete_prefix("a/")
    assert store.list() == []


def test_a_checkpoint_on_azure_is_copied_to_another_storage_and_verified_there(azure, tmp_path):
    url = azure.url(uuid.uuid4().hex)
    shardckpt.save(url, {"w": list(range(9))})
    shardckpt.reshard(url, tmp_path / "copy")
    assert shardckpt.open(tmp_path / "copy").verify().ok
    with pytest.raises(NotFoundError):
        shardckpt.open(f"{url}-other")


def test_the_command_line_knows_azure(azure):
    url = azure.url(uuid.uuid4().hex)
    shardckpt.save(url, {"w": 1})
    command = [sys.executable, "-m", "shardckpt", "verify", url]
    done = subprocess.run(
        command, env={**os.environ}, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""Settings of the object stores: endpoints, credentials, retries and request rates.

All of it comes from environment variables, the same ones that each cloud's own tools use.

Google Cloud Storage (`gs://`, needs the extra `shardckpt[gcs]`):

- Credentials are Google's application default credentials: the file in
  `GOOGLE_APPLICATION_CREDENTIALS` (a service account's key or a user's refresh token; TensorStore,
  which reads and writes indexes, reads no `external_account` files), otherwise the file from
  `gcloud auth application-default login`, otherwise the machine's own service account, otherwise
  none.
- `TENSORSTORE_GCS_HTTP_URL` (TensorStore's name) or `STORAGE_EMULATOR_HOST` (the name in other
  tools) sets another endpoint; one of them is enough. Over plain `http://`, to an emulator, no
  credentials are sent.
- `GOOGLE_CLOUD_QUOTA_PROJECT`: this project pays for requests to a bucket whose owner does not.

S3 and compatible services (`s3://`, needs the extra `shardckpt[s3]`):

- Credentials: `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY` (and `AWS_SESSION_TOKEN`), otherwise
  the profile `AWS_PROFILE` of `AWS_SHARED_CREDENTIALS_FILE` and `AWS_CONFIG_FILE`, otherwise the
  container's or the machine's role. `AWS_NO_SIGN_REQUEST=1`: none, for public buckets. The files
  are read again when they change.
- `AWS_REQUEST_PAYER=requester`: this account pays for requests to a bucket whose owner does not.
  TensorStore 0.1.86 sends that header under a wrong name, so such a bucket can only be read.
- `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL` sets another endpoint, addressed as
  endpoint/bucket/name. It must enforce `If-Match` and `If-None-Match` on PUT; otherwise two
  concurrent saves can both report that they have committed.
- `AWS_REGION` or `AWS_DEFAULT_REGION` is the bucket's region. Without it AWS is asked, and another
  endpoint gets us-east-1.

Azure (`az://` and `abfs://`, needs the extra `shardckpt[azure]`):

- obstore reads the variables; its documentation of `AzureConfig` names all of them. An `abfs://`
  url names the account, for `az://` it is `AZURE_STORAGE_ACCOUNT_NAME`. Credentials are
  `AZURE_STORAGE_ACCOUNT_KEY`, `AZURE_STORAGE_SAS_TOKEN`, or a client's (`AZURE_CLIENT_ID`,
  `AZURE_TENANT_ID`, and `AZURE_CLIENT_SECRET` or `AZURE_FEDERATED_TOKEN_FILE`), otherwise the
  machine's managed identity.
- `AZURE_STORAGE_ENDPOINT` sets another endpoint, with the account's name in its path if the service
  needs that.

Web servers (`http://` and `https://`, read-only, need the extra `shardckpt[http]`):

- `SHARDCKPT_HTTP_HEADERS`: headers to send, one a line, after the origin that may get them:
  `https://models.example Authorization: Bearer …`. A redirect to another origin does not get them.

All:

- `SHARDCKPT_RETRY_SECONDS` (300): how long a request is retried, with growing pauses, after a
  response 408, 429 or 5xx, or a broken connection. A connection without traffic counts as broken
  after `TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS` (30, unless it is set), or after
  `SHARDCKPT_RETRY_SECONDS` if that is less, but not within `LEAST_STALLED` seconds.
- `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY`; `REQUESTS_CA_BUNDLE` or `SSL_CERT_FILE` (Cloud
  Storage), `AWS_CA_BUNDLE` (S3) and `TENSORSTORE_CA_BUNDLE` (indexes on both) for a certificate
  authority of your own.
- `SHARDCKPT_READS_PER_SECOND`, `SHARDCKPT_WRITES_PER_SECOND`: most reads and listings, and most
  writes and deletions, that this process begins per second. By default 4000 and 800 (`BUCKET`), of
  which each process of a save has its share. Retries are not counted, because their pauses spread
  them; nor are the few requests for an OCDBT index.

Set rates before a process first uses shardckpt: they are read once.
"""

from __future__ import annotations

import os
import re
from configparser import ConfigParser, ParsingError
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from shardckpt.errors import MissingExtraError, OptionError, StorageError
from shardckpt.io.buckets.rate_limit import ALONE, RateLimiter, RequestShare
from shardckpt.io.status import exists
from shardckpt.text import install_command

if TYPE_CHECKING:
    from collections.abc import Iterator

_EXTRAS = {
    "gs": ("google.auth", "google-auth", "gcs"),
    "s3": ("botocore", "botocore", "s3"),
    "az": ("obstore", "obstore", "azure"),
    "abfs": ("obstore", "obstore", "azure"),
    "http": ("urllib3", "urllib3", "http"),
    "https": ("urllib3", "urllib3", "http"),
}
"""Scheme → the module and the package that its requests need, and the extra that installs it."""
_HEADER = re.compile(r"(https?://[^\s/]+/?)\s+([A-Za-z0-9-]+):\s*(.+)")
_RETRY_SECONDS = 300.0
_MOST_TRIES = 1 << 16
"""Most retries of TensorStore: for twelve days."""
_STALLED_SECONDS = 30.0
LEAST_STALLED = 10.0
"""Least seconds after which a connection without traffic, or an operation, is given up."""
_AWS_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_NO_SIGN_REQUEST",
)
_AWS_SOURCES = ("aws_access_key_id", "role_arn", "credential_process")
"""Options of a profile with credentials; it needs one of them."""
PASSING = {408, 429, 500, 502, 503, 504}
"""HTTP statuses of temporary refusals."""
DENIED = {401, 403}
"""HTTP statuses of a request that the user may not make."""
UNKNOWN = {405, 501}
"""HTTP statuses for a request that a service does not know."""
_RATES = {"read": "SHARDCKPT_READS_PER_SECOND", "write": "SHARDCKPT_WRITES_PER_SECOND"}
BUCKET = {"read": 4000.0, "write": 800.0}
"""Requests per second to one bucket: four fifths of the capacity of a new GCS bucket. (S3 allows
5,500 and 3,500 per prefix.)

https://cloud.google.com/storage/docs/request-rate
"""


def prepare(scheme: str) -> None:
    """Prepare a process for an object store.

    This checks that the packages for the store are installed, and passes the settings to
    TensorStore.

    Raises:
        MissingExtraError: the scheme's extra is not installed.
        OptionError: a rate or a number of seconds is not a positive number; for S3, `AWS_PROFILE`
            is not a usable profile.
        StorageError: the files of AWS profiles cannot be looked at.
    """
    module, package, extra = _EXTRAS[scheme]
    if not _is_installed(module):
        raise MissingExtraError(
            f"{scheme}:// needs {package}; install it with `{install_command(extra)}`."
        )
    for kind in BUCKET:
        _limiter(kind, ALONE)
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(round(stalled_seconds())))
    if scheme == "s3":
        _check_aws_credentials(aws_stamp())
    endpoint = endpoint_of(scheme)
    if scheme == "gs" and endpoint is not None:
        # TensorStore's driver for GCS accepts these settings only from the environment.
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = endpoint
        if endpoint.startswith("http:"):
            os.environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")


def kvstore(scheme: str, bucket: str, path: str) -> dict[str, Any]:
    """TensorStore's spec of the objects in a bucket, or of the files of a web server.

    The names of the objects or files begin with `path`.
    """
    if scheme in ("http", "https"):
        base = f"{scheme}://{bucket}"
        return {
            "driver": "http",
            "base_url": base,
            "path": "/" + quote(path),
            "headers": [f"{k}: {v}" for k, v in web_headers(base).items()],
        }
    spec: dict[str, Any] = {
        "driver": "gcs" if scheme == "gs" else "s3",
        "bucket": bucket,
        "path": path,
    }
    if scheme == "s3":
        endpoint, region = endpoint_of(scheme), region_of_s3()
        spec |= {
            key: value
            for key, value in (("endpoint", endpoint), ("aws_region", region))
            if value is not None
        }
        spec |= {"requester_pays": True} if requester_pays() else {}
    return spec


def context(number: int = 0) -> dict[str, Any]:
    """Spec of the TensorStore context that all of a process's stores share.

    Args:
        number: count of the contexts that this process made before. The spec differs from the last
            one's, because TensorStore reads keys once for each spec.

    Raises:
        OptionError: a number of seconds is invalid.
    """
    tries = list(islice(pauses(), _MOST_TRIES))
    # If each try fails immediately, this number of retries with these pauses takes about the
    # configured time.
    retries = {
        "max_retries": len(tries),
        "initial_delay": f"{tries[0]}s",
        "max_delay": f"{tries[-1]}s",
    }
    try:
        credentials = _aws_credentials(number)
    except (OptionError, StorageError):
        # For S3 `prepare` raises it; other storages need no such credentials.
        credentials = {"type": "default"}
    project = os.environ.get("GOOGLE_CLOUD_QUOTA_PROJECT")
    payer = {"gcs_user_project": {"project_id": project}} if project else {}
    return {
        "gcs_request_retries": retries,
        "s3_request_retries": retries,
        "aws_credentials": credentials,
        **payer,
    }


def wait_for_rate(kind: Literal["read", "write"], share: RequestShare = ALONE) -> None:
    """Wait until this process may begin a request of this kind by its share of a bucket's rate."""
    _limiter(kind, share).wait()


def endpoint_of(scheme: str) -> str | None:
    """The endpoint for requests, without a slash at the end; None: the cloud's own."""
    names = (
        ("TENSORSTORE_GCS_HTTP_URL", "STORAGE_EMULATOR_HOST")
        if scheme == "gs"
        else ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    )
    endpoint = next(filter(None, map(os.environ.get, names)), None)
    if endpoint is None:
        return None
    return (endpoint if "://" in endpoint else f"http://{endpoint}").rstrip("/")


def web_headers(origin: str) -> dict[str, str]:
    """The headers in `SHARDCKPT_HTTP_HEADERS` for an origin, such as "https://host:8443".

    Raises:
        OptionError: a line is not an origin and header.
    """
    headers = {}
    for line in filter(
        None, map(str.strip, os.environ.get("SHARDCKPT_HTTP_HEADERS", "").splitlines())
    ):
        match = _HEADER.fullmatch(line)
        if match is None:
            raise OptionError(
                "SHARDCKPT_HTTP_HEADERS: write an origin and a header in each line, https://host "
                "Authorization: Bearer …."
            )
        if match[1].rstrip("/").lower() == origin.lower():
            headers[match[2]] = match[3]
    return headers


def region_of_s3() -> str | None:
    """The region that requests to S3 are signed for.

    None: the clients ask AWS for the bucket's region.
    """
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return region or ("us-east-1" if endpoint_of("s3") else None)


def is_anonymous() -> bool:
    """Whether requests to S3 are sent without credentials."""
    return os.environ.get("AWS_NO_SIGN_REQUEST", "").lower() in ("1", "yes", "true", "on")


def requester_pays() -> bool:
    """Whether this account pays for its requests to S3, whoever owns the bucket."""
    return os.environ.get("AWS_REQUEST_PAYER", "").lower() == "requester"


def context_stamp() -> tuple[object, ...]:
    """All that `context` depends on."""
    return aws_stamp(), retry_seconds(), os.environ.get("GOOGLE_CLOUD_QUOTA_PROJECT")


def aws_stamp() -> tuple[object, ...]:
    """The variables and the states of the files that have credentials for S3.

    Another one means that keys were rotated.
    """
    return (*map(os.environ.get, _AWS_VARIABLES), *map(_state, aws_files()))


def google_stamp() -> tuple[object, ...]:
    """The variables and the state of the file that have credentials for Cloud Storage."""
    file = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    return (
        file,
        os.environ.get("GOOGLE_AUTH_TOKEN_FOR_TESTING"),
        None if not file else _state(Path(file)),
    )


def _state(file: Path | None) -> tuple[int, int, int] | None:
    """Time of change, bytes and inode number.

    None for a file that cannot be seen, which its readers report.
    """
    if file is None:
        return None
    try:
        state = file.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino


def aws_files() -> tuple[Path | None, Path | None]:
    """The files of AWS profiles: credentials and configuration.

    None: it lies in a home directory, and this user has none.
    """
    return _settings_file("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), _settings_file(
        "AWS_CONFIG_FILE", "~/.aws/config"
    )


def stalled_seconds() -> float:
    """Seconds after which a connection without traffic is given up."""
    return _number("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS") or max(
        LEAST_STALLED, min(_STALLED_SECONDS, retry_seconds())
    )


def retry_seconds() -> float:
    """Seconds after which a request that fails is not sent again.

    Raises:
        OptionError: the variable is not a positive number.
    """
    return _number("SHARDCKPT_RETRY_SECONDS") or _RETRY_SECONDS


def pauses() -> Iterator[float]:
    """Yield the seconds of the pauses between tries.

    The pauses double up to a maximum, and add up to about `SHARDCKPT_RETRY_SECONDS`.

    Raises:
        OptionError: the variable is not a positive number.
    """
    seconds = retry_seconds()
    pause, longest = min(0.5, seconds / 8), min(16.0, seconds / 4)
    total = 0.0
    while total < seconds:
        yield pause
        total += pause
        pause = min(longest, 2 * pause)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package above it
        return False


def _aws_credentials(number: int = 0) -> dict[str, str]:
    """TensorStore's spec of the source of credentials for S3.

    Raises:
        OptionError: `AWS_PROFILE` names a profile without keys or a role.
    """
    if is_anonymous():
        return {"type": "anonymous"}
    # With type "environment" TensorStore looks only at the environment. Its default logs errors
    # about missing credential files, and does not find existing ones (0.1.86).
    if os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"):
        return {"type": "environment"}
    credentials, config = aws_files()
    named = os.environ.get("AWS_PROFILE")
    profile = named or "default"
    if _has_profile(credentials, profile) or _has_profile(
        config, profile if profile == "default" else f"profile {profile}"
    ):
        files = {"credentials_file": credentials, "config_file": config}
        again = "./" * (number % 8)
        paths = {
            key: f"{file.parent}/{again}{file.name}"
            if file is not None and exists(file)
            else os.devnull
            for key, file in files.items()
        }
        return {"type": "profile", "profile": profile, **paths}
    if named:
        raise OptionError(
            f"AWS_PROFILE={named}: neither {credentials or '~/.aws/credentials'} nor "
            f"{config or '~/.aws/config'} has a profile of that name with keys or a role; name "
            "another one, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    return {"type": "default"}


@lru_cache(maxsize=4)
def _check_aws_credentials(_stamp: object) -> None:
    """Raise what `_aws_credentials` raises; the files are parsed once for each stamp."""
    _aws_credentials()


def _settings_file(variable: str, default: str) -> Path | None:
    """The file that an environment variable names, or the default.

    None: it lies in a home directory, and this user has none.
    """
    try:
        return Path(os.environ.get(variable) or default).expanduser()
    except RuntimeError:  # HOME is not set, and the user has no entry in the list of users
        return None


def _has_profile(file: Path | None, section: str) -> bool:
    """Whether a section of an AWS file has credentials; many sections have only a region."""
    if file is None:
        return False
    parser = ConfigParser(interpolation=None, strict=False)
    try:
        parser.read(file)
    except (OSError, UnicodeDecodeError, ParsingError) as e:
        raise OptionError(
            f"{file} cannot be read as a file of AWS profiles ({e}); correct it."
        ) from e
    return parser.has_section(section) and any(
        parser.has_option(section, key) for key in _AWS_SOURCES
    )


@cache
def _limiter(kind: str, share: RequestShare) -> RateLimiter:
    """The rate limiter for requests of that kind.

    A rate from the environment applies to the process, whatever its share.
    """
    own = _number(_RATES[kind])
    if own is not None and share != ALONE:
        return _limiter(kind, ALONE)
    return RateLimiter(own or BUCKET[kind], share)


def _number(variable: str) -> float | None:
    """The value of an environment variable that must be a positive number.

    None if it is not set.
    """
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise OptionError(f"{variable}={text}: must be a positive number.")
    return value

"""Addresses of the project, from the installed package's metadata.

The metadata has them from `[project.urls]` of pyproject.toml.
"""

from __future__ import annotations


def project_url(label: str) -> str | None:
    """The address with a label, such as "Documentation".

    None if the package is not installed or has no such address.
    """
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        lines = metadata("shardckpt").get_all("Project-URL") or []
    except PackageNotFoundError:
        return None
    urls = dict(line.split(", ", 1) for line in lines)
    return urls.get(label)

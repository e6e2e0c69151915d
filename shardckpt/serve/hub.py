"""The endpoints that `huggingface_hub` asks for.

With them `from_pretrained` loads a training checkpoint that was never exported.

A run is a model: its id is that of the run, with `__` for each slash after the first. A revision is
`main` (the highest committed step that no rollback superseded), `step-100`, the name of a
checkpoint, a tag (the last step that has it), or a commit; `step-100+bfloat16` converts. A commit
is a digest of the attempt and of the options, so it stands for the same tensors for ever. If the
state has a key `model`, the model consists of the tensors below it.

`config.json`, tokenizers and the like come from the checkpoint, if an import kept them there, or
lie beside the checkpoints of the run.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.exceptions import HTTPException

from shardckpt.commit.attempts import unfolded
from shardckpt.convert.options import below
from shardckpt.errors import NotFoundError
from shardckpt.io.store import Store
from shardckpt.serve.catalogue.catalogue import MOST_ROWS
from shardckpt.serve.catalogue.query import CheckpointQuery
from shardckpt.serve.files import stored_file, view_source
from shardckpt.serve.service import Service
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardckpt.serve.sources import ByteSource
    from shardckpt.views.model_view import ModelView

BESIDE = (
    *(
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    *(
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "chat_template.jinja",
        "preprocessor_config.json",
    ),
)
"""Names of the files that may lie beside the checkpoints of a run."""
_LARGEST_BESIDE = 64 << 20
_DTYPES = ("", "float32", "bfloat16", "float16")
"""Dtypes of which commits are looked for."""
_STEP = re.compile(r"(?:step-)?(\d{1,15})", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_PART = "model/"
_MOST_COMMITS = 10_000


class _Model(NamedTuple):
    """A model at a revision."""

    ident: str
    run: str
    commit: str
    created: str | None
    view: ModelView


def api(service: Service, path: str) -> Any:
    """Describe a model, or list its files.

    The paths `<id>` and `<id>/revision/<revision>` describe a model, and `<id>/tree/<revision>`
    lists its files.
    """
    ident, word, rest = path, "revision", "main"
    for one in ("revision", "tree"):
        if f"/{one}/" in path:
            ident, _, rest = path.partition(f"/{one}/")
            word = one
    revision, _, folder = rest.partition("/")
    model = _model(service, ident, revision)
    files = {**dict(_beside(service, model.run)), **model.view.sizes}
    if word == "tree":
        if folder:
            raise _missing(
                "EntryNotFound", f"{shorten(folder)}: a model has no folders.", model.commit
            )
        return [
            {"type": "file", "path": name, "size": size, "oid": service.tag(model.commit, name)}
            for name, size in sorted(files.items())
        ]
    return {
        "id": ident,
        "modelId": ident,
        "sha": model.commit,
        "lastModified": None if model.created is None else model.created.replace("+00:00", ".000Z"),
        "private": False,
        "disabled": False,
        "gated": False,
        "tags": ["safetensors"],
        "library_name": "transformers",
        "siblings": [{"rfilename": name, "size": size} for name, size in sorted(files.items())],
    }


def resolve(service: Service, ident: str, rest: str) -> ByteSource:
    """Read a file of a model: `<id>/resolve/<revision>/<file>`."""
    revision, _, name = rest.partition("/")
    model = _model(service, ident, revision)
    headers = {
        "X-Repo-Commit": model.commit,
        "Content-Disposition": f'inline; filename="{re.sub(r"[^A-Za-z0-9._-]", "_", name)}"',
    }
    if name in model.view.sizes:
        return view_source(service, model.view, name, headers)
    if name in BESIDE:
        store = Store.open(service.roots.locate(model.run))
        service.roots.locate(f"{model.run}/{name}")
        source = stored_file(service, store, name, "application/octet-stream", headers)
        if source is not None and source.size <= _LARGEST_BESIDE:
            return source
    raise _missing("EntryNotFound", f"{ident} has no file {shorten(name)}.", model.commit)


def _model(service: Service, ident: str, revision: str) -> _Model:
    parts = ident.split("/")
    run = "/".join([*parts[:-1], *parts[-1].split("__")]) if len(parts) > 1 else ident
    name, _, dtype = revision.partition("+")
    entries = list(_at_revision(service, run, name))
    if not entries:
        known = service.catalogue.checkpoints(CheckpointQuery(run=run, limit=1))[0]
        if not known:
            raise _missing("RepoNotFound", f"there is no run {shorten(ident)}.")
        raise _missing("RevisionNotFound", f"{ident} has no revision {shorten(revision)}.")
    for entry in entries:
        opened = service.opened.get(entry["id"])
        part = opened.part("hub", partial(lambda one: below(_PART, one.names()), opened.checkpoint))
        for one in _DTYPES if _COMMIT.fullmatch(name) else (dtype,):
            options = part | ({"dtype": one} if one else {})
            commit = _commit(opened.attempt, options)
            if not _COMMIT.fullmatch(name) or commit == name:
                if len(service.commits) >= _MOST_COMMITS:
                    service.commits.clear()
                service.commits[run, commit] = entry["id"]
                return _Model(
                    entry["id"], run, commit, entry["created"], service.opened.view(opened, options)
                )
    raise _missing("RevisionNotFound", f"{ident} has no commit {name}.")


def _commit(attempt: str, options: Mapping[str, Any]) -> str:
    return Service.tag(unfolded(attempt), repr(sorted(options.items())))


def _may_have(entry: Mapping[str, Any], commit: str) -> bool:
    """Whether a commit may be of a checkpoint, with any options that a model's view may have."""
    parts = ({}, *(below(_PART, names) for names in ([_PART], [_PART, "other"])))
    options = (part | ({"dtype": dtype} if dtype else {}) for part in parts for dtype in _DTYPES)
    return any(_commit(entry["attempt"], one) == commit for one in options)


def _at_revision(service: Service, run: str, revision: str) -> Iterator[dict[str, Any]]:
    """The checkpoints that a revision may stand for, the best first."""
    step = _STEP.fullmatch(revision)
    if step is not None:
        query = CheckpointQuery(
            run=run, state="committed", first_step=int(step[1]), last_step=int(step[1]), limit=1
        )
        yield from service.catalogue.checkpoints(query)[0]
        return
    # A client asks for each file by its commit: do not look for that among all steps each time.
    known = service.commits.get((run, revision))
    for entry in service.catalogue.find([known]) if known is not None else ():
        if entry["state"] == "committed" and _may_have(entry, revision):
            yield entry
            return
    cursor = None
    while True:
        query = CheckpointQuery(
            run=run, state="committed", descending=True, limit=MOST_ROWS, cursor=cursor
        )
        entries, cursor = service.catalogue.checkpoints(query)
        if revision == "main":
            yield from (one for one in entries if not one["superseded"])
        elif _COMMIT.fullmatch(revision):
            yield from (one for one in entries if _may_have(one, revision))
        else:
            yield from (one for one in entries if one["name"] == revision)
        if cursor is None:
            break
    if revision not in ("main", "pinned", "superseded") and not _COMMIT.fullmatch(revision):
        tagged = CheckpointQuery(run=run, state="committed", tag=revision, descending=True, limit=1)
        yield from service.catalogue.checkpoints(tagged)[0]


def _beside(service: Service, run: str) -> Iterator[tuple[str, int]]:
    """Names and sizes of files beside the checkpoints of a run."""
    store = Store.open(service.roots.locate(run))
    for name in set(BESIDE).intersection(store.list_children()):
        with suppress(NotFoundError):  # a link that leads out
            service.roots.locate(f"{run}/{name}")
            size = store.size(name)
            if size is not None and size <= _LARGEST_BESIDE:
                yield name, size


def _missing(code: str, message: str, commit: str | None = None) -> HTTPException:
    """A 404 as `huggingface_hub` tells them apart."""
    return HTTPException(
        404,
        message,
        {"X-Error-Code": code, **({} if commit is None else {"X-Repo-Commit": commit})},
    )

"""The operations that can be started as jobs: their parameters, who may start them, and what they do.

Each runs in a process of its own (`worker`). It may be interrupted at any moment and run again with the same arguments: then it goes on, or
finds that everything is done. Places are given as ids. They are looked up below the roots when a job is asked for, and again when it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardckpt.commit import collecting, ended, pinning
from shardckpt.commit.attempts import attempts as find_attempts
from shardckpt.commit.markers import protection
from shardckpt.commit.publish import RECORD, published_attempt, record_digest
from shardckpt.convert.export import export_safetensors
from shardckpt.convert.importing import import_checkpoint
from shardckpt.errors import AlreadyExistsError, CorruptionError, FormatError, NotFoundError, OptionError, ReplacedError, VersionError
from shardckpt.excerpt import excerpt
from shardckpt.io.status import is_file
from shardckpt.io.store import Store
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.reading.naming.mapping_file import PRESETS
from shardckpt.reshard.execute import reshard
from shardckpt.reshard.rules import parse_mesh
from shardckpt.reshard.rules.rules import combined_rules
from shardckpt.serve.jobs import retention
from shardckpt.serve.jobs.retention import RetentionRules
from shardckpt.serve.jobs.verification import verify_checkpoint, verify_unreadable
from shardckpt.serve.openapi import Parameter
from shardckpt.serve.opened import VIEW, view_options
from shardckpt.views.model_view import ModelView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardckpt.io.url import Location
    from shardckpt.serve.roots import Roots

_COMPARED = 8 << 20


@dataclass(frozen=True, slots=True)
class Work:
    """The context of a running operation."""

    roots: Roots
    who: str
    again: bool
    """Whether it was started before, and interrupted."""
    options: Mapping[str, Any]
    """`writing`: `engine`, `workers` and `memory_limit` of reshards and imports; `keep`: the file of rules; `rate`: bytes per second."""
    progress: Callable[[int, int], None]
    """Called with the units done and the total."""
    note: Callable[[dict[str, Any]], None]
    """Called with what the service is to write down at once."""
    resume: dict[str, Any] = field(default_factory=dict)
    """Notes of earlier tries."""

    def open(self, ident: str) -> Checkpoint:
        """A checkpoint all of whose files lie below the roots."""
        checkpoint = Checkpoint(str(self.roots.locate(ident)))
        self.roots.check(checkpoint)
        return checkpoint


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation."""

    name: str
    run: Callable[..., dict[str, Any]]
    """Called with a `Work` and the arguments; returns the result as JSON. Its docstring is the summary for programs."""
    parameters: tuple[Parameter, ...]
    scope: str = "operate"
    quick: bool = False
    """Whether it takes seconds, and runs beside the long jobs."""

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values of all parameters.

        Raises:
            OptionError: a parameter is unknown, missing or invalid.
        """
        names = [parameter.name for parameter in self.parameters]
        odd = next((name for name in given if name not in names), None)
        if odd is not None:
            raise OptionError(f"{self.name} has no parameter {excerpt(odd)}; there are {', '.join(names)}.")
        return {parameter.name: parameter.of_json(given) for parameter in self.parameters}

    def needs(self, arguments: Mapping[str, Any]) -> str:
        """The scope that starting it with these arguments needs."""
        return "admin" if arguments.get("overwrite") or arguments.get("apply") is not None else self.scope

    def places(self, roots: Roots, arguments: Mapping[str, Any]) -> tuple[str, str | None]:
        """The id that it is about, and the id of the place that it writes, both checked.

        Raises:
            NotFoundError, OptionError: a place cannot be used.
        """
        subject = next(str(arguments[name]).strip("/") for name in ("checkpoint", "run", "from") if name in arguments)
        place = roots.locate(subject)
        if "checkpoint" in arguments and not Store.open(place).exists(RECORD):
            raise NotFoundError(f"{excerpt(subject)}: there is no checkpoint.")
        to = arguments.get("to")
        if to is None:
            return subject, None
        destination(roots, to, checkpoint=self.name != "export")
        return subject, str(to).strip("/")

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Check what can be checked at once.

        Raises:
            OptionError, ShardingError: an argument is invalid.
        """
        _take_layout(dict(arguments))
        if self.name == "tag":
            pinning.check_tag(arguments["tag"])


def destination(roots: Roots, ident: str, *, checkpoint: bool = True) -> Location:
    """The place of an id that may be written, by a checkpoint or by an export.

    Raises:
        NotFoundError: it lies in no root.
        OptionError: it is a root, lies inside a checkpoint or in a run that has ended, or holds a pinned or tagged checkpoint; a new
            checkpoint would lie above others, or an export in a checkpoint.
    """
    ident = ident.strip("/")
    place = roots.locate(ident)
    parts = ident.split("/")
    if len(parts) < 2:
        raise OptionError(f"to={excerpt(ident)}: give a place below a root, as in {excerpt(ident)}/NAME.")
    for n in range(1, len(parts)):
        above = "/".join(parts[:n])
        found = roots.locate(above)
        if found.local is not None and is_file(found.local):
            raise OptionError(f"to={excerpt(ident)}: {above} is a file; give a place outside of it.")
        if Store.open(found).exists(RECORD):
            raise OptionError(f"to={excerpt(ident)}: it lies in the checkpoint {above}; give a place outside of it.")
    if Store.open(roots.locate("/".join(parts[:-1]))).exists(ended.ENDED):
        raise OptionError(f"to={excerpt(ident)}: its run is marked as ended; `reopen` the run, or choose another place.")
    _check_free(place, ident, checkpoint=checkpoint)
    return place


def _check_free(place: Location, ident: str, *, checkpoint: bool) -> None:
    """Check that what is at a place may be there; raises OptionError."""
    if place.local is not None and is_file(place.local):
        if checkpoint:
            raise OptionError(f"to={excerpt(ident)}: a file is there; choose another place.")
        return
    store = Store.open(place)
    children = store.list_children()
    if RECORD in children and not checkpoint:
        raise OptionError(f"to={excerpt(ident)}: a checkpoint is there; an export needs another place.")
    attempts = {f"{name}/" for name in find_attempts(store, children)}
    if checkpoint and RECORD not in children and any(name.endswith("/") and name not in attempts for name in children):
        raise OptionError(f"to={excerpt(ident)}: it has other directories in it, as a run has; give a place below it, or another place.")
    protected = protection(store, None)
    if protected:
        raise OptionError(f"to={excerpt(ident)}: the checkpoint there is {protected}, and is not replaced; choose another place.")


def verify(work: Work, checkpoint: str) -> dict[str, Any]:
    """Read every chunk of a checkpoint and compare it with its checksum."""
    place = work.roots.locate(checkpoint)
    try:
        found = Checkpoint(str(place))
    except VersionError:
        raise
    except (FormatError, CorruptionError) as e:
        return verify_unreadable(work, e)
    work.roots.check(found)
    return verify_checkpoint(work, found)


def pin(work: Work, checkpoint: str) -> dict[str, Any]:
    """Protect a checkpoint from deletion."""
    pinning.pin(str(work.roots.locate(checkpoint)))
    return {"pinned": True}


def unpin(work: Work, checkpoint: str) -> dict[str, Any]:
    """Allow a checkpoint to be deleted again."""
    return {"pinned": False, "was_pinned": pinning.unpin(str(work.roots.locate(checkpoint)))}


def tag(work: Work, checkpoint: str, tag: str) -> dict[str, Any]:
    """Give a checkpoint a tag, such as `best` or `released`, which also protects it from deletion."""
    pinning.tag(str(work.roots.locate(checkpoint)), tag)
    return {"tag": tag}


def untag(work: Work, checkpoint: str, tag: str) -> dict[str, Any]:
    """Take a tag from a checkpoint."""
    return {"tag": tag, "was_tagged": pinning.untag(str(work.roots.locate(checkpoint)), tag)}


def delete(work: Work, checkpoint: str, attempt: str | None, reason: str, record: str | None = None) -> dict[str, Any]:
    """Delete a checkpoint, unless it is pinned, tagged, or a base of others beside it."""
    store = Store.open(work.roots.locate(checkpoint))
    if work.again and not store.exists(RECORD):  # an earlier start has deleted it
        return {"deleted": True, "left": []}
    if attempt is None and record_digest(store.read_versioned(RECORD)[0]) != record and not (work.again and _is_tombstone(store)):
        raise ReplacedError(f"{store}: it has changed since the request to delete it; nothing was deleted.")
    left = collecting.delete(str(store.location), reason=f"{reason} ({work.who})", attempt=attempt)
    return {"deleted": True, "left": [f"{one.attempt}: {one.outcome}: {one.reason}" for one in left if one.outcome != "removed"]}


def _is_tombstone(store: Store) -> bool:
    try:
        return published_attempt(store) is None
    except FormatError:
        return False


def reshard_checkpoint(work: Work, checkpoint: str, to: str, **asked: Any) -> dict[str, Any]:
    """Write a checkpoint anew for another mesh or partition; the source stays as it is."""
    source = work.open(checkpoint)
    place = destination(work.roots, to)
    layout = _take_layout(asked)
    return reshard(str(source.location), str(place), progress=work.progress, **work.options["writing"], **layout, **asked).to_json()


def _take_layout(asked: dict[str, Any]) -> dict[str, Any]:
    """Remove `mesh`, `rule` and `preset` from arguments; return the options `mesh` and `rules`. Raises OptionError, ShardingError."""
    mesh = asked.pop("mesh", None)
    rules = combined_rules(asked.pop("rule", None), preset=asked.pop("preset", None))
    return {"mesh": None if mesh is None else parse_mesh(mesh), "rules": rules}


def copy(work: Work, checkpoint: str, to: str, overwrite: bool) -> dict[str, Any]:
    """Copy a checkpoint as it is, with the tensors that lie in its bases; server-side or by hard links where that is possible."""
    place = destination(work.roots, to)
    source = work.open(checkpoint)
    return reshard(str(source.location), str(place), overwrite=overwrite, progress=work.progress, **work.options["writing"]).to_json()


def export(work: Work, checkpoint: str, to: str, overwrite: bool, **asked: Any) -> dict[str, Any]:
    """Write a checkpoint as safetensors: a file, or a directory as on Hugging Face."""
    place = destination(work.roots, to, checkpoint=False)
    source = work.open(checkpoint)
    options = view_options(asked)
    limit = work.options["writing"]["memory_limit"]
    try:
        report = export_safetensors(
            str(source.location), str(place), overwrite=overwrite, memory_limit=limit, progress=work.progress, **options
        )
    except AlreadyExistsError:
        view = ModelView(source, **options)
        if not work.again or not _is_exported(view, place):
            raise
        return {"url": str(place), "files": list(view.sizes), "bytes": sum(view.sizes.values()), "done_before": True}
    return report.to_json()


def import_foreign(work: Work, to: str, **asked: Any) -> dict[str, Any]:
    """Import a checkpoint of another format, such as safetensors, DCP or Orbax. No pickle is trusted."""
    source = work.roots.locate(asked.pop("from"))
    work.roots.check_links(source)
    place = destination(work.roots, to)
    layout = _take_layout(asked)
    given = {name: value for name, value in asked.items() if value is not None}
    return import_checkpoint(str(source), str(place), progress=work.progress, **work.options["writing"], **layout, **given).to_json()


def end(work: Work, run: str) -> dict[str, Any]:
    """Mark a run as ended, so that rules of retention may delete its steps."""
    ended.mark_ended(Store.open(work.roots.locate(run)), work.who)
    return {"ended": True}


def reopen(work: Work, run: str) -> dict[str, Any]:
    """Remove the mark of a run that has ended."""
    return {"ended": False, "was_ended": ended.unmark_ended(Store.open(work.roots.locate(run)))}


def retain(work: Work, run: str, apply: int | None, expected: Mapping[str, str] | None) -> dict[str, Any]:
    """List the steps of a run that the rules would delete; with `apply`, delete the steps that an earlier such job has listed."""
    path = work.options.get("keep")
    work.roots.only_ident(run)
    rule = None if path is None else RetentionRules.read(path).rule_for(run)
    if rule is None:
        raise OptionError(f"no rule of --keep is for {excerpt(run)}, so nothing of it is deleted.")
    report = retention.retain(Store.open(work.roots.locate(run)), rule, expected, work.progress)
    steps = [{"name": one.name, "attempt": one.attempt, "bytes": one.nbytes} for one in report.deleted]
    return {"dry": expected is None, "applied": apply, "steps": steps, "bytes": report.nbytes, "left": dict(report.left)}


def _is_exported(view: ModelView, place: Location) -> bool:
    """Whether the files at a place are those that an export of the view writes."""
    single = place.name.endswith(".safetensors")
    above = place.parent if single else place
    assert above is not None, "a file is below something"
    store = Store.open(above)
    mine, theirs = bytearray(_COMPARED), bytearray(_COMPARED)
    for name in view.weights if single else view.sizes:
        key, size = place.name if single else name, view.sizes[name]
        if store.size(key) != size:
            return False
        for first in range(0, size, _COMPARED):
            n = min(_COMPARED, size - first)
            view.read_into(name, first, memoryview(mine)[:n])
            store.read_into(key, first, [memoryview(theirs)[:n]])
            if mine[:n] != theirs[:n]:
                return False
    return True


_CHECKPOINT = Parameter(name="checkpoint", about="Id of the checkpoint.", required=True, example="lab/run-7/100")
_TO = Parameter(name="to", about="Id of the new place.", required=True, example="lab/copies/100")
_OVERWRITE = Parameter(name="overwrite", kind="boolean", about="Replace what is there; needs the scope admin.", default=False)
_RUN = Parameter(name="run", about="Id of the run.", required=True, example="lab/run-7")
_TAG = Parameter(name="tag", about="The tag.", required=True, example="best")
_STORED = (
    Parameter(name="mesh", about="The new mesh, as in data=2,model=4.", example="data=2,model=2"),
    Parameter(name="rule", kind="texts", about="PATTERN=SPEC: how matching tensors are cut."),
    Parameter(name="dtype", about="Convert weights to this dtype."),
    Parameter(name="only", kind="texts", about="Keep only names that match a pattern."),
    Parameter(name="layout", about="How the new checkpoint is stored.", choices=("packed", "zarr")),
    Parameter(name="compression", about="Compression.", choices=("zstd", "none")),
    _OVERWRITE,
)
OPERATIONS = {
    one.name: one
    for one in (
        Operation("verify", verify, (_CHECKPOINT,)),
        Operation("pin", pin, (_CHECKPOINT,), quick=True),
        Operation("unpin", unpin, (_CHECKPOINT,), "admin", quick=True),
        Operation("tag", tag, (_CHECKPOINT, _TAG), quick=True),
        Operation("untag", untag, (_CHECKPOINT, _TAG), "admin", quick=True),
        Operation(
            "reshard", reshard_checkpoint, (_CHECKPOINT, _TO, *_STORED, Parameter(name="preset", about="Rules for a family of models."))
        ),
        Operation("copy", copy, (_CHECKPOINT, _TO, _OVERWRITE)),
        Operation("export", export, (_CHECKPOINT, _TO, *VIEW, _OVERWRITE)),
        Operation(
            "import",
            import_foreign,
            (
                Parameter(name="from", about="Id of the file or directory to import.", required=True, example="lab/downloads/llama"),
                _TO,
                *_STORED,
                Parameter(name="mapping", about="A mapping that comes with shardckpt.", choices=PRESETS),
                Parameter(name="strip_prefix", about="Remove a prefix from names."),
                Parameter(name="add_prefix", about="Add a prefix to names."),
                Parameter(name="into", about="Put the state below this name, as in model."),
            ),
        ),
        Operation("end", end, (_RUN,), "admin", quick=True),
        Operation("reopen", reopen, (_RUN,), "admin", quick=True),
        Operation(
            "retain",
            retain,
            (
                _RUN,
                Parameter(name="apply", kind="integer", about="Number of the job that has listed the steps; default: only list.", least=1),
            ),
        ),
        Operation(
            "delete",
            delete,
            (
                _CHECKPOINT,
                Parameter(name="attempt", about="The attempt to delete, as `GET` shows it; default: the one that is there now."),
                Parameter(name="reason", about="For people who look for it later.", default="on request"),
            ),
            "admin",
        ),
    )
}

"""The operations that can run as jobs: parameters, who may start them, and what they do.

Each runs in a process of its own (`worker`). It may be interrupted at any moment and run again with
the same arguments: then it goes on, or finds that everything is done. Places are given as ids. They
are looked up below the roots when a job is asked for, and again when it runs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from shardckpt.commit.publish import RECORD
from shardckpt.convert.export import export_safetensors
from shardckpt.convert.importing import import_checkpoint
from shardckpt.convert.options import ImportOptions, SafetensorsOptions
from shardckpt.errors import (
    AlreadyExistsError,
    CorruptionError,
    FormatError,
    NotFoundError,
    OptionError,
    VersionError,
)
from shardckpt.io.store import Store
from shardckpt.options import Options, parse_duration
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.reading.naming.mapping_file import PRESETS
from shardckpt.reshard.execute import reshard
from shardckpt.reshard.options import ReshardOptions
from shardckpt.runs import collecting, ended, pinning
from shardckpt.runs.steps import list_steps
from shardckpt.serve.jobs import retention
from shardckpt.serve.jobs.destinations import destination
from shardckpt.serve.jobs.retention import RetentionRules
from shardckpt.serve.jobs.verification import verify_checkpoint, verify_unreadable
from shardckpt.serve.openapi import Parameter, parameters
from shardckpt.text import shorten
from shardckpt.versions.folding import DIFFERENCES, fold
from shardckpt.views.model_view import ModelView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardckpt.io.url import Location
    from shardckpt.serve.jobs.work import Work
    from shardckpt.serve.roots import Roots

_COMPARED = 8 << 20
_MOST_LEFT = 100
_MOST_STEPS, _MOST_REASONS = 10_000, 1000
"""Most steps that one dry run lists, and most of those that stay; a result is one line."""

_SUBJECTS = ("checkpoint", "run", "from")
"""The parameters for the id that an operation is about; each has one of them."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation."""

    name: str
    run: Callable[..., dict[str, Any]]
    """Called with a `Work` and the arguments; returns the result as JSON. Its docstring is the
    summary for programs."""
    own: tuple[Parameter, ...]
    scope: str = "operate"
    quick: bool = False
    """Whether it takes seconds, and runs beside the long jobs."""
    options: type[Options] = Options
    """Options of the library that become parameters."""
    without: tuple[str, ...] = ()
    """Names of those that do not."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters."""
        return (*self.own, *parameters(self.options, without=self.without, mapping=PRESETS))

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values of all parameters.

        Raises:
            OptionError: a parameter is unknown, missing or invalid.
        """
        names = [parameter.name for parameter in self.parameters]
        odd = next((name for name in given if name not in names), None)
        if odd is not None:
            raise OptionError(
                f"{self.name} has no parameter {shorten(odd)}; there are {', '.join(names)}."
            )
        values = {parameter.name: parameter.of_json(given) for parameter in self.parameters}
        ids = {name: values[name] for name in (*_SUBJECTS, "to") if values.get(name) is not None}
        return values | {name: str(ident).strip("/") for name, ident in ids.items()}

    def needs(self, arguments: Mapping[str, Any]) -> str:
        """The scope that starting it with these arguments needs."""
        return (
            "admin"
            if arguments.get("overwrite") or arguments.get("apply") is not None
            else self.scope
        )

    def writes(self, arguments: Mapping[str, Any]) -> bool:
        """Whether it changes anything in the roots with these arguments."""
        return (
            self.name != "verify"
            and not arguments.get("dry")
            and not (self.name == "retain" and arguments.get("apply") is None)
        )

    def places(self, roots: Roots, arguments: Mapping[str, Any]) -> tuple[str, str | None]:
        """The id that it is about, and the id of the place that it writes, both checked.

        Raises:
            NotFoundError, OptionError: a place cannot be used.
        """
        subject, to = self.idents(arguments)
        place = roots.locate(subject)
        if "checkpoint" in arguments and not Store.open(place).exists(RECORD):
            raise NotFoundError(f"{shorten(subject)}: there is no checkpoint.")
        if to is not None:
            destination(roots, to, checkpoint=self.name != "export")
        return subject, to

    def idents(self, arguments: Mapping[str, Any]) -> tuple[str, str | None]:
        """The ids of `places`, not checked."""
        return next(arguments[name] for name in _SUBJECTS if name in arguments), arguments.get("to")

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Check what can be checked at once.

        Raises:
            OptionError, ShardingError: an argument is invalid.
        """
        self.options.arguments(arguments)
        if self.name == "tag":
            pinning.check_tag(arguments["tag"])
        if self.name == "gc":
            parse_duration(arguments["grace"], "grace")


def verify(work: Work, checkpoint: str) -> dict[str, Any]:
    """Read every chunk of a checkpoint and compare it with its checksum."""
    place = work.roots.locate(checkpoint)
    try:
        opened = Checkpoint(place)
    except VersionError:
        raise
    except (FormatError, CorruptionError) as e:
        return verify_unreadable(work, e)
    work.roots.check(opened)
    return verify_checkpoint(work, opened)


def pin(work: Work, checkpoint: str) -> dict[str, Any]:
    """Protect a checkpoint from deletion."""
    pinning.pin(str(work.roots.locate(checkpoint)))
    return {"pinned": True}


def unpin(work: Work, checkpoint: str) -> dict[str, Any]:
    """Allow a checkpoint to be deleted again."""
    return {"pinned": False, "was_pinned": pinning.unpin(str(work.roots.locate(checkpoint)))}


def tag(work: Work, checkpoint: str, tag: str) -> dict[str, Any]:
    """Give a checkpoint a tag, such as `best` or `released`; it also protects from deletion."""
    pinning.tag(str(work.roots.locate(checkpoint)), tag)
    return {"tag": tag}


def untag(work: Work, checkpoint: str, tag: str) -> dict[str, Any]:
    """Take a tag from a checkpoint."""
    return {"tag": tag, "was_tagged": pinning.untag(str(work.roots.locate(checkpoint)), tag)}


def delete(
    work: Work, checkpoint: str, attempt: str | None, reason: str, record: str | None = None
) -> dict[str, Any]:
    """Delete a checkpoint, unless it is pinned, tagged, or a base of others beside it."""
    store = Store.open(work.roots.locate(checkpoint))
    if work.again and not store.exists(RECORD):  # an earlier start has deleted it
        return {"deleted": True, "left": []}
    store.check_replaces("delete")
    collecting.check_no_base(store)
    left = collecting.delete_place(
        store,
        reason=f"{reason} ({work.who})",
        grace=collecting.GRACE,
        attempt=attempt,
        record=None if attempt is not None else record or "none",
    )
    return {
        "deleted": True,
        "left": [
            f"{one.attempt}: {one.outcome}: {one.reason}"
            for one in left
            if one.outcome != "removed"
        ],
    }


def reshard_checkpoint(work: Work, checkpoint: str, to: str, **asked: Any) -> dict[str, Any]:
    """Write a checkpoint anew for another mesh or partition; the source stays as it is."""
    source = work.open(checkpoint)
    place = destination(work.roots, to)
    options = ReshardOptions.arguments(asked)
    return reshard(
        str(source.location),
        str(place),
        progress=work.progress,
        **work.options["writing"],
        **options,
    ).to_json()


def copy(work: Work, checkpoint: str, to: str, overwrite: bool) -> dict[str, Any]:
    """Copy a checkpoint as it is, with the tensors that lie in its bases.

    Server-side or by hard links where that is possible.
    """
    return reshard_checkpoint(work, checkpoint, to, overwrite=overwrite)


def export(work: Work, checkpoint: str, to: str, **asked: Any) -> dict[str, Any]:
    """Write a checkpoint as safetensors: a file, or a directory as on Hugging Face."""
    place = destination(work.roots, to, checkpoint=False)
    source = work.open(checkpoint)
    options = SafetensorsOptions.arguments(asked)
    limit = work.options["writing"]["memory_limit"]
    try:
        report = export_safetensors(
            str(source.location), str(place), memory_limit=limit, progress=work.progress, **options
        )
    except AlreadyExistsError:  # also with `overwrite`, where a directory has the file's name
        view = ModelView(
            source, **{name: value for name, value in options.items() if name != "overwrite"}
        )
        if not work.again or not _is_exported(view, place):
            raise
        return {
            "url": str(place),
            "files": list(view.sizes),
            "bytes": sum(view.sizes.values()),
            "done_before": True,
        }
    return report.to_json()


def import_foreign(work: Work, to: str, **asked: Any) -> dict[str, Any]:
    """Import a checkpoint of another format, such as safetensors, DCP or Orbax.

    No pickle is trusted.
    """
    source = work.roots.locate(asked.pop("from"))
    work.roots.check_links(source)
    place = destination(work.roots, to)
    options = ImportOptions.arguments(asked)
    return import_checkpoint(
        str(source), str(place), progress=work.progress, **work.options["writing"], **options
    ).to_json()


def end(work: Work, run: str) -> dict[str, Any]:
    """Mark a run as ended, so that rules of retention may delete its steps."""
    ended.mark_ended(Store.open(work.roots.locate(run)), work.who)
    return {"ended": True}


def reopen(work: Work, run: str) -> dict[str, Any]:
    """Remove the mark of a run that has ended."""
    return {"ended": False, "was_ended": ended.unmark_ended(Store.open(work.roots.locate(run)))}


def retain(
    work: Work, run: str, apply: int | None, expected: Mapping[str, str] | None
) -> dict[str, Any]:
    """List the steps of a run that the rules would delete, or delete those listed earlier.

    With `apply`, the job deletes the steps that an earlier such job has listed. A job lists at most
    10,000 steps; a later one lists the others.
    """
    path = work.options.get("keep")
    work.roots.only_ident(run)
    rule = None if path is None else RetentionRules.read(path).rule_for(run)
    if rule is None:
        raise OptionError(f"no rule of --keep is for {shorten(run)}, so nothing of it is deleted.")
    root = Store.open(work.roots.locate(run))
    mark = ended.ended(root)
    report = retention.retain(root, rule, expected, work.progress)
    steps = [
        {"name": one.name, "attempt": one.attempt, "bytes": one.nbytes}
        for one in report.deleted[:_MOST_STEPS]
    ]
    return {
        "dry": expected is None,
        "ended": None if mark is None else mark.when,
        "applied": apply,
        "steps": steps,
        "bytes": sum(one["bytes"] for one in steps),
        "left": dict(islice(report.left.items(), _MOST_REASONS)),
        "left_count": len(report.left),
    }


def gc(work: Work, run: str, grace: str, dry: bool) -> dict[str, Any]:
    """Publish complete saves of a run, and remove those that nobody goes on with.

    See `shardckpt gc`.
    """
    attempts = collecting.collect(
        str(work.roots.locate(run)), grace=parse_duration(grace, "grace"), dry_run=dry
    )
    outcomes = Counter(one.outcome for one in attempts)
    left = [
        f"{one.location.name}/{one.attempt}: {one.outcome}: {one.reason}"
        for one in attempts
        if one.outcome in ("kept", "failed")
    ]
    return {
        "dry": dry,
        **{name: outcomes[name] for name in ("removed", "published", "kept", "failed")},
        "left": left[:_MOST_LEFT],
    }


def fold_versions(work: Work, run: str, most: int) -> dict[str, Any]:
    """Store versions of a publisher anew, as differences from earlier ones.

    Late followers then read few of them. See `shardckpt fold`.
    """
    root = Store.open(work.roots.locate(run))
    for newest in [info.step for info in list_steps(root) if info.state == "committed"][-1:]:
        work.open(f"{run}/{newest}")  # its chain lies below the roots
    return {"most": most, "folded": [asdict(one) for one in fold(str(root.location), most=most)]}


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


_CHECKPOINT = Parameter(
    name="checkpoint", about="Id of the checkpoint.", required=True, example="lab/run-7/100"
)
_TO = Parameter(name="to", about="Id of the new place.", required=True, example="lab/copies/100")
_OVERWRITE = Parameter(
    name="overwrite",
    kind="boolean",
    about="Replace what is there; needs the scope admin.",
    default=False,
)
_RUN = Parameter(name="run", about="Id of the run.", required=True, example="lab/run-7")
_TAG = Parameter(name="tag", about="The tag.", required=True, example="best")
_GRACE = Parameter(
    name="grace", about="Keep unfinished saves with a write within this time.", default="24h"
)
_DRY = Parameter(
    name="dry", kind="boolean", about="Only count what would be removed.", default=False
)
_APPLY = Parameter(
    name="apply",
    kind="integer",
    about="Number of the job that has listed the steps; default: only list.",
    least=1,
)
_MOST = Parameter(
    name="most",
    kind="integer",
    about="Differences that a reader of any version applies at most.",
    default=DIFFERENCES,
    least=1,
)
_ATTEMPT = Parameter(
    name="attempt",
    about="The attempt to delete, as `GET` shows it; default: the one that is there now.",
)
_REASON = Parameter(name="reason", about="For people who look for it later.", default="on request")
OPERATIONS = {
    one.name: one
    for one in (
        Operation("verify", verify, (_CHECKPOINT,)),
        Operation("pin", pin, (_CHECKPOINT,), quick=True),
        Operation("unpin", unpin, (_CHECKPOINT,), "admin", quick=True),
        Operation("tag", tag, (_CHECKPOINT, _TAG), quick=True),
        Operation("untag", untag, (_CHECKPOINT, _TAG), "admin", quick=True),
        Operation(
            "reshard",
            reshard_checkpoint,
            (_CHECKPOINT, _TO),
            options=ReshardOptions,
            without=("memory_limit",),
        ),
        Operation("copy", copy, (_CHECKPOINT, _TO, _OVERWRITE)),
        Operation("export", export, (_CHECKPOINT, _TO), options=SafetensorsOptions),
        Operation(
            "import",
            import_foreign,
            (
                Parameter(
                    name="from",
                    about="Id of the file or directory to import.",
                    required=True,
                    example="lab/downloads/llama",
                ),
                _TO,
            ),
            options=ImportOptions,
            without=("memory_limit", "preset", "include", "exclude", "ties"),
        ),
        Operation("end", end, (_RUN,), "admin", quick=True),
        Operation("reopen", reopen, (_RUN,), "admin", quick=True),
        Operation("gc", gc, (_RUN, _GRACE, _DRY), "admin"),
        Operation("retain", retain, (_RUN, _APPLY)),
        Operation("fold", fold_versions, (_RUN, _MOST)),
        Operation("delete", delete, (_CHECKPOINT, _ATTEMPT, _REASON), "admin"),
    )
}

"""The parts of a service that change and look after checkpoints, over one journal.

These parts are jobs, the scrub, retention and the webhook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from shardckpt.commit.publish import RECORD, published_attempt, record_digest
from shardckpt.errors import FormatError, NotFoundError
from shardckpt.io.store import Store
from shardckpt.serve.access.identity import note
from shardckpt.serve.jobs.journal import Journal
from shardckpt.serve.jobs.keeper import Keeper, expected
from shardckpt.serve.jobs.operations import OPERATIONS, Operation
from shardckpt.serve.jobs.retention import RetentionRules
from shardckpt.serve.jobs.runner import JobRunner, audited
from shardckpt.serve.jobs.scrub import Scrubber
from shardckpt.serve.jobs.silence import SilenceWatch
from shardckpt.serve.jobs.tally import Tally
from shardckpt.serve.jobs.webhook import Webhook

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardckpt.serve.access.audit import AuditLog
    from shardckpt.serve.access.identity import Identity
    from shardckpt.serve.catalogue.catalogue import Catalogue
    from shardckpt.serve.jobs.rows import JobRow
    from shardckpt.serve.options import ServeOptions
    from shardckpt.serve.roots import Roots
    from shardckpt.serve.scanner import Scanner


class Upkeep:
    """The writing half of the service: its journal, and the jobs that change the roots."""

    def __init__(
        self,
        directory: Path,
        options: ServeOptions,
        roots: Roots,
        catalogue: Catalogue,
        scanner: Scanner,
        audit: AuditLog,
    ) -> None:
        """Open the journal; nothing runs before `start`.

        Raises:
            OptionError, StorageError: an option is invalid, or the journal cannot be used.
        """
        self._roots, self._scanner, self._audit = roots, scanner, audit
        self.journal = Journal(directory)
        scanner.watch.remember_in(self.journal)
        locks = directory / "jobs"
        writing = {
            "memory_limit": options.memory_limit,
            "workers": options.workers,
            "engine": options.engine,
        }
        settings = {"writing": writing, "keep": None if options.keep is None else str(options.keep)}
        self.runner = JobRunner(
            self.journal,
            locks,
            roots,
            at_once=options.jobs,
            options=settings,
            on_end=self._note_end,
            watch=scanner.watch,
            audit=audit,
        )
        self.webhook = None if options.webhook is None else Webhook(self.journal, options.webhook)
        self.journal.keeps_notices = self.webhook is not None
        self.silence = SilenceWatch(self.journal, roots, catalogue, scanner)
        self.tally = Tally(self.journal, catalogue, scanner, options.scrub)
        self.scrubber = None
        if options.scrub is not None:
            self.scrubber = Scrubber(
                self.journal,
                self.tally,
                locks,
                roots,
                period=options.scrub,
                rate=options.rate,
                vanished=scanner.watch.vanished,
            )
        rules = None if options.keep is None else RetentionRules.read(options.keep)
        self.keeper = None if rules is None else Keeper(self.journal, catalogue, roots, rules)

    def start(self) -> None:
        """Begin to run jobs, to scrub, to apply rules and to send notices."""
        for one in (
            self.runner,
            self.tally,
            self.scrubber,
            self.keeper,
            self.silence,
            self.webhook,
        ):
            if one is not None:
                one.start()

    def close(self) -> None:
        """End all, and close the journal. Jobs go on when the service is started again."""
        for one in (
            self.scrubber,
            self.tally,
            self.keeper,
            self.silence,
            self.webhook,
            self.runner,
        ):
            if one is not None:
                one.stop()
        self.journal.close()

    def deletable(self, ident: str) -> dict[str, str]:
        """The checkpoint that is at a place now, as arguments of a deletion.

        `attempt`, or `record`: the digest of a record that cannot be read.

        Raises:
            NotFoundError: there is none. StorageError: the storage failed.
        """
        store = Store.open(self._roots.locate(ident))
        try:
            attempt = published_attempt(store)
        except FormatError:  # a damaged checkpoint may be deleted, too
            record = record_digest(store.read_versioned(RECORD)[0])
            known = {} if record is None else {"record": record}
        else:
            known = {} if attempt is None else {"attempt": attempt}
        if not known:
            raise NotFoundError(f"{ident}: there is no checkpoint.")
        return known

    def start_job(
        self,
        who: Identity,
        operation: Operation,
        given: Mapping[str, Any],
        key: str | None,
        *,
        record: str | None = None,
    ) -> tuple[JobRow, bool]:
        """Queue a job; return it, and whether it is new.

        Args:
            who: asks for it.
            operation: its operation.
            given: values of parameters, by name; others have their defaults.
            key: see `Journal.add`.
            record: of a deletion without an attempt: `deletable` when it was asked for; default:
                now.

        Raises:
            HTTPException: it needs another right, or the root that it reads has vanished.
            OptionError, NotFoundError: an argument is invalid. StorageError: the journal cannot be
                written, or a storage failed.
        """
        asked = operation.arguments(given)
        self._require(who, operation.needs(asked), *operation.idents(asked))
        earlier = None if key is None else self.journal.find(who.name, key, operation.name, asked)
        if earlier is not None:
            return earlier, False
        operation.check(asked)
        try:
            subject, destination = operation.places(self._roots, asked)
        except NotFoundError:
            self._scanner.watch.check(*filter(None, operation.idents(asked)))
            raise
        arguments = {**asked}
        if operation.name == "delete" and asked["attempt"] is None:
            arguments |= self.deletable(subject) if record is None else {"record": record}
        if operation.name == "retain":
            arguments["expected"] = (
                None
                if asked["apply"] is None
                else expected(self.journal.job(asked["apply"]), subject)
            )
        return self.journal.add(
            operation.name,
            asked,
            arguments,
            subject=subject,
            destination=destination,
            who=who.name,
            key=key,
        )

    def cancel(self, who: Identity, number: int) -> JobRow:
        """Cancel a job; raises as `start_job` and `Journal.cancel`."""
        job = self.journal.job(number)
        note(job=number)
        operation = OPERATIONS.get(job.operation)
        self._require(
            who,
            "admin" if operation is None else operation.needs(job.arguments),
            job.subject,
            job.destination,
        )
        return self.journal.cancel(number)

    def _require(self, who: Identity, scope: str, subject: str, destination: str | None) -> None:
        """Check that somebody may read a job's roots, and has a scope at the one it writes.

        Raises:
            NotFoundError: a root may not be read. HTTPException: the right is missing.
        """
        note(where=[subject, destination])
        for ident in filter(None, (subject, destination)):
            self._roots.root(ident)
        root = (destination or subject).partition("/")[0]
        if not who.may(scope, root):
            given = f"{root}={scope}"
            raise HTTPException(
                403,
                f"this needs the scope {scope} at {root}; `shardckpt token NAME --scope {given}` "
                "gives it.",
            )

    def _note_end(self, job: JobRow) -> None:
        operation = OPERATIONS.get(job.operation)
        if operation is not None and operation.writes(job.arguments):
            self._audit.note(**audited(job), result=job.state)
        for ident in (job.subject, job.destination):
            if ident is not None:
                self._scanner.announce(ident)

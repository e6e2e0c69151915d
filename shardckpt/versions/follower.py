"""`follow`: brings the versions of a `Publisher` to tensors on any mesh."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, Literal, Self

from shardckpt.commit.attempts import unfolded
from shardckpt.commit.fingerprints import recorded_fingerprint
from shardckpt.errors import (
    CoordinationError,
    CorruptionError,
    NotFoundError,
    OptionError,
    StorageError,
    UncommittedError,
)
from shardckpt.format.bases import names_beside
from shardckpt.frameworks.coordination import Coordinator, check_coordinator, on_all_processes
from shardckpt.io.failures import reading_takes_threads
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.options import DEFAULT_MEMORY_LIMIT, LEAST_MEMORY_LIMIT, parse_bytes
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.reading.restore import adaptation_of, finished, restoring
from shardckpt.runs.announcing import Listener, server
from shardckpt.runs.leases import ReaderLease
from shardckpt.runs.steps import steps_named
from shardckpt.state.names import shown
from shardckpt.text import file_size, shorten
from shardckpt.versions.applying import leaves_as_stored, memory_of, plan_apply
from shardckpt.versions.cache import ChunkCache, chunks_of, path_between, requests_of
from shardckpt.versions.finding import Pauses, VersionFinder
from shardckpt.writing.fingerprint import fingerprint_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from shardckpt.reading.landing import RestoreJob
    from shardckpt.reading.naming.adapt import Fit
    from shardckpt.reading.naming.mapping import TensorMapping
    from shardckpt.reading.restore import Restoring
    from shardckpt.state.select import Only
    from shardckpt.versions.applying import Applying, Memory
    from shardckpt.versions.cache import Needed
    from shardckpt.versions.finding import Mode

MOST_VERSIONS = 64
"""Most versions whose differences are applied one after another; beyond, all elements are read."""


class Follower:
    """Versions of one place, one after another; see `follow`."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        like: Any,
        *,
        mode: Mode = "newest",
        only: Only | None = None,
        rename: str | Sequence[str] = (),
        mapping: str | os.PathLike[str] | TensorMapping | None = None,
        fit: Mapping[str, Fit] | None = None,
        strict: bool | Literal["like"] = True,
        cast: bool = False,
        memory_limit: int | str = DEFAULT_MEMORY_LIMIT,
        coordinator: Coordinator | None = None,
        given: Mapping[int, str] | None = None,
    ) -> None:
        """Nothing is read yet; for the arguments see `follow`.

        With `mode="each"`, versions in `given` are not given again: step → attempt, before it was
        folded.
        """
        check_coordinator(coordinator)
        if mode not in ("newest", "each"):
            raise OptionError(f'follow(mode={shorten(mode)}): use "newest" or "each".')
        self.like = like
        """The state; its leaves are those of the version applied last."""
        self.cache = ChunkCache()
        self.applied: FollowedVersion | None = None
        """The version that the tensors have."""
        self.stale: set[str] = set()
        """Stored tensors of which the leaves may lack the newest elements."""
        self.leaves: dict[str, object] = {}
        """Leaves by name, as the version applied last has left them."""
        self.memory: Memory | None = None
        """Of the tensors that the version applied last has filled; None: not known, or the tensors
        lack some of its elements."""
        self.coordinator = Coordinator.current() if coordinator is None else coordinator
        self.limit = parse_bytes(memory_limit, "memory_limit")
        if self.limit < LEAST_MEMORY_LIMIT:
            least, limit = file_size(LEAST_MEMORY_LIMIT), file_size(self.limit)
            raise OptionError(f"follow(memory_limit={limit}): at least {least} are needed.")
        self.fills = like is not None
        """Whether there are tensors to fill; else each version gives new arrays."""
        self.root = Store.open(parse(url))
        """The place of all versions."""
        self._finder = VersionFinder(self.root, mode, given or {})
        self._given: FollowedVersion | None = None
        """The version given last."""
        self._options: dict[str, Any] = {
            "only": only,
            "strict": strict,
            "cast": cast,
            "coordinator": self.coordinator,
        }
        self._adapted = (rename, mapping, fit)
        self._closed = False
        self._leads = self.coordinator.world.process == 0
        service = server() if self._leads else None
        self._listener = None if service is None else Listener(service, str(self.root.location))
        self._lease = ReaderLease(self.root, service) if self._leads else None
        self._pauses = Pauses(self._listener, leads=self._leads)
        self._looker = ThreadPoolExecutor(1, "shardckpt-follow")
        self._looking: Future[FollowedVersion | None] | None = None
        """The look of the last `anext`, if its caller has not got the version."""
        self._waits = False
        """Whether an `anext` waits for a look."""

    def planned(self, checkpoint: Checkpoint) -> Restoring:
        """The restore of a version into the leaves."""
        rename, mapping, fit = self._adapted
        adaptation = adaptation_of(rename, mapping, invert_mapping=False, fit=fit)
        if adaptation is not None:
            adaptation.begin(checkpoint, self.like, self._options["only"])
        return restoring(checkpoint, checkpoint.parsed_tree, self.like, adaptation, **self._options)

    def needed(self, checkpoint: Checkpoint) -> list[Needed]:
        """The chunks of a version that this process needs."""
        jobs, _ = next(self.planned(checkpoint))
        return chunks_of(request for job in jobs for request in requests_of(job))

    def lacks(self, job: RestoreJob) -> bool:
        """Whether the leaves of a tensor may lack the newest elements."""
        missing = any(name not in self.leaves for landing in job.landings for name in landing.names)
        return missing or any(stored.name in self.stale for stored in job.stored)

    def poll(self) -> FollowedVersion | None:
        """The next version; None if there is none now.

        All processes of an engine call it, and get the same one. If they find that it was replaced
        meanwhile, they get None, and the next call gives what is there now.

        Raises:
            StorageError, FormatError: it cannot be listed; a version is damaged (raised once).
            CoordinationError: another process of the engine does not answer.
            OptionError: the follower is closed, or another task waits for its next version.
        """
        return self._take_look() or self._poll()

    def _poll(self) -> FollowedVersion | None:
        if self._closed:
            raise OptionError(f"{self.root}: this follower is closed.")
        if self._given is not None and self._given.comes_again:
            self._finder.take_back()
        find = self._finder.next if self._leads else lambda: None
        choice = on_all_processes(self.coordinator, "followed version", find)[0]
        if choice is None:
            return None
        step, went_back = choice
        checkpoints: list[Checkpoint] = []

        def open_version() -> str | None:
            with suppress(NotFoundError, UncommittedError):  # deleted since the listing
                checkpoints.append(self._open(step))
                return unfolded(checkpoints[0].record.attempt)
            return None

        attempts = on_all_processes(self.coordinator, "opened version", open_version)
        if attempts[0] is None or len({*attempts}) > 1:  # deleted or replaced since the listing
            return None
        return self._give(step, checkpoints[0], went_back=went_back)

    def at(self, step: int) -> FollowedVersion:
        """The version of a step, in an engine of one process; `poll` continues from there.

        Raises:
            NotFoundError, UncommittedError: it is not there.
        """
        return self._give(step, self._open(step), went_back=False)

    def _open(self, step: int) -> Checkpoint:
        return Checkpoint(self.root.sub(str(step)).location)

    def _give(self, step: int, checkpoint: Checkpoint, *, went_back: bool) -> FollowedVersion:
        self._finder.gave(step, unfolded(checkpoint.record.attempt))
        self._given = FollowedVersion(self, step, checkpoint, went_back=went_back)
        return self._given

    def __iter__(self) -> Iterator[FollowedVersion]:
        """Each next version, as soon as it is there; waits for ever."""
        while not self._closed:
            version = self._take_look() or self._look()
            if version is not None:
                yield version

    def __aiter__(self) -> Self:
        """As `__iter__`, while other tasks run. One task at a time may wait."""
        return self

    async def __anext__(self) -> FollowedVersion:
        """The next version. If the call is cancelled, the next call gets what it would have got."""
        self._check_alone()
        self._waits = True
        try:
            while not self._closed:
                self._looking = self._looking or self._looker.submit(self._look)
                with suppress(Exception):  # the future raises it below
                    await asyncio.shield(asyncio.wrap_future(self._looking))
                looking, self._looking = self._looking, None
                version = looking.result()
                if version is not None:
                    return version
        finally:
            self._waits = False
        raise StopAsyncIteration

    def _take_look(self) -> FollowedVersion | None:
        """The version that a look finds whose `anext` was cancelled."""
        self._check_alone()
        looking, self._looking = self._looking, None
        return None if looking is None or self._closed else looking.result()

    def _check_alone(self) -> None:
        if self._waits:
            raise OptionError(f"{self.root}: another task waits for a version; let one wait.")

    def _look(self) -> FollowedVersion | None:
        """Poll; if there is no version, or it could not be prepared, wait between two looks.

        The other processes wait for process 0, in `poll`.
        """
        again = self._given is not None and self._given.comes_again
        if again:
            self._pauses.rest()
        version = self._poll()
        if version is None and not again:
            self._pauses.rest()
        elif not again:
            self._pauses.restart()
        return version

    def holding(self, version: FollowedVersion) -> AbstractContextManager[object]:
        """A lease on all versions that this one needs, so that they are not pruned meanwhile.

        Process 0 holds the lease.
        """
        if self._lease is None:
            return nullcontext()
        urls = (base.url for base in version.checkpoint.record.structure.chain)
        return self._lease.holding({version.step, *steps_named(names_beside(urls))}, version.step)

    def close(self) -> None:
        """End the iteration, give the lease up, and free the memory."""
        self._closed = True
        self._looker.shutdown(wait=False)
        if self._listener is not None:
            self._listener.close()
        if self._lease is not None:
            self._lease.close()
        self.cache.forget()

    def __enter__(self) -> Self:
        """This follower."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close it."""
        self.close()


class FollowedVersion:
    """A version that a follower has found.

    Call `prepare`, `apply` and, if wanted, `prove`, in this order.
    """

    def __init__(
        self, follower: Follower, step: int, checkpoint: Checkpoint, *, went_back: bool
    ) -> None:
        """Nothing but the record is read."""
        self.step = step
        self.checkpoint = checkpoint
        """The version, open for reading."""
        self.base: str | None = checkpoint.bases()[0] if checkpoint.record.structure.chain else None
        """Path or url of the version that this one differs from; None: all of its elements are
        stored."""
        self.changed: frozenset[str] = frozenset()
        """Tensors, by stored name, of which this process has got other elements; after
        `prepare`."""
        self.went_back = went_back
        """Whether training went back to an earlier step since the version before."""
        self.comes_again = False
        """Whether `prepare` has failed, perhaps for a while: `poll` gives the version again."""
        self._follower = follower
        self._needed: list[Needed] | None = None
        self._applying: Applying | None = None
        """The plan of `apply`; None: there is none yet."""
        self._jobs: list[RestoreJob] = []
        self._recorded: dict[str, str] = {}
        """Recorded digest of each tensor."""

    def prepare(self) -> Self:
        """Read and decode what has changed, into host memory, and compare it with its checksums.

        The tensors stay as they are.

        Raises:
            MismatchError: names, shape or dtype differ from the tensors; nothing was read.
            CorruptionError, MissingDataError: the version is damaged. The tensors are as they were.
            StorageError: a process of the engine cannot read the version; `poll` gives it again.
                The tensors are as they were.
            CoordinationError: another process of the engine failed with an error that is not a
                ShardckptError, or does not answer; `poll` gives the version again.
        """
        try:
            on_all_processes(self._follower.coordinator, "prepared version", self._prepare)
        except BaseException as e:
            self._needed = None
            self.comes_again = isinstance(e, StorageError | CoordinationError)
            raise
        self.comes_again = False
        return self

    def _prepare(self) -> None:
        follower = self._follower
        with follower.holding(self), reading_takes_threads(self.checkpoint.location):
            self._needed = follower.needed(self.checkpoint)
            path = path_between(follower.cache.contents, self.checkpoint, MOST_VERSIONS)
            self.changed = frozenset(
                follower.cache.update(self.checkpoint, path, self._needed, follower.limit // 4)
            )
            follower.stale |= self.changed
            self._applying = self._plan() if follower.fills else None
            self._recorded = recorded_fingerprint(self.checkpoint.place, self.checkpoint.record)

    def apply(self) -> Any:
        """Copy what has changed from host memory to the tensors.

        Return the state, as `shardckpt.restore` does.

        It may be called again, after an error, too: it copies elements, and no differences.

        Raises:
            OptionError: the version is not prepared, or a later one is.
        """
        follower = self._follower
        reading = self.reading()
        applying, self._applying = self._applying, None
        if applying is None or not applying.holds(follower.like, follower.memory):
            applying = self._plan()
        with reading:
            follower.leaves |= applying.run(
                self.checkpoint, follower.limit, in_place=follower.fills
            )
        known = {
            name for job in applying.jobs for landing in job.landings for name in landing.names
        }
        follower.leaves = {name: leaf for name, leaf in follower.leaves.items() if name in known}
        state = finished(applying.steps, dict(follower.leaves))
        if follower.fills:
            follower.like, follower.memory = state, memory_of(state, applying.jobs)
        follower.stale.clear()
        follower.cache.unapplied.clear()
        follower.applied, self._jobs = self, applying.jobs
        return state

    def _plan(self) -> Applying:
        follower = self._follower
        return plan_apply(
            self.checkpoint,
            follower.like if follower.fills else None,
            follower.memory,
            follower.planned(self.checkpoint),
            follower.cache,
            follower.lacks,
        )

    def reading(self) -> AbstractContextManager[None]:
        """A context in which `checkpoint` reads the prepared elements from memory, for one thread.

        Raises:
            OptionError: the version is not prepared, or a later one is.
        """
        cache = self._follower.cache
        if self._needed is None or cache.attempt != self.checkpoint.record.attempt:
            raise OptionError(
                f"{self.checkpoint.location}: this version is not prepared; call prepare() first."
            )
        return self.checkpoint.reading_from(cache.reader(self.checkpoint))

    def prove(self) -> list[str]:
        """Compare the tensors' elements with the fingerprint that the publisher recorded.

        Return the names that are proved.

        Tensors that were converted, fitted, renamed into several or joined have other elements than
        the version, and are not among these.

        Raises:
            CorruptionError: a tensor has other elements than the version; names it.
            OptionError: the version is not applied, or has no fingerprint.
        """
        follower = self._follower
        if follower.applied is not self:
            raise OptionError(
                f"{self.checkpoint.location}: this version is not applied; call apply() first."
            )
        if not self._recorded:
            raise OptionError(
                f"{self.checkpoint.location}: no fingerprint was recorded, so nothing can be "
                "proved; publish it with a Publisher, or save it with "
                "SaveOptions(fingerprint=True)."
            )
        leaves = leaves_as_stored(self._jobs, follower.leaves)
        live = fingerprint_of(leaves, follower.coordinator).tensors
        wrong = [name for name in leaves if self._recorded.get(name) != live[name]]
        if wrong:
            follower.stale |= {*wrong}  # so that `apply` copies them again, completely
            follower.memory = None
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise CorruptionError(
                f"{shown(wrong[0])}{more}: the elements are not those of version {self.step} in "
                f"{self.checkpoint.location}. Apply it again or restore it."
            )
        return [*leaves]

    def __repr__(self) -> str:
        """Step and location."""
        return f"<shardckpt version {self.step} at {self.checkpoint.location}>"


def follow(
    url: str | os.PathLike[str],
    like: Any,
    *,
    mode: Mode = "newest",
    only: Only | None = None,
    rename: str | Sequence[str] = (),
    mapping: str | os.PathLike[str] | TensorMapping | None = None,
    fit: Mapping[str, Fit] | None = None,
    strict: bool | Literal["like"] = True,
    cast: bool = False,
    memory_limit: int | str = DEFAULT_MEMORY_LIMIT,
    coordinator: Coordinator | None = None,
) -> Follower:
    """Follow the versions that a `Publisher` publishes.

        for version in shardckpt.follow("gs://bucket/policy", like=tensors):
            version.prepare()      # read, decode and check, while the engine goes on
            with engine.paused():
                version.apply()    # copies to the tensors, nothing else
            version.prove()        # the tensors have the fingerprint of the publisher's

    Of each version only the differences of the chunks that `like` needs are read. These chunks are
    kept in host memory: the bytes of this process's share, and up to a chunk more at its edges.

    Args:
        url: as in `Publisher`.
        like: the tensors, on any mesh, as in `shardckpt.restore`. Tensors that cannot be filled in
            place are new objects in what `FollowedVersion.apply` returns.
        mode: "newest" skips versions that a later one has overtaken; "each" gives all that are
            still there.
        only: as in `shardckpt.restore`.
        rename: as in `shardckpt.restore`.
        mapping: as in `shardckpt.restore`.
        fit: as in `shardckpt.restore`: `{"**/embed.weight": "pad"}` for an engine that pads the
            vocabulary.
        strict: as in `shardckpt.restore`.
        cast: as in `shardckpt.restore`.
        memory_limit: bytes of host staging, beside the kept chunks.
        coordinator: connects the processes of one engine, which agree on each version. By default
            detected once.

    Returns:
        An iterable of versions: blocking, with `async for`, or with `poll()`.

    Raises:
        UrlError, OptionError: an argument is invalid.
    """
    return Follower(
        url,
        like,
        mode=mode,
        only=only,
        rename=rename,
        mapping=mapping,
        fit=fit,
        strict=strict,
        cast=cast,
        memory_limit=memory_limit,
        coordinator=coordinator,
    )

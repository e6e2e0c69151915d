"""`Publisher`: versions of a state, published while training goes on."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, Self

from shardckpt.errors import OptionError, ShardckptError
from shardckpt.format.bases import names_beside
from shardckpt.format.documents import is_choice, utc_now
from shardckpt.frameworks.base import dtype_of
from shardckpt.frameworks.coordination import check_coordinator, coordinator_of
from shardckpt.io.failures import check_fork
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.options import DEFAULT_MEMORY_LIMIT, SaveOptions, check_flag, check_whole
from shardckpt.runs.announcing import Announcer, server
from shardckpt.runs.cleaning import Cleaner
from shardckpt.runs.job import RUN, JobFence
from shardckpt.runs.retention import Latest
from shardckpt.runs.rollback import supersede
from shardckpt.runs.steps import StepInfo, check_step, list_steps, steps_named
from shardckpt.state.select import selector
from shardckpt.text import numbered, shorten
from shardckpt.versions.device import DeviceShare
from shardckpt.versions.folding import (
    AT_A_TIME,
    DIFFERENCES,
    LONGEST,
    bases_after_folding,
    fold_chain,
)
from shardckpt.versions.version import Published, PublishedVersion, Selection
from shardckpt.writing.background import Saver
from shardckpt.writing.kept import KeptChunks, SkippedError

if TYPE_CHECKING:
    import os
    from types import TracebackType

    from shardckpt.frameworks.coordination import Coordinator
    from shardckpt.state.select import Only

_log = logging.getLogger("shardckpt")


class Publisher:
    """Publishes versions of a state at `<url>/<step>`, as differences wherever that is smaller.

    Each difference is from the version before.

        with shardckpt.Publisher("gs://bucket/policy", dtype="bfloat16") as publisher:
            for step in range(steps):
                train(model)
                publisher.publish(step, model.state_dict())

    Each version is a checkpoint like any other. In a job of several processes, each creates a
    publisher at the same point of the program and publishes the same steps, each with its own part
    of the state; nothing is gathered, and no collective is called.

    A process keeps a copy of its share of the last version in host memory, in the published dtype:
    the differences are made from it. With `snapshot="device"` it keeps two, and its devices have
    one more.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        anchor_every: int = 50,
        keep: int | None = 200,
        catch_up: int | None = DIFFERENCES,
        dtype: object = None,
        include: Only | None = None,
        exclude: Only | None = None,
        snapshot: Literal["device", "host"] = "host",
        proof: bool = True,
        memory_limit: int | str = DEFAULT_MEMORY_LIMIT,
        commit_timeout: float = 600.0,
        coordinator: Coordinator | None = None,
    ) -> None:
        """Nothing is read or written before the first version.

        Args:
            url: the place of all versions: a path or url as in `shardckpt.save`.
            anchor_every: a version of which all elements are stored comes at least once in so many
                versions.
            keep: number of versions to keep. Also kept: the chains of kept versions, and pinned and
                tagged ones. None keeps all.
            catch_up: process 0 folds versions, so that a late follower reads at most so many
                differences besides an anchor. None: it does not, and `shardckpt fold` in another
                process may.
            dtype: the dtype in which float64, float32, float16 and bfloat16 tensors are published.
                None: each its own. Elements are rounded to the nearest before they are compared.
            include: name patterns of what is published; None: everything.
            exclude: name patterns of what is left out.
            snapshot: "host" copies this process's share to host memory for each version, and
                compares it there. "device" keeps the last version on the devices, too: they
                compare, and transfer what differs. It takes as much of their memory as the share.
                Not for torch_xla.
            proof: whether to compare the copies that are written with the tensors in their own
                memory. A tensor that is seen to have changed meanwhile, or a copy that missed a
                change, fails the version.
            memory_limit: bytes of host memory for staging, beside the copy of the last version.
            commit_timeout: as in `SaveOptions`.
            coordinator: connects the processes of the job; by default detected once.

        Raises:
            UrlError, OptionError, DtypeError: an argument is invalid.
        """
        anchor_every = check_whole(anchor_every, "Publisher(anchor_every")
        if anchor_every > LONGEST:
            raise OptionError(
                f"Publisher(anchor_every={anchor_every}): at most {LONGEST}; readers need so many "
                "versions."
            )
        if catch_up is not None:
            catch_up = check_whole(catch_up, "Publisher(catch_up")
            bases_after_folding(anchor_every, catch_up)
        check_coordinator(coordinator)
        selector(include), selector(exclude)
        if not is_choice(snapshot, ("device", "host")):
            raise OptionError(f'Publisher(snapshot={shorten(snapshot)}): use "device" or "host".')
        check_flag(proof, "proof")
        if keep is not None:
            keep = check_whole(keep, "Publisher(keep")
        self._root = Store.open(parse(url))
        self._options = SaveOptions(
            fingerprint=True,
            overwrite=True,
            check_replicas=False,
            memory_limit=memory_limit,
            commit_timeout=commit_timeout,
        )
        to = None if dtype is None else dtype_of(dtype)
        if to is not None and not to.name.startswith(("float", "bfloat")):
            raise OptionError(
                f"Publisher(dtype={shorten(dtype)}): give a floating-point dtype, such as bfloat16."
            )
        self._selection = Selection(include, exclude, to)
        self._anchor_every = anchor_every
        self._coordinator = coordinator_of(coordinator, commit_timeout)
        self._fence = JobFence(self._root, self._coordinator.run_id, publishes=True)
        self._leads = self._coordinator.world.process == 0
        self._saver = Saver(memory_limit=self._options.budget, coordinator=self._coordinator)
        self._kept = KeptChunks()
        self._proof = proof
        self._share = DeviceShare(proof=proof) if snapshot == "device" else None
        self._rule = None if keep is None else Latest(keep)
        self._cleaner = Cleaner(
            self._root, self._rule, grace=2 * commit_timeout, deleted=lambda _step: None
        )
        made = self._coordinator.notes.setdefault("publishers", Counter())
        name = self._root.location.resolved.name
        made[name] += 1
        self._key = f"version/{sha256(name.encode()).hexdigest()[:12]}/{made[name]}"
        """Names this publisher, alike on all processes."""
        self._announcer = Announcer(service) if self._leads and (service := server()) else None
        self._calls = 0
        self._catch_up = catch_up
        self._folded = set[int]()
        """Steps of the present chain that need no folding any more, on process 0."""
        self._newest: int | None = None
        """The step whose publication began last, on process 0; None: none has begun yet."""
        self._version: PublishedVersion | None = None
        """The version of the last call."""
        self._unheard: list[PublishedVersion] = []
        """Versions whose end no caller has heard of."""
        self._last: Published | None = None
        self._closed = False
        self.skipped: list[int] = []
        """Steps that were not published, because a later call came while they waited."""

    # --- on the training thread

    def publish(self, step: int, state: Any) -> None:
        """Publish a version; return when this process's share is copied to host memory.

        At most one version is being written at a time, and one waits. A call replaces the waiting
        one (`skipped`).

        A step that is not newer than all versions there begins a new chain: training went back. The
        versions from it on are superseded.

        Args:
            step: of the version.
            state: as in `shardckpt.save`.

        Raises:
            LeafError, ShardingError, NamesMismatchError: the state cannot be published; nothing was
                begun.
            ShardckptError: a version before has failed. This one has begun all the same, and
                stores all elements.
        """
        step = check_step(step)
        check_fork(self._root)
        if self._closed:
            raise OptionError(f"{self._root}: this publisher is closed; create another one.")
        self._calls += 1
        before = self._version
        version = PublishedVersion(
            self._root,
            step,
            self._key,
            self._kept,
            self._selection,
            number=self._calls,
            share=self._share,
            proof=self._proof,
            before=before,
            decide=self._decide,
            settle=self._settle,
            timeout=self._options.commit_timeout,
        )
        try:
            # Before its thread starts: Ctrl-C may come at any moment then, and the version goes on.
            self._version = version
            self._unheard.append(version)
            self._saver.begin(
                str(self._root.sub(str(step))),
                state,
                replace(self._options, metadata={RUN: self._coordinator.run_id}),
                coordinator=self._coordinator,
                before_publish=partial(self._before_publish, version),
                version=version,
            )
        except BaseException as e:
            if version.handle is None:
                self._version = before
            if version.done:
                self._unheard = [one for one in self._unheard if one is not version]
                version.fail(self._coordinator, e)
            raise
        if before is not None and self._leads and not before.done:
            before.skip()
        self._hear(wait=False)

    def wait(self) -> Published | None:
        """Wait for the versions in flight.

        Returns:
            The last version that was published, on process 0; None on the others.

        Raises:
            ShardckptError: a version failed, once for each.
        """
        self._hear(wait=True)
        return self._last

    def close(self) -> None:
        """Wait for the versions in flight, and free the memory.

        Raises:
            ShardckptError: as `wait`.
        """
        self._closed = True
        failed: ShardckptError | None = None
        try:
            while self._unheard:
                try:
                    self._hear(wait=True)
                except ShardckptError as e:
                    failed = failed or e
        finally:
            self._saver.close()
            self._kept.forget()
            if self._share is not None:
                self._share.forget()
        if failed is not None:
            raise failed

    def __enter__(self) -> Self:
        """This publisher."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it; if the block ends with an error, errors of versions are logged."""
        try:
            self.close()
        except ShardckptError as e:
            if error is None:
                raise
            _log.warning("%s", e)

    def _hear(self, *, wait: bool) -> None:
        """Raise the error of the first version that has failed unheard of.

        `wait` until all have ended.
        """
        for version in [*self._unheard]:
            if not wait and not version.done:
                continue
            try:
                if version.handle is not None:
                    version.handle.wait()
            except SkippedError:
                self.skipped.append(version.step)
                _log.info(
                    "%s: version %d is skipped, because a later one has come",
                    self._root,
                    version.step,
                )
            except BaseException as e:
                # After Ctrl-C it goes on; in a fork it never ends.
                if version.done or isinstance(e, ShardckptError):
                    self._unheard.remove(version)
                raise
            self._unheard.remove(version)

    # --- in the background, on process 0

    def _decide(
        self, version: PublishedVersion, before: PublishedVersion | None
    ) -> Published | None:
        """The base of a version after `before`, which has ended; None: it stores all elements.

        Raises:
            OptionError: the place belongs to a manager; or a pinned or tagged version needs what
                would be replaced.
            OtherJobError: a publisher of another job has begun to publish there.
        """
        self._fence.hold()  # first, so that no other job adds to what is listed below
        if self._newest is not None and version.step > self._newest:
            base = None if before is None else before.outcome
            return None if base is None or len(base.chain) + 1 >= self._anchor_every else base
        version.supersedes = self._later(version.step)
        return None

    def _later(self, step: int) -> dict[str, str | None]:
        """Name → attempt of the versions from a step on that are not superseded yet."""
        later = [info for info in list_steps(self._root) if info.step >= step]
        for info in later:
            if info.protected and (info.step == step or step in info.bases):
                raise OptionError(
                    f"{self._root}: version {info.step} is pinned or tagged, and version {step}, "
                    "which it needs, would be replaced; unpin and untag it, or publish a step "
                    f"after {max(other.step for other in later)}. Nothing was changed."
                )
        return {str(info.step): info.attempt for info in later if info.state != "superseded"}

    def _before_publish(self, version: PublishedVersion) -> None:
        """Check that the place is still this job's, and mark the versions that are superseded."""
        self._fence.hold()
        if version.supersedes:
            _log.warning(
                "%s: training went back: the new version %d supersedes %s. To keep all versions, "
                "publish a new training to a directory of its own.",
                self._root,
                version.step,
                numbered("version", sorted(map(int, version.supersedes))),
            )
            self._cleaner.forget()
        supersede(self._root, version.supersedes)
        self._newest = version.step

    def _settle(self, published: Published) -> None:
        """Delete the versions that are no longer kept, and fold one that is due."""
        self._last = published
        if self._announcer is not None:
            self._announcer.announce(str(self._root.location.join(str(published.step))))
        bases = frozenset(steps_named(names_beside(base.url for base in published.chain)))
        self._cleaner.clean(
            StepInfo(published.step, "committed", published.attempt, utc_now(), bases=bases)
        )
        if not published.chain:
            self._folded.clear()
        if self._catch_up is not None:
            try:
                next(
                    fold_chain(
                        self._root,
                        published.step,
                        published.chain,
                        self._catch_up,
                        self._folded,
                        min(AT_A_TIME, self._options.budget // 4),
                    ),
                    None,
                )
            except ShardckptError as e:
                _log.warning(
                    "%s: a version could not be folded, so late followers read more differences: "
                    "%s",
                    self._root,
                    e,
                )

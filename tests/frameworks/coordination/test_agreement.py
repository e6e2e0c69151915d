"""The agreement itself: processes as generators over one dict, stepped, killed and started again in
every order."""

import json
import time
from contextlib import suppress
from functools import partial
from itertools import count
from threading import Barrier, Event

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from one_of_several import Interrupted, MayLoseStore, OneOfThreads, on_threads

from shardckpt.errors import CoordinationError, CorruptionError, OptionError
from shardckpt.frameworks.coordination import SilentStoreError, on_all_processes
from shardckpt.frameworks.coordination.agreement import (
    WITHDRAWN,
    Get,
    Late,
    Questions,
    Report,
    Set,
    Wait,
    encode,
    gather,
    join,
    lead,
    leave,
    listen,
    share,
)

PATIENCE = 200
"""Operations of each process after which an agreement without further deaths must have ended; it
takes about 30."""


class Process:
    """One process of one round, an operation at a time."""

    serial = count()

    def __init__(self, number, processes, store):
        self.number, self.store = number, store
        self.serial = next(Process.serial)
        self.value = [number, self.serial]
        self.agreed = self.run_id = None
        if number:
            self.steps = join(number, encode(self.value), f"nonce{self.serial}")
        else:
            self.steps = lead(processes, encode(self.value), f"run{self.serial}")
        self.result = None

    @property
    def done(self):
        return self.agreed is not None

    def step(self):
        """Do one operation; True if it was to wait."""
        if self.done:
            return True
        try:
            operation = self.steps.send(self.result)
        except StopIteration as end:
            self.run_id, self.agreed = (
                end.value if self.number else (f"run{self.serial}", end.value)
            )
            return True
        self.result = None
        match operation:
            case Get(key):
                self.result = self.store.get(key)
            case Set(key, value):
                self.store[key] = value
        return isinstance(operation, Wait)

    def run(self):
        """Go on until it waits."""
        while not self.step():
            pass


def time_is_up(process, seconds):
    """Tell it at its next wait."""
    process.run()
    process.result = Late(seconds, is_over=True)


def round_of(processes, store):
    return [Process(p, processes, store) for p in range(processes)]


def finish(round_, order):
    """Step all of them, in the drawn order and then in turn, as often as it takes."""
    for p in order:
        round_[p % len(round_)].step()
    for _ in range(PATIENCE):
        for process in round_:
            process.step()


def check_agreed(finished, members):
    """Properties of the processes that have ended: one run id, of this round, and values of this
    round's processes alone."""
    assert len({process.run_id for process in finished}) <= 1
    of_round = {f"run{m.serial}" for m in members if m.number == 0}
    values = [m.value for m in members]
    for process in finished:
        assert process.run_id in of_round
        assert [v[0] for v in process.agreed] == sorted({m.number for m in members})
        assert all(v in values for v in process.agreed)


orders = st.lists(st.integers(0, 3), max_size=60)


@given(
    processes=st.integers(1, 4),
    before=st.lists(st.tuples(orders, st.booleans()), max_size=3),
    last=orders,
)
def test_a_round_agrees_on_its_own_run_id_however_the_rounds_before_it_ended(
    processes, before, last
):
    store = {}
    for order, completes in before:
        earlier = round_of(processes, store)
        if completes:
            finish(earlier, order)
        for p in order:
            earlier[p % processes].step()
        check_agreed([p for p in earlier if p.done], earlier)
    latest = round_of(processes, store)
    finish(latest, last)
    assert all(process.done for process in latest)
    check_agreed(latest, latest)
    assert latest[0].agreed == [process.value for process in latest]


@given(
    processes=st.integers(2, 4),
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=80),
    last=orders,
)
# Set its value, then died.
@example(processes=3, events=[(False, p) for p in (1, 0, 0, 1, 1, 0)] + [(True, 1)], last=[])
# Process 0 has welcomed, then died.
@example(processes=2, events=[(False, p) for p in (1, 0, 0, 1, 1)] + [(True, 0)], last=[])
# Set the last value, then died.
@example(processes=2, events=[(False, p) for p in (0, 0, 0, 1, 0, 0, 1, 1)] + [(True, 1)], last=[])
def test_processes_started_anew_before_the_round_is_agreed_on_are_taken_in(processes, events, last):
    store = {}
    alive = round_of(processes, store)
    members, spoke = list(alive), set()
    for dies, p in events:
        number = p % processes
        if (
            dies
            and not any(process.done for process in alive)
            and not any(key.endswith("/start/all") for key in store)
        ):
            if any(key.endswith(f"/start/nonce{alive[number].serial}") for key in store):
                spoke.add(number)
            alive[number] = Process(number, processes, store)
            members.append(alive[number])
        else:
            alive[number].step()
    finish(alive, last)
    check_agreed([process for process in alive if process.done], members)
    # Where one had set its value before it died, process 0 may have taken that value: then the new
    # one gets no answer.
    unanswered = {process.number for process in alive if not process.done}
    assert unanswered <= spoke
    assert all(
        value == process.value or process.number in unanswered
        for value, process in zip(alive[0].agreed, alive, strict=True)
    )


@given(
    processes=st.integers(2, 4),
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=120),
)
def test_no_two_processes_of_a_round_end_with_different_run_ids_whoever_dies_when(
    processes, events
):
    store = {}
    earlier = round_of(processes, store)
    finish(earlier, [])
    alive = round_of(processes, store)
    members, finished = list(alive), []
    for dies, p in events:
        number = p % processes
        if dies:
            alive[number] = Process(number, processes, store)
            members.append(alive[number])
        elif not alive[number].done:
            alive[number].step()
            finished += [alive[number]] if alive[number].done else []
    check_agreed(finished, members)


@given(processes=st.integers(1, 5), order=st.lists(st.integers(0, 4), max_size=60))
def test_a_gathered_value_is_everybodys_on_all_processes_and_costs_each_but_one_a_single_value(
    processes, order
):
    store, sets, results = {}, [0] * processes, {}
    values = [None if p == 1 else {"process": p} for p in range(processes)]
    steps = {p: gather("question", p, processes, encode(values[p])) for p in range(processes)}
    replies = dict.fromkeys(steps)
    for p in [*order, *list(range(processes)) * PATIENCE]:
        if p >= processes or p in results:
            continue
        try:
            operation = steps[p].send(replies[p])
        except StopIteration as end:
            results[p] = end.value
            continue
        replies[p] = store.get(operation.key) if isinstance(operation, Get) else None
        if isinstance(operation, Set):
            store[operation.key] = operation.value
            sets[p] += 1
    assert results == dict.fromkeys(range(processes), values)
    assert all(n == 1 for n in sets[1:])


@given(
    processes=st.integers(2, 4),
    declined=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 5))),
    order=st.lists(st.integers(0, 3), max_size=200),
)
def test_questions_that_share_two_keys_are_never_taken_for_each_other(processes, declined, order):
    store, answers = {}, {}

    class TwoKeys(Questions):
        @property
        def key(self):
            return f"question#{self.number % 2}"

    def ask(p):
        questions = TwoKeys("question")
        for number in range(6):
            assert questions.number == number
            questions.calls += 1
            if (p, number) in declined:
                yield from leave(questions, p, encode(None))
                continue
            try:
                answers[p, number] = yield from share(questions, p, processes, encode([p, number]))
            except CoordinationError:  # process 0 has declined several questions since
                assert p
                assert {(0, n) for n in range(number + 1, number + 3)} & declined
            questions.end()

    steps = {p: ask(p) for p in range(processes)}
    replies = dict.fromkeys(steps)
    for p in [*order, *list(range(processes)) * PATIENCE * 6]:
        if p not in steps:
            continue
        try:
            operation = steps[p].send(replies[p])
        except StopIteration:
            del steps[p]
            continue
        replies[p] = store.get(operation.key) if isinstance(operation, Get) else None
        if isinstance(operation, Set):
            store[operation.key] = operation.value
    assert not steps
    for (_, number), answer in answers.items():
        nothing = (0, number) in declined
        assert answer == [
            None if nothing or (p, number) in declined else [p, number] for p in range(processes)
        ]


@given(
    processes=st.integers(2, 4),
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=120),
)
@example(processes=3, events=[(False, p) for p in (1, 0, 0, 0, 0)] + [(True, 1)])
def test_a_value_that_is_withdrawn_before_process_0_looks_is_in_no_answer(processes, events):
    store, calls, answers, steps, replies = {}, dict.fromkeys(range(processes), 0), {}, {}, {}
    between_looks = True

    def call(p):
        calls[p] += 1
        steps[p] = gather("question", p, processes, encode([p, calls[p]]), calls[p])
        replies[p] = None

    for p in range(processes):
        call(p)
    for fails, number in [*events, *((False, p) for p in list(range(processes)) * PATIENCE)]:
        p = number % processes
        if p in answers:
            continue
        if fails:
            if between_looks:
                store[f"question/{p}"] = WITHDRAWN
                call(p)
            continue
        try:
            operation = steps[p].send(replies[p])
        except StopIteration as end:
            answers[p] = end.value
            continue
        replies[p] = store.get(operation.key) if isinstance(operation, Get) else None
        if isinstance(operation, Set):
            store[operation.key] = operation.value
        if not p:
            between_looks = isinstance(operation, Wait)
    expected = [[p, calls[p]] for p in range(processes)]
    assert [answers[p] for p in range(processes)] == [expected] * processes


@given(
    processes=st.integers(2, 4),
    events=st.lists(
        st.tuples(
            st.sampled_from(["steps", "fails", "vanishes", "interrupted", "leaves"]),
            st.integers(0, 3),
        ),
        max_size=120,
    ),
)
@example(processes=2, events=[("steps", 1)] * 2 + [("steps", 0)] * 4 + [("vanishes", 1)])
@example(processes=2, events=[("steps", 1)] * 2 + [("steps", 0)] * 4 + [("vanishes", 0)])
@example(processes=2, events=[("steps", 1)] * 2 + [("steps", 0)] * 4 + [("interrupted", 0)])
@example(processes=2, events=[("steps", 1)] * 2 + [("steps", 0)] * 4 + [("leaves", 1)])
def test_an_answer_has_the_value_of_the_very_call_that_returns_it(processes, events):
    store, answers, own, calls = {}, {}, [], dict.fromkeys(range(processes), 0)
    questions = {p: Questions("question") for p in range(processes)}
    steps, replies, values = {}, {}, {}

    def call(p, *, leaves=False):
        questions[p].calls += 1
        calls[p] += 1
        values[p] = "left" if leaves else [p, calls[p]]
        value = encode(values[p])
        steps[p] = (
            leave(questions[p], p, value) if leaves else share(questions[p], p, processes, value)
        )
        replies[p] = None

    for p in range(processes):
        call(p)
    for event, number in [*events, *(("steps", p) for p in list(range(processes)) * PATIENCE)]:
        p = number % processes
        if questions[p].number >= 3:
            continue
        if event in ("fails", "leaves"):
            store[f"{questions[p].key}/{p}"] = WITHDRAWN
        if event == "interrupted":
            values[p], replies[p] = "left", None
            steps[p] = leave(questions[p], p, encode("left"))
        elif event != "steps":
            call(p, leaves=event == "leaves")
        if event != "steps":
            continue
        try:
            operation = steps[p].send(replies[p])
        except StopIteration as end:
            if end.value is not None:
                answers.setdefault(questions[p].number, []).append(end.value)
                is_all_left = end.value[0] == "left" and set(end.value[1:]) == {None}
                own.append((end.value[p], None if p and is_all_left else values[p]))
                questions[p].end()
            call(p)
            continue
        replies[p] = store.get(operation.key) if isinstance(operation, Get) else None
        if isinstance(operation, Set):
            store[operation.key] = operation.value
    assert all(one.number >= 3 for one in questions.values())
    assert all(in_answer == of_call for in_answer, of_call in own)
    assert all(answer == one[0] for one in answers.values() for answer in one)


def share_first(coordinator, failing):
    """The first question of two processes, of which one does not hear the answer: its store is gone
    for a moment."""
    process = coordinator.world.process
    if process == failing:
        coordinator.last = f"/shares/key#0/{process or 'all'}"
        with pytest.raises(CoordinationError, match="gone"):
            coordinator.share("key", f"first-{process}")
        coordinator.last, coordinator.is_gone = None, False
    else:
        assert coordinator.share("key", f"first-{process}") == ["first-0", "first-1"]


@pytest.mark.parametrize("failing", [0, 1])
def test_the_answer_to_a_call_that_lost_its_store_is_not_the_next_ones(failing):
    first = Barrier(2)

    def share(coordinator):
        process = coordinator.world.process
        share_first(coordinator, failing)
        first.wait(20)
        return [coordinator.share("key", f"{which}-{process}") for which in ("second", "third")]

    answers = [["second-0", "second-1"], ["third-0", "third-1"]]
    assert on_threads(2, share, MayLoseStore) == [answers] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_whose_answered_call_failed_declines_the_next_question(failing):
    first = Barrier(2)

    def act(coordinator):
        process = coordinator.world.process
        share_first(coordinator, failing)
        first.wait(20)
        if process == failing:
            coordinator.decline("key")
            declined = None
        else:
            declined = coordinator.share("key", f"second-{process}")
        return declined, coordinator.share("key", f"third-{process}")

    answers = on_threads(2, act, MayLoseStore)
    assert [third for _, third in answers] == [["third-0", "third-1"]] * 2
    assert answers[1 - failing][0] == (["second-0", None] if failing else [None, None])


def test_a_process_that_calls_alone_again_waits_once_and_hears_why():
    def act(coordinator):
        if not coordinator.world.process:
            return coordinator.share("key", "first")
        coordinator.last = "/shares/key#0/1"
        with pytest.raises(CoordinationError, match="gone"):
            coordinator.share("key", "first")
        coordinator.last, coordinator.is_gone = None, False
        while "0" not in coordinator.keys:
            time.sleep(0.01)
        with pytest.raises(CoordinationError, match=r"waited 0\.5 s for process 0, .*") as late:
            coordinator.share("key", "first", timeout=0.5)
        return str(late.value)

    class Ends(MayLoseStore):
        def share(self, key, value, **options):
            answer = super().share(key, value, **options)
            self.keys[str(self.world.process)] = b""
            return answer

    answer, message = on_threads(2, act, Ends)
    assert answer == ["first"] * 2
    assert message.endswith(
        "The call before, which failed on this process, was answered on the others: they may have "
        "gone on without a second one."
    )


def test_values_of_another_version_are_not_read():
    def act(coordinator):
        if not coordinator.world.process:
            return coordinator.share("key", 0, timeout=0.5)
        key = f"shardckpt/{coordinator.run_id}/share/key#0/1"  # of 0.2.0
        return coordinator._set(key, b"[0,1]")

    error, _ = on_threads(2, act)
    assert "process 0 waited 0.5 s for process 1, which did not answer" in str(error)


def test_an_answer_is_hardly_larger_than_the_values():
    def act(coordinator):
        coordinator.share("key", None)
        (answer,) = [value for key, value in coordinator.keys.items() if key.endswith("#0/all")]
        return len(answer)

    assert on_threads(8, act) == [len(json.dumps([None] * 8, separators=(",", ":"))) + 9] * 8


def test_a_value_of_a_call_that_timed_out_is_not_in_the_answer_to_the_next():
    failed = Barrier(3)

    def share(coordinator):
        process = coordinator.world.process
        if process < 2:
            with pytest.raises(CoordinationError, match="for process 2,"):
                coordinator.share("key", f"first-{process}", timeout=(1 + process) / 2)
        failed.wait()
        if process == 1:
            time.sleep(0.2)  # the others come first
        return coordinator.share("key", f"second-{process}")

    assert on_threads(3, share) == [["second-0", "second-1", "second-2"]] * 3


@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupted_share_keeps_nobody_waiting(interrupted):
    is_over = Event()

    def share(coordinator):
        process = coordinator.world.process
        if process == interrupted:
            coordinator.at = f"/shares/key#0/{process or 'missing'}"
            with pytest.raises(KeyboardInterrupt):
                on_all_processes(coordinator, "key", lambda: process)
            is_over.set()
        else:
            assert process == 0 or is_over.wait(20)
            with pytest.raises(CoordinationError, match=rf"^process {interrupted} has failed, or"):
                on_all_processes(coordinator, "key", lambda: process)
        return on_all_processes(coordinator, "key", lambda: process)

    assert on_threads(2, share, Interrupted) == [[0, 1]] * 2


def test_a_share_of_process_0_that_is_interrupted_after_its_answer_counts_for_all():
    first = Barrier(2)

    def act(coordinator):
        process = coordinator.world.process
        if process == 0:
            coordinator.at, coordinator.is_late = "/shares/key#0/all", True
            with pytest.raises(KeyboardInterrupt):
                coordinator.share("key", process)
        else:
            assert coordinator.share("key", process) == [0, 1]
        first.wait(20)
        return coordinator.share("key", f"second-{process}")

    assert on_threads(2, act, Interrupted) == [["second-0", "second-1"]] * 2


def test_the_error_of_one_process_is_raised_though_another_was_interrupted():
    def act(coordinator):
        def fail():
            if coordinator.world.process:
                raise [CorruptionError("w is damaged"), KeyboardInterrupt][process - 1]

        process = coordinator.world.process
        with suppress(KeyboardInterrupt):
            on_all_processes(coordinator, "key", fail)

    error, *_ = on_threads(3, act)
    assert isinstance(error, CorruptionError)
    assert str(error) == "process 1 failed with CorruptionError: w is damaged"


def test_a_process_whose_calls_fail_again_and_again_stays_in_step_with_the_others():
    def act(coordinator):
        def fail():
            if coordinator.world.process == 0:
                raise CorruptionError(f"attempt {attempt}")
            time.sleep(0.01)  # process 0 comes first

        for attempt in range(12):
            with pytest.raises(CorruptionError, match=f"attempt {attempt}$"):
                on_all_processes(coordinator, "key", fail)

    assert on_threads(2, act) == [None, None]


def test_an_interrupted_call_stays_an_interruption_without_a_store():
    def share(coordinator):
        def act():
            coordinator.is_gone = True
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            on_all_processes(coordinator, "key", act)

    assert on_threads(1, share, MayLoseStore) == [None]


def test_an_error_of_a_call_is_raised_without_a_store():
    def share(coordinator):
        def act():
            coordinator.is_gone = True
            return 1 / 0

        for call in (coordinator.agree, partial(on_all_processes, coordinator)):
            coordinator.is_gone = False
            with pytest.raises(ZeroDivisionError):
                call("key", act)

    assert on_threads(1, share, MayLoseStore) == [None]


def test_a_failed_proposal_is_told_to_the_others_once_a_silent_store_answers():
    class Silent(OneOfThreads):
        refusals = 2

        def _set(self, key, value):
            if "/agree/" in key and b"failure" in value and self.refusals:
                self.refusals -= 1
                raise SilentStoreError("silent")
            super()._set(key, value)

    def act(coordinator):
        if coordinator.world.process:
            return coordinator.agree("key", None, timeout=10)
        with pytest.raises(ZeroDivisionError):
            coordinator.agree("key", lambda: 1 / 0, timeout=10)
        return None

    _, error = on_threads(2, act, Silent)
    assert "process 0 could not decide on 'key': ZeroDivisionError" in str(error)


def test_an_error_of_a_call_is_raised_where_an_own_store_fails():
    class Failing(OneOfThreads):
        def _set(self, key, value):
            if "/shares/" in key or ("/agree/" in key and "/meet/" not in key):
                raise OSError("disk is full")
            super()._set(key, value)

    def act(coordinator):
        for call in (coordinator.agree, partial(on_all_processes, coordinator)):
            for kind in (ZeroDivisionError, KeyboardInterrupt):
                with pytest.raises(kind):
                    call("key", partial(raise_, kind))

    def raise_(kind):
        raise kind

    assert on_threads(1, act, Failing) == [None]


@pytest.mark.parametrize("process", [0, 1])
def test_what_is_not_json_is_refused_and_keeps_nobody_waiting(process):
    def share(coordinator):
        own = coordinator.world.process
        value = b"bytes" if own == process else own
        answers = []
        for act in (
            lambda: on_all_processes(coordinator, "key", lambda: value),
            lambda: coordinator.share("key", value),
            lambda: coordinator.announce(f"key {own}", value),
        ):
            try:
                answers.append(act())
            except OptionError as error:
                answers.append(str(error))
        return answers

    answers = on_threads(2, share)
    assert all("this value is not JSON: Object of type bytes" in text for text in answers[process])
    in_all, shared, announced = answers[1 - process]
    assert in_all.startswith(f"process {process} failed with OptionError: ")
    assert shared == ([0, None] if process else [None, None])
    assert announced is None


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_call_that_timed_out_on_some_processes_does_not_count_for_the_next(late):
    failed = Barrier(3)

    def decide(coordinator):
        process = coordinator.world.process
        if process != late:
            with pytest.raises(CoordinationError):
                coordinator.agree("step", lambda: "before", timeout=0.2)
        failed.wait(20)
        first = coordinator.agree("step", lambda: "first", timeout=20)
        if process == late:
            with pytest.raises(CoordinationError):
                coordinator.agree("step", lambda: "between", timeout=0.2)
        failed.wait(20)
        return [first, coordinator.agree("step", lambda: "second", timeout=20)]

    assert on_threads(3, decide) == [["first", "second"]] * 3


@pytest.mark.parametrize("came", [[1], [1, 2], [1, 3, 4]])
def test_when_time_is_up_those_that_came_name_those_that_did_not(came):
    store = {}
    processes = [Process(p, 5, store) for p in (0, *came)]
    absent = sorted(set(range(1, 5)) - set(came))
    for _ in range(PATIENCE):
        for process in processes:
            process.step()
    for process in processes:
        time_is_up(process, 20.0)
        with pytest.raises(CoordinationError) as late:
            process.run()
        named = ", ".join(map(str, absent))
        assert (
            f"process {process.number} waited 20 s for process{'es' * (len(absent) > 1)} {named}, "
            in str(late.value)
        )


def test_a_process_that_came_after_process_0_had_gone_is_not_named():
    store = {}
    first, leader, second = (gather("key", p, 3, encode(p)) for p in (1, 0, 2))

    def run(steps, result=None):
        """Go on until it waits."""
        while not isinstance(operation := steps.send(result), Wait):
            result = store.get(operation.key) if isinstance(operation, Get) else None
            if isinstance(operation, Set):
                store[operation.key] = operation.value

    for steps in (first, leader, second):
        run(steps)
    for number, steps in ((1, first), (2, second)):
        with pytest.raises(CoordinationError, match=f"process {number} waited 9 s for process 0,"):
            run(steps, Late(9.0, is_over=True))


def test_without_process_0_the_others_name_process_0():
    store = {"hello/0": b"", "run0/start/all": json.dumps([0, 0]).encode()}
    process = Process(1, 2, store)
    time_is_up(process, 1.0)
    with pytest.raises(CoordinationError, match="process 1 waited 1 s for process 0,"):
        process.run()


def test_of_many_missing_processes_a_message_names_a_few():
    process = Process(0, 3000, {})
    time_is_up(process, 600.0)
    with pytest.raises(
        CoordinationError,
        match=r"process 0 waited 600 s for processes 1, 2, 3, .* 12 and 2987 more,",
    ):
        process.run()


def test_listening_hears_each_of_some_processes_and_names_the_silent_ones():
    store = {"k/1": encode(None), "k/3": encode({"failure": 7})}
    steps, asked, result = listen("k", 0, (1, 2, 3)), [], None
    while not isinstance(step := steps.send(result), Wait):
        asked.append(step.key)
        result = store.get(step.key)
    assert asked == ["k/1", "k/2", "k/3"]
    store["k/2"] = encode([2])
    assert steps.send(None) == Get("k/2")  # who has spoken is not asked again
    with pytest.raises(StopIteration) as heard:
        steps.send(store["k/2"])
    assert heard.value.value == [None, [2], {"failure": 7}]

    silent = listen("k", 0, (1, 4))
    assert silent.send(None) == Get("k/1")
    assert silent.send(store["k/1"]) == Get("k/4")
    assert silent.send(None) == Wait()
    with pytest.raises(CoordinationError, match="process 0 waited 9 s for process 4,"):
        silent.send(Late(9.0, is_over=True))


def test_a_long_wait_names_the_missing_processes_and_goes_on():
    store = {}
    leader, first = Process(0, 3, store), Process(1, 3, store)
    for process in (first, leader, first, leader):
        process.run()
    for process in (leader, first):
        step = process.steps.send(Late(30.0, is_over=False))
        while not isinstance(step, Report):
            step = process.steps.send(store.get(step.key))
        assert step.missing == "process 2"
        assert not isinstance(process.steps.send(None), Report)

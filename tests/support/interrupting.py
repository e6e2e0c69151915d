"""Ctrl-C in the calling thread, at an instant of one's choice."""

from __future__ import annotations

import sys
from itertools import count


def interrupted(at, own, inside, act, look):
    """Interrupt what is done at one instant: before a line of a file, or at a call.

    Lines of a function `draw` are none, which holds a lock: between the last call under a lock and
    the release no signal is handled.

    Args:
        at: which instant, from 0.
        own: the file's path; each of its lines that the calling thread comes to is an instant.
        inside: of which code, given its code object, calls are instants.
        act: what is done.
        look: what is asked as soon as the interrupt has come.

    Returns:
        What `look` said; None where `act` had fewer instants, and was done.
    """
    instants = count()

    def instant(frame, event, _):
        ours = frame.f_code.co_filename == own and frame.f_code.co_name != "draw"
        if (
            event == ("line" if ours else "call" if inside(frame.f_code) else None)
            and next(instants) == at
        ):
            raise KeyboardInterrupt
        return instant if ours else None

    before = sys.gettrace()
    sys.settrace(instant)  # of this thread
    try:
        act()
    except KeyboardInterrupt:
        return look()
    finally:
        sys.settrace(before)
    return None

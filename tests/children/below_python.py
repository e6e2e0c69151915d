"""The C extension's calls of the kernel, led through `os`: whatever counts, fails or kills at a
function of `os` meets them there.

The extension reaches the kernel through the table `moving_calls` alone (tests/io/test_moving.py
holds that). Here its functions are replaced by others that call `os.pwrite` and `os.preadv`, as
they are at that moment. An error of theirs is the kernel's to the extension. Any other exception
ends the extension's call with an error, and is raised where the extension was called.
"""

import ctypes
import errno
import os
import threading

from shardckpt.io import extension

CALLS = ("pwrite", "preadv")
"""The members of the table, but for a hint to the disk."""


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_PWRITE = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, use_errno=True
)
_PREADV = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t,
    ctypes.c_int,
    ctypes.POINTER(_Vector),
    ctypes.c_int,
    ctypes.c_int64,
    use_errno=True,
)


class _Table(ctypes.Structure):
    _fields_ = (("pwrite", _PWRITE), ("preadv", _PREADV), ("sync_file_range", ctypes.c_void_p))


_raised = threading.local()


def _memory(address, nbytes):
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _answer(call, *arguments):
    """The answer of a function of `os`, as the kernel gives it."""
    try:
        return call(*arguments)
    except OSError as e:
        ctypes.set_errno(e.errno or errno.EIO)
    except BaseException as e:
        _raised.error = e
        ctypes.set_errno(errno.EIO)
    return -1


def _pwrite(fd, address, nbytes, offset):
    return _answer(lambda: os.pwrite(fd, _memory(address, nbytes), offset))


def _preadv(fd, vectors, count, offset):
    return _answer(
        lambda: os.preadv(
            fd, [_memory(vectors[i].base, vectors[i].length) for i in range(count)], offset
        )
    )


class _Moving:
    """The extension, with the exceptions of what it calls."""

    def __init__(self, moving):
        self.original = moving

    def __getattr__(self, name):
        attribute = getattr(self.original, name)
        return self._raising(attribute) if callable(attribute) else attribute

    @staticmethod
    def _raising(function):
        def called(*arguments):
            _raised.error = None
            result = function(*arguments)
            if _raised.error is not None:
                raise _raised.error
            return result

        return called


def lead_through_os():
    """Lead the extension's calls through `os`, if there is an extension; returns the function that
    ends that."""
    if extension.moving is None or isinstance(extension.moving, _Moving):
        return lambda: None
    moving = extension.moving
    table = _Table.in_dll(ctypes.CDLL(moving.__file__), "moving_calls")
    before, functions = bytes(table), (_PWRITE(_pwrite), _PREADV(_preadv))
    table.pwrite, table.preadv = functions
    extension.moving = _Moving(moving)
    _kept.append(functions)

    def end():
        ctypes.memmove(ctypes.addressof(table), before, len(before))
        extension.moving = moving

    return end


_kept = []
"""The functions, which C may still call on another thread."""

"""Landlock: a feature of Linux by which a process gives up rights for good.

Linux has it since 5.13, unless it is switched off. macOS has nothing like it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, the same on every processor."""
_ASK_VERSION = 1
_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38
_WRITE_FILE = 1 << 1
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
_SINCE = ((1, _WRITE_FILE | _REMOVE_AND_MAKE), (2, 1 << 13), (3, 1 << 14))
"""Rights, and the version since which each exists: to write, remove and make; move; truncate."""
_CONNECT = 1 << 0 | 1 << 1
"""The rights to listen at a TCP port and to connect to one."""
_CONNECT_SINCE = 4


def give_up_rights(but_in: str) -> bool:
    """Give up the right to change files, and to use TCP (Linux 6.7), in this thread.

    Threads that it starts lack them too. Files and sockets that are open stay as they are.

    Args:
        but_in: a folder in which files can still be changed; empty: none.

    Returns:
        Whether it worked. False where the system has no Landlock; then nothing is given up.
    """
    version = landlock_version()
    if version < 1:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    rights = sum(right for since, right in _SINCE if version >= since)
    connect = _CONNECT if version >= _CONNECT_SINCE else 0
    size = 16 if connect else 8  # older versions know no more fields
    handled = ctypes.create_string_buffer(struct.pack("=QQ", rights, connect), 16)
    rules = _call(libc, _CREATE_RULESET, ctypes.addressof(handled), size, 0)
    if rules < 0:
        return False
    try:
        if but_in:
            folder = os.open(but_in, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, folder), 12)
            _call(libc, _ADD_RULE, rules, _PATH_BENEATH, ctypes.addressof(rule), 0)
            os.close(folder)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # required, except of root
        return _call(libc, _RESTRICT_SELF, rules, 0) == 0
    finally:
        os.close(rules)


def landlock_version() -> int:
    """Return the version of Landlock on this machine, below 1 where there is none."""
    if sys.platform != "linux":
        return 0
    return _call(ctypes.CDLL(None, use_errno=True), _CREATE_RULESET, 0, 0, _ASK_VERSION)


def _call(libc: ctypes.CDLL, *arguments: int) -> int:
    result: int = libc.syscall(*map(ctypes.c_long, arguments))
    return result

"""Callables that a pickle may name, and bounds on the memory that Python's unpickler takes.

The unpickler trusts a pickle: it allocates 16 bytes for each index of its memo up to the largest
one that the pickle names, and copies a sequence as often as the pickle asks. So some bytes could
fill all memory.
"""

import re
from collections.abc import Callable
from typing import Any

MAX_PICKLE_BYTES = 2**30
"""Longest pickle that is read. Pickles hold no data of tensors: pickles of torch.save have
kilobytes, and `.metadata` of a checkpoint of 10,000 ranks has some hundred megabytes."""
MAX_ARGUMENTS = 64
"""Most arguments of a call, and most dimensions of a tensor."""
# Opcodes by their arguments, as in pickletools.py of Python.
_LENGTH_BYTES = {
    **dict.fromkeys(b"CU\x8a\x8c", 1),
    **dict.fromkeys(b"BTX\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
"""Opcode: width of its length prefix; that many payload bytes follow."""
_OTHERS = (
    rb"[(012NQRabdelostu})\]\x81\x85-\x89\x8f-\x94\x97\x98]"  # no argument
    rb"|[Khq\x80\x82].|[M\x83]..|[Jj\x84]....|[G\x95]........"  # arguments of fixed length
    rb"|[FILPSVg][^\n]*\n|[ci][^\n]*\n[^\n]*\n"  # lines
)
"""Other opcodes except the two that take a memo index, LONG_BINPUT and PUT, and STOP."""


def check(pickled: bytes) -> None:
    """Check that no memo index is much larger than the number of bytes of a pickle.

    A pickle that is damaged in another way is left to the unpickler, which stops at that byte.
    """
    skip, position = _skipping(len(pickled)), 0
    while position < len(pickled):
        match = skip(pickled, position)
        if match and match.end() > position:
            position = match.end()
            continue
        opcode = pickled[position]
        if opcode in b"rp":
            raise ValueError("its pickle has a memo index beyond its length")
        if opcode not in _LENGTH_BYTES:  # STOP, or unknown
            return
        begin = position + 1 + _LENGTH_BYTES[opcode]
        position = begin + int.from_bytes(pickled[position + 1 : begin], "little")
    raise ValueError("its pickle is truncated")


def _skipping(num_bytes: int) -> Callable[[bytes, int], "re.Match[bytes] | None"]:
    """Return a function that matches opcodes up to one with a length or with a bad memo index."""
    high, middle = divmod(num_bytes >> 16, 256)
    third, fourth = (re.escape(bytes([limit])) for limit in (255 if high else middle, high))
    # The lower two of the index's 4 bytes can have any value.
    put = rb"r..[\x00-%b][\x00-%b]|p[0-9]{1,%d}\n" % (third, fourth, len(str(num_bytes)))
    # A limited number of opcodes: the memory of `re` grows with it.
    return re.compile(rb"(?:%b|%b){0,1000}" % (_OTHERS, put), re.DOTALL).match


def sealed(function: Callable[..., Any]) -> Any:
    """Return a callable without attributes, so that no pickle that names it can change it."""
    members = {"__slots__": (), "__call__": staticmethod(function)}
    return type(function.__name__, (), members)()


def counting(*kinds: Any, num_bytes: int) -> list[Any]:
    """Return stand-ins for types that copy arguments; together they copy `num_bytes` items."""
    num_left = num_bytes

    def stand_in(kind: Any) -> Any:
        def count(*arguments: Any) -> Any:
            nonlocal num_left
            num_left -= sum(map(len, arguments))
            if num_left < 0:
                raise ValueError("its pickle copies more items than it holds")
            return kind(*arguments)

        return sealed(count)

    return [stand_in(kind) for kind in kinds]

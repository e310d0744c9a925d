"""Text of tokens that come one after the other, until a stop string.

A token can be a part of a character, and its text can depend on the token before it. So text comes
out only when later tokens cannot change it, and when it cannot be the beginning of a stop string.
"""

from collections.abc import Callable, Sequence

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8
"""Tokens before the first new one that decide about its text, such as its space."""


class TextStream:
    """Text of the new tokens of one sequence; `text` ends before a stop string.

    No stop string ends within the first `num_unstopped` tokens.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt: Sequence[int],
        *,
        stops: Sequence[str] = (),
        num_unstopped: int = 0,
    ) -> None:
        self._num_unstopped = num_unstopped
        self.text, self.is_stopped = "", False
        self._decode, self._stops = decode, tuple(stops)
        self._tokens = [*prompt[-_CONTEXT:]]
        # Tokens from `_begin` on are decoded together; text of tokens before `_end` has come out.
        self._begin, self._end = 0, len(self._tokens)
        self._held = ""

    def add(self, token: int) -> str:
        """Add a token; return text that is certain now."""
        self._tokens.append(token)
        self._num_unstopped -= 1
        known = self._decode(self._tokens[self._begin : self._end])
        whole = self._decode(self._tokens[self._begin :])
        if len(whole) <= len(known) or whole.endswith(_UNFINISHED):
            return ""
        self._begin, self._end = self._end, len(self._tokens)
        return self._certain(whole[len(known) :])

    def finish(self) -> str:
        """Return the rest of the text: no token follows."""
        if self.is_stopped:
            return ""
        known = self._decode(self._tokens[self._begin : self._end])
        whole = self._decode(self._tokens[self._begin :])
        rest = self._certain(whole[len(known) :])
        if not self.is_stopped:
            rest += self._held
            self.text, self._held = self.text + self._held, ""
        return rest

    def _certain(self, new: str) -> str:
        pending = self._held + new
        stops = self._stops if self._num_unstopped < 0 else ()
        places = [place for stop in stops if (place := pending.find(stop)) >= 0]
        if places:
            self.is_stopped, self._held = True, ""
            out = pending[: min(places)]
        else:
            length = max((_overlap(pending, stop) for stop in self._stops), default=0)
            out, self._held = pending[: len(pending) - length], pending[len(pending) - length :]
        self.text += out
        return out


def token_texts(decode: Callable[[list[int]], str], tokens: Sequence[int]) -> list[str]:
    """The text that each token adds; empty where a character ends with a later token."""
    stream = TextStream(decode, ())
    texts = [stream.add(token) for token in tokens]
    if texts:
        texts[-1] += stream.finish()
    return texts


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text with which a stop string begins."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)

"""`Reply`: one HTTP/1.1 answer, taken apart as its bytes come in; and the lines and events in its body."""

from octavo.errors import RemoteError

LONGEST_HEAD = 65_536  # bytes
LONGEST_LINE = 16 * 2**20


class Reply:
    """A body ends where its length or its last chunk says; without either, with the connection."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self._held = b""
        self._left: int | None = None  # bytes still to come, where the length is known
        self._chunked = False

    @property
    def keeps_alive(self) -> bool:
        return self.done and self.headers.get("connection", "").lower() != "close"

    @property
    def ends_with_connection(self) -> bool:
        return self.status != 0 and not self._chunked and self._left is None

    def feed(self, data: bytes) -> bytes:
        """What these bytes bring of the body."""
        self._held += data
        while self.status == 0:
            head, found, rest = self._held.partition(b"\r\n\r\n")
            if not found:
                _check(len(self._held) <= LONGEST_HEAD and (self._held[:5] + b"HTTP/"[len(self._held) :]) == b"HTTP/")
                return b""
            self._held = rest
            self._read_head(head.decode("latin-1"))
        return self._chunks() if self._chunked else self._plain()

    def _read_head(self, head: str) -> None:
        first, *lines = head.split("\r\n")
        words = first.split(" ", 2)
        _check(len(words) >= 2 and words[0].startswith("HTTP/1.") and words[1].isdigit())
        if words[1].startswith("1"):  # "go on": the answer comes later
            return
        self.status = int(words[1])
        self.headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        if not self._chunked and (length := self.headers.get("content-length")) is not None:
            _check(length.isdigit())
            self._left = int(length)

    def _plain(self) -> bytes:
        body, self._held = self._held, b""
        if self._left is not None:
            body = body[: self._left]
            self._left -= len(body)
            self.done = self._left == 0
        return body

    def _chunks(self) -> bytes:
        held, at, found = self._held, 0, []
        while (end := held.find(b"\r\n", at)) >= 0:
            size = _hex(held[at:end])
            if size == 0:
                self.done = held.find(b"\r\n\r\n", end) >= 0  # what stands between is of no interest
                break
            start = end + 2
            if len(held) < start + size + 2:
                break
            found.append(held[start : start + size])
            at = start + size + 2
        self._held = held[at:]
        return b"".join(found)


class Lines:
    """Those that are complete, as bytes come."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, body: bytes) -> list[bytes]:
        *lines, self._held = (self._held + body).split(b"\n")
        if len(self._held) > LONGEST_LINE:
            raise RemoteError(f"the server sends a line of more than {LONGEST_LINE:,} bytes")
        return lines


class EventLines:
    """The data of server-sent events. Of a server that speaks OpenAI's API each is one line."""

    def __init__(self) -> None:
        self._lines = Lines()

    def feed(self, body: bytes) -> list[bytes]:
        return [line[5:].strip() for line in self._lines.feed(body) if line.startswith(b"data:")]


def _hex(text: bytes) -> int:
    digits = text.partition(b";")[0].strip()
    _check(0 < len(digits) <= 8 and all(digit in b"0123456789abcdefABCDEF" for digit in digits))
    return int(digits, 16)


def _check(holds: bool) -> None:
    if not holds:
        raise RemoteError("what listens there does not speak HTTP/1.1")

"""Section I: what listens, and garbage to each of it."""

import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

from tests.support.bad_inputs_row import Row, acted
from tests.support.bad_inputs_watch import Watched

GARBAGE = (
    secrets.token_bytes(10_000),
    b"\x80\x04\x95cos\nsystem\n(S'touch escaped'\ntR.",  # a pickle that runs a command
    b"\xff" * 8 + b"\x7f" + bytes(1000),
    b"\xff\xff\xff\xff" + bytes(1000),  # 4 GiB follow
    b"GET / HTTP/1.1\r\n\r\n",
)


def _listening(server: Watched) -> Iterator[tuple[str, str]]:
    """("tcp", local address) and ("unix", path) of every listening socket of both processes."""
    inodes = set()
    for pid in (server.process.process.pid, server.watch()["engine_pid"]):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(link) if link.is_symlink() else ""
            inodes |= {target[8:-1]} if target.startswith("socket:[") else set()
    for table in ("tcp", "tcp6"):
        for words in (line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]):
            if words[3] == "0A" and words[9] in inodes:
                yield "tcp", words[1]
    for words in (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]):
        if words[6] in inodes and int(words[3], 16) & 0x10000:
            yield "unix", words[7] if len(words) > 7 else ""


def _only_http(server: Watched) -> None:
    found = list(_listening(server))
    assert [local for kind, local in found if kind == "tcp"] == [f"0100007F:{server.process.port:04X}"]
    (path,) = [path for kind, path in found if kind == "unix"]
    assert Path(path).parent.stat().st_mode & 0o777 == 0o700


def _garbage(server: Watched) -> None:
    (path,) = [path for kind, path in _listening(server) if kind == "unix"]
    engine = server.watch()["engine_pid"]
    for data in GARBAGE:
        with socket.socket(socket.AF_UNIX) as plain:
            plain.connect(path)
            plain.sendall(data)
        assert all(reply.status in (400, 403, 408) for reply in server.send(data, most=1))
    assert server.watch()["engine_pid"] == engine and not Path("escaped").exists()


ROWS: list[Row] = [acted(111, "garbage to every socket", _garbage), acted(112, "what listens", _only_http)]

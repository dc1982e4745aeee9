"""The files of the page: which there are, what they say of themselves, and that a path leads nowhere else."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.server.app import FOLDER, POLICY, found_files
from tests.support.server_process import STAND_IN, Reply, ServerProcess

INDEX = FOLDER / "index.html"
KINDS = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
KINDS |= {".ndjson": "application/x-ndjson"}  # the lesson, recorded


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(STAND_IN, "--api-key", "secret") as process:
        yield process


# promise: open-without-key-web
def test_the_page_and_its_files_are_open_without_a_key(server: ServerProcess) -> None:
    index = server.ask("GET", "/")
    assert (index.status, index.body, index.headers["content-type"]) == (200, INDEX.read_bytes(), "text/html; charset=utf-8")
    paths = [path for path in FOLDER.rglob("*") if path.is_file() and path.suffix in KINDS]
    assert len(paths) > 10
    for path in paths:
        reply = server.ask("GET", f"/web/{path.relative_to(FOLDER).as_posix()}")
        assert (reply.status, reply.body, reply.headers["content-type"]) == (200, path.read_bytes(), KINDS[path.suffix])
    assert server.ask("GET", "/v1/models").status == 401


# promise: page-markdown
def test_every_library_of_the_page_has_its_licence_beside_it() -> None:
    libraries, licences = ({path.name.split(".")[0] for path in (FOLDER / "vendor").glob(kind)} for kind in ("*.js", "*.LICENSE"))
    assert libraries == licences


# promise: page
@pytest.mark.parametrize("path", ["/", "/web/main.js", "/web/vendor/marked.LICENSE"])
def test_every_file_comes_with_the_headers_that_lock_the_page_in(server: ServerProcess, path: str) -> None:
    headers = server.ask("GET", path).headers
    assert headers["content-security-policy"] == POLICY
    assert POLICY.startswith("default-src 'none'; script-src 'self'; style-src 'self';") and "unsafe" not in POLICY
    wanted = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "x-frame-options": "DENY"}
    wanted |= {"cross-origin-opener-policy": "same-origin", "cross-origin-resource-policy": "same-origin", "cache-control": "no-cache"}
    assert wanted.items() <= headers.items()


def test_the_page_says_the_policy_itself_for_hosts_that_set_no_header() -> None:
    assert f'content="{POLICY.removesuffix("; frame-ancestors " + repr("none"))}"' in INDEX.read_text()  # which a page cannot say
    assert "<script>" not in INDEX.read_text() and "style=" not in INDEX.read_text()


def test_what_a_browser_has_is_not_sent_again(server: ServerProcess) -> None:
    first = server.ask("GET", "/web/main.js")
    etag = first.headers["etag"]
    assert etag.startswith('"') and etag != server.ask("GET", "/web/chat.js").headers["etag"]
    for known in (etag, f'"other", {etag}', f"W/{etag}"):
        again = server.ask("GET", "/web/main.js", if_none_match=known)
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", etag)
        assert again.headers["content-security-policy"] == POLICY
    assert server.ask("GET", "/web/main.js", if_none_match='"other"').status == 200


def test_head_has_the_headers_alone(server: ServerProcess) -> None:
    for path in ("/", "/web/style.css"):
        whole = server.ask("GET", path)
        head = _head(server, path)
        assert f"content-length: {len(whole.body)}".encode() in head and head.endswith(b"\r\n\r\n") and head.startswith(b"HTTP/1.1 200")


def _head(server: ServerProcess, path: str) -> bytes:
    with server.connect() as sock:
        sock.sendall(f"HEAD {path} HTTP/1.1\r\nhost: {server.host}:{server.port}\r\nconnection: close\r\n\r\n".encode())
        data = b""
        while piece := sock.recv(65536):
            data += piece
    return data


@pytest.mark.parametrize(
    "path",
    ["/web/", "/web", "/web/nothing.js", "/web/__init__.py", "/web/../server/app.py", "/web/%2e%2e/server/app.py",
     "/web/..%2fserver%2fweb.py", "/web//etc/passwd",
     "/web/%2fetc%2fpasswd", "/web/main.js/", "/web/vendor", "/index.html", "/web/main.js%00", "/web/.%5cmain.js"],
)  # fmt: skip
def test_a_path_leads_to_a_file_that_is_there_or_nowhere(server: ServerProcess, path: str) -> None:
    reply = server.ask("GET", path, authorization="Bearer secret")
    assert reply.status in (400, 404)
    if reply.status == 404:
        assert reply.error["type"] == "not_found_error"


def test_the_files_can_only_be_read(server: ServerProcess) -> None:
    reply: Reply = server.ask("POST", "/web/main.js", {"a": 1})
    assert reply.status == 405 and reply.error["message"]


def test_only_kinds_that_a_page_has_are_found(tmp_path: Path) -> None:
    for name in ("a.js", "b.py", ".env", "notes.md", "vendor/c.css"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert set(found_files(tmp_path)) == {"a.js", "vendor/c.css"}

"""Pinned prefixes: spawn that are wrong or too large, names that are not there, and callers who may not."""

from collections.abc import Callable

from tests.support.bad_inputs_http import refused
from tests.support.bad_inputs_row import HELLO, Attempt, Row, acted, row
from tests.support.bad_inputs_watch import ADMIN_KEY, KEY, OTHER_KEY, Watched

PREFIXES = "/v1/prefixes"
PROMPT = "Once upon a time there was a little girl who lived in a small house"
SOUND = {"name": "sound", "prompt": PROMPT}


def _order(param: str | None = "*", status: int = 400, code: str | None = "*", **changed: object) -> Attempt:
    return Attempt(PREFIXES, {name: value for name, value in (SOUND | changed).items() if value != "-"}, status, param, code)


def _spawn_config() -> list[Attempt]:
    names = ["", " ", "a b", "a/b", "..", ".a", "-a", "ä", "x" * 129, "x" * 100_000, "a\n", 5, None, ["a"], True]
    words = [f'{{"name":"a","prompt":"{PROMPT}","ttl":{word}}}'.encode() for word in ("NaN", "Infinity", "-Infinity", "1e400")]
    return [
        _order("name", name="-"),
        *(_order("name", name=name) for name in names),
        *(_order("ttl", ttl=ttl) for ttl in (0, 0.0, -1, -0.5, 2_592_001, 1e300, "60", True, [1], {})),
        *(Attempt(PREFIXES, data, param="ttl") for data in words),
        _order(messages=HELLO),
        _order(prompt="-"),
        _order(prompt="-", messages="-"),
        _order(prompt=None, messages=None),
        _order("prompt", prompt=""),
        _order("prompt", prompt="a", code="prefix_too_short"),
        _order("prompt", prompt=[]),
        _order("prompt", prompt=[1, -1, 5, 6, 7]),
        _order("prompt", prompt=[1, 10**6, 5, 6, 7]),
        _order("prompt", prompt=[1, "a"]),
        _order("prompt", prompt=[[1, 2, 3, 4, 5]]),
        _order("prompt", prompt=["a", "b"]),
        _order("prompt", prompt="a " * 20_000),
        _order("prompt", prompt=[3 + at % 200 for at in range(256)]),
        _order("messages", prompt="-", messages=[]),
        _order("messages", prompt="-", messages=["a"]),
        _order("messages", prompt="-", messages=[{"role": "nobody", "content": "a"}]),
        _order("cache_salt", cache_salt=""),
        _order("cache_salt", cache_salt="x" * 1025),
        _order(tools=[{}]),
        _order("model", 404, model="another"),
        _order("chat_template", chat_template="x"),
        Attempt(PREFIXES, b""),
        Attempt(PREFIXES, b"[]"),
        Attempt(PREFIXES, b'{"name":'),
    ]  # fmt: skip


def _twice(server: Watched) -> None:
    """A name in use, and one that is not there."""
    for method in ("GET", "DELETE"):
        for name in ("nobody", "x" * 5000, "%00", "a%2Fb"):
            refused(server.ask(method, f"{PREFIXES}/{name}"), 404)
    refused(server.ask("PUT", f"{PREFIXES}/sound"), 405)
    assert server.ask("POST", PREFIXES, SOUND).status == 200
    try:
        reply = refused(server.ask("POST", PREFIXES, SOUND | {"prompt": "Another " * 20}), 409)
        assert reply.error["code"] == "prefix_exists" and reply.error["param"] == "name"
    finally:
        assert server.ask("DELETE", f"{PREFIXES}/sound").status == 200
    refused(server.ask("DELETE", f"{PREFIXES}/sound"), 404)


def _too_much(server: Watched) -> Callable[[], None]:
    """Prefixes until there is no room, then one more; each has blocks of its own."""
    vocabulary = range(3, 500)
    spawn = [{"name": f"p{number}", "prompt": [number, *(vocabulary[7 * at % 497] for at in range(200))]} for number in range(3, 8)]

    def act() -> None:
        held, refusal = [], None
        for order in spawn:
            reply = server.ask("POST", PREFIXES, order)
            if reply.status != 200:
                refusal = refused(reply, 400)
                break
            held.append(order["name"])
        try:
            assert refusal is not None and refusal.error["code"] == "pinned_blocks_exceeded", held
            assert "needs 50 blocks and 100 are pinned, but at most 149 may be (--max-pinned-blocks)" in refusal.error["message"]
            assert [one["name"] for one in server.ask("GET", PREFIXES).json["data"]] == held
        finally:
            for name in held:
                assert server.ask("DELETE", f"{PREFIXES}/{name}").status == 200

    return act


def _callers(server: Watched) -> None:
    routes = (("POST", PREFIXES, SOUND), ("GET", PREFIXES, b""), ("GET", f"{PREFIXES}/a", b""), ("DELETE", f"{PREFIXES}/a", b""))
    for method, path, body in routes:
        for key in ("-", "Bearer wrong"):
            assert refused(server.ask(method, path, body, authorization=key), 401).error["code"] == "invalid_api_key"
        for key in (KEY, OTHER_KEY):
            assert refused(server.ask(method, path, body, authorization=f"Bearer {key}"), 403).error["code"] == "admin_key_required"
    admin = {"authorization": f"Bearer {ADMIN_KEY}"}
    assert server.ask("POST", PREFIXES, SOUND, **admin).status == 200
    assert server.ask("GET", PREFIXES, **admin).json["data"][0]["name"] == "sound"
    assert server.ask("DELETE", f"{PREFIXES}/sound", **admin).status == 200


def _forwarded(server: Watched) -> None:
    """Without keys they are for this machine, and a proxy's request is not of this machine."""
    refused(server.ask("POST", PREFIXES, SOUND, x_forwarded_for="10.0.0.1"), 403)
    refused(server.ask("GET", PREFIXES, x_forwarded_for="10.0.0.1"), 403)


ROWS: list[Row] = [
    row(134, "spawn of prefixes that are wrong", _spawn_config),
    acted(135, "names of prefixes in use, and unknown ones", _twice),
    Row(136, "more prefixes than there is room for", _too_much),
    acted(137, "prefixes without the admin key", _callers, "locked"),
    acted(138, "prefixes through a proxy", _forwarded),
]

"""The chat of the page as tests use it: what a user does there, and a server that says what a test tells it to."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING

from octavo.inspector.frames import SequenceState, ViewFrame
from octavo.messages import AddRequest, FinishReason
from octavo.outputs import TextDelta
from octavo.server.app import build_app
from octavo.server.state import Server
from octavo.server_config import ServerConfig
from tests.support.http_server import HttpServer
from tests.support.stand_in_llm import TEMPLATE, StandInLLM

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

PHONE = {"width": 390, "height": 844}
STATUS = "Failed to load resource: the server responded with a status of"  # how Chromium tells of an answer that is an error


class Speaker(StandInLLM):
    """Says what it was told to; `held` holds it back before the first piece until it is set, `gate` after it. Its view shows `row`."""

    pieces: tuple[str, ...] = ()
    end: FinishReason = "stop"
    refused: Mapping[int | None, Exception] = MappingProxyType({})  # by max_tokens
    held: threading.Event | None = None
    gate: threading.Event | None = None
    row: SequenceState | None = None

    template = "{% if messages[0].role != 'system' %}<system>You are Speaker.{% endif %}" + TEMPLATE
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"

    async def view(self, engine: int = 0) -> AsyncIterator[ViewFrame]:
        yield ViewFrame(True, 0.0, 0.0)
        for number in count(1):
            await asyncio.sleep(0.05)
            yield ViewFrame(False, number / 20, 0.0, seqs=[self.row] if self.row is not None else [])

    async def _answer(self, request: AddRequest, timeout: float | None = None) -> AsyncGenerator[list[TextDelta], None]:
        if request.params.max_tokens in self.refused:
            raise self.refused[request.params.max_tokens]
        while self.held is not None and not self.held.is_set():
            await asyncio.sleep(0.01)
        for number, piece in enumerate(self.pieces):
            while number and self.gate is not None and not self.gate.is_set():
                await asyncio.sleep(0.01)
            yield [TextDelta("r", 0, piece, [7], self.end if number == len(self.pieces) - 1 else None)]


@contextmanager
def speaking(*pieces: str, config: ServerConfig | None = None, context: int = 256, is_demo: bool = False) -> Iterator[tuple[Speaker, str]]:
    llm = Speaker()
    llm.pieces, llm.is_default_model = pieces, is_demo
    llm.facts = replace(llm.facts, limits=replace(llm.facts.limits, max_model_len=context))
    state = Server(llm, config or ServerConfig(inspector=False), "speaker")  # type: ignore[arg-type]
    with HttpServer(build_app(state)) as server:
        try:
            yield llm, server.url
        finally:
            state.draining = True  # ends the view of a page that is still open
            for event in (llm.held, llm.gate):
                if event is not None:
                    event.set()  # else what still streams would hold the server's end up


def box(page: "Page", column: int = 0) -> "Locator":
    return page.get_by_role("textbox", name="Message", exact=True).nth(column)


def send(page: "Page", text: str, column: int = 0) -> None:
    box(page, column).fill(text)
    box(page, column).press("Enter")


def answers(page: "Page", column: int = 0) -> "Locator":
    return page.locator(".column").nth(column).get_by_role("article", name="Answer")


def listed(page: "Page") -> "Locator":
    return page.locator(".conversations .opener")


def set_setting(page: "Page", label: str, value: str, column: int = 0) -> None:
    place = page.locator(".column").nth(column)
    place.get_by_text("Settings").click()
    place.get_by_label(label).fill(value)
    place.get_by_label(label).press("Tab")
    place.get_by_text("Settings").click()


def scrolls_sideways(page: "Page") -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))

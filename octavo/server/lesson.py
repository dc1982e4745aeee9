"""The lesson, played on this server's own engine (`--lesson`): GET /v1/lesson lists the scenes, POST /v1/lesson/{scene} plays one.

The POST is answered when the scene is over. If the client goes away, the scene ends. The prefix cache is emptied before each scene.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, cycle, islice

from fastapi import APIRouter
from starlette.requests import Request

from octavo.engine.async_llm import Ask, AsyncLLM
from octavo.sampling_params import SamplingParams
from octavo.server.errors import ApiError
from octavo.server.events import disconnect, unless
from octavo.server.lesson_scenes import SCENES, Part, Scene
from octavo.server.state import Server

LEAVE_SECONDS = 5.0  # a client that goes from one scene to another may ask for the new one before it has left the old one
EMPTY_SECONDS = 0.3  # so that watchers see the emptied cache before the scene begins, not in it
Say = Callable[[int, int, dict[str, object]], None]  # number, of how many, caption: what watchers read from now on


class Lesson:
    def __init__(self, llm: AsyncLLM, say: Say) -> None:
        self._llm = llm
        self._say = say
        self._playing = asyncio.Lock()

    async def play(self, number: int) -> None:
        """The scene of this number, counted from 1."""
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._playing.acquire()
        except TimeoutError as error:
            raise ApiError(409, "another scene is being played on this server; wait until it is over", code="lesson_is_playing") from error
        try:
            scene = SCENES[number - 1]
            await self._llm.reset_prefix_cache()
            await asyncio.sleep(EMPTY_SECONDS)
            self._say(number, len(SCENES), scene.caption)
            await _Performance(self._llm, scene).run()
        finally:
            self._playing.release()


@dataclass(slots=True)
class _Performance:
    llm: AsyncLLM
    scene: Scene
    _answered: list[int] = field(init=False)  # tokens of each part so far
    _ended: list[bool] = field(init=False)
    _news: asyncio.Condition = field(init=False, default_factory=asyncio.Condition)

    async def run(self) -> None:
        count = len(self.scene.parts)
        self._answered, self._ended = [0] * count, [False] * count
        tasks = [asyncio.create_task(self._part(index)) for index in range(count)]
        try:
            await asyncio.gather(*tasks)
        finally:  # one that fails, or a client that leaves, ends the others
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _part(self, index: int) -> None:
        part = self.scene.parts[index]
        if part.after is not None:
            before, tokens = part.after
            async with self._news:
                await self._news.wait_for(lambda: self._ended[before] or self._answered[before] >= tokens)
        async for deltas in self.llm.generate(self._ask(part)):
            self._answered[index] += sum(len(delta.token_ids) for delta in deltas)
            await self._tell()
        self._ended[index] = True
        await self._tell()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    def _ask(self, part: Part) -> Ask:
        ids = list(chain.from_iterable(self._cut(text, count) for text, count in part.prompt))
        params = SamplingParams(temperature=1.0, seed=7, n=part.samples, max_tokens=part.answer, ignore_eos=True)
        return Ask(None, ids, params)

    def _cut(self, text: str, count: int) -> list[int]:
        """The first `count` tokens of a text; a text that is too short is repeated."""
        return list(islice(cycle(self.llm.tokenizer.encode(text, add_special_tokens=False)), count))


def router(server: Server) -> APIRouter:
    routes = APIRouter()
    if not server.config.lesson:
        return routes
    lesson = Lesson(server.llm, server.view.note)

    @routes.get("/v1/lesson")
    async def scenes() -> dict[str, object]:
        return {"object": "list", "data": [{"scene": number, **scene.caption} for number, scene in enumerate(SCENES, 1)]}

    @routes.post("/v1/lesson/{scene}")
    async def play(scene: int, request: Request) -> dict[str, object]:
        if not 1 <= scene <= len(SCENES):
            raise ApiError(404, f"there is no scene {scene}; they are numbered from 1 to {len(SCENES)}", param="scene")
        await unless(disconnect(request.receive), lesson.play(scene))
        return {"scene": scene, "status": "over"}

    return routes

"""The lesson, played on this server's own engine (`--lesson`): GET /v1/lesson lists the scenes, POST /v1/lesson/{scene} plays one.

The POST is answered when the scene is over. If the client goes away, the scene ends. The prefix cache is emptied before each scene.
There are two engines. All scenes play in engine 0; in the last one it is killed, and engine 1 goes on.

SCENES are data. A scene has a caption and a few requests, which the real engine serves in a tiny pool. A prompt is made of texts, each
cut or repeated to a number of tokens, so that a scene is the same for every model. To add a scene, add it to SCENES. Models with
recurrent layers have one more, OF_STATES.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, cycle, islice

from fastapi import APIRouter
from starlette.requests import Request

from octavo.engine.async_llm import AsyncLLM
from octavo.messages import AddRequest, Beams
from octavo.sampling_params import SamplingParams
from octavo.server.errors import ApiError
from octavo.server.state import Server
from octavo.server.turns import disconnect, unless

LEAVE_SECONDS = 5.0  # how long a scene waits for the one before it: a client may ask for a scene before it has left another
READY_SECONDS = 0.1  # between two looks whether the engine is there again
EMPTY_SECONDS = 0.3  # watchers see the emptied cache for so long before the scene begins
END = 10_000  # in `Part.after`: when that answer has ended; no answer here has so many tokens
Say = Callable[[int, int, dict[str, object]], None]  # shows watchers a scene: number, of how many, caption


@dataclass(frozen=True, slots=True)
class Part:
    """One request of a scene."""

    prompt: tuple[tuple[str, int], ...]  # texts, each with its number of tokens
    answer: int  # how many tokens
    samples: int = 1
    beams: bool = False  # the samples are the beams of a search
    checkpoints: tuple[int, ...] = ()  # lengths of its beginnings after which a recurrent model keeps a state
    after: tuple[int, int] | None = None  # it starts when this part (its index) has this many tokens of its answer; None: at once


@dataclass(frozen=True, slots=True)
class Scene:
    title: str
    text: str  # two or three sentences: what happens, and what to look at
    marks: tuple[str, ...]  # in the picture, which the page explains beside the caption (octavo/web/lesson_marks.js draws them)
    parts: tuple[Part, ...]
    shows: frozenset[str]  # the events that have to happen in it
    dies_after: int | None = None  # engine 0 is killed when the first part has so many tokens of its answer

    @property
    def caption(self) -> dict[str, object]:
        """What the page says about the scene."""
        return {"title": self.title, "text": self.text, "marks": self.marks}


class Lesson:
    def __init__(self, llm: AsyncLLM, say: Say) -> None:
        self._llm = llm
        self._say = say
        self._playing = asyncio.Lock()

    @property
    def scenes(self) -> tuple[Scene, ...]:
        """All that this model can play."""
        return (*SCENES[:-1], OF_STATES, SCENES[-1]) if self._llm.facts.keeps_states else SCENES

    async def play(self, number: int) -> None:
        """Plays the scene with this number, counted from 1. Raises ApiError if another scene does not end."""
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._playing.acquire()
        except TimeoutError as error:
            raise ApiError(409, "another scene is being played on this server; wait until it is over", code="lesson_is_playing") from error
        try:
            scene = self.scenes[number - 1]
            await self._stage_is_ready(scene)
            await self._llm.reset_prefix_cache()
            await asyncio.sleep(EMPTY_SECONDS)
            self._publish(number, 0)
            await _Performance(self._llm, scene, lambda: self._publish(number, 1)).run()
        finally:
            self._playing.release()

    async def _stage_is_ready(self, scene: Scene) -> None:
        """Waits for engine 0, which the scene before may have killed. A scene in which it dies also waits for the other one."""
        engines = self._llm.replicas
        needed = engines if scene.dies_after is not None else engines[:1]
        while len(engines) > 1 and not all(engine.is_ready or engine.stays_dead for engine in needed):
            await asyncio.sleep(READY_SECONDS)

    def _publish(self, number: int, engine: int) -> None:
        """Shows the caption of a scene, and where there are several engines the one to look at from now on."""
        several = {"engine": engine} if len(self._llm.replicas) > 1 else {}
        self._say(number, len(self.scenes), {**self.scenes[number - 1].caption, **several})


@dataclass(slots=True)
class _Performance:
    """One scene being played."""

    llm: AsyncLLM
    scene: Scene
    on_death: Callable[[], None]  # called when the engine was killed
    _answered: list[int] = field(init=False)  # tokens of each part so far
    _ended: list[bool] = field(init=False)
    _news: asyncio.Condition = field(init=False, default_factory=asyncio.Condition)

    async def run(self) -> None:
        count = len(self.scene.parts)
        self._answered, self._ended = [0] * count, [False] * count
        tasks = [asyncio.create_task(self._part(index)) for index in range(count)]
        if self.scene.dies_after is not None:
            tasks.append(asyncio.create_task(self._die(self.scene.dies_after)))
        try:
            await asyncio.gather(*tasks)
        finally:  # if one part fails, or the client leaves, all parts end
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _part(self, index: int) -> None:
        part = self.scene.parts[index]
        if part.after is not None:
            before, tokens = part.after
            async with self._news:
                await self._news.wait_for(lambda: self._ended[before] or self._answered[before] >= tokens)
        async for deltas in self.llm.generate(self._request(part)):
            self._answered[index] += sum(len(delta.token_ids) for delta in deltas)
            await self._publish()
        self._ended[index] = True
        await self._publish()

    async def _die(self, tokens: int) -> None:
        async with self._news:
            await self._news.wait_for(lambda: self._answered[0] >= tokens)
        self.llm.replicas[0].kill()
        self.on_death()

    async def _publish(self) -> None:
        async with self._news:
            self._news.notify_all()

    def _request(self, part: Part) -> AddRequest:
        ids = list(chain.from_iterable(self._cut(text, count) for text, count in part.prompt))
        params = SamplingParams(temperature=1.0, seed=7, n=part.samples, max_tokens=part.answer, ignore_eos=True)
        return AddRequest("", ids, params, beams=Beams(part.samples) if part.beams else None, checkpoints=list(part.checkpoints))

    def _cut(self, text: str, count: int) -> list[int]:
        """Returns the first `count` tokens of a text; a text that is too short is repeated."""
        return list(islice(cycle(self.llm.tokenizer.encode(text, add_special_tokens=False)), count))


def router(server: Server) -> APIRouter:
    routes = APIRouter()
    if not server.config.lesson:
        return routes

    def say(scene: int, of: int, caption: dict[str, object]) -> None:
        for hub in server.views:
            hub.note(scene, of, caption)

    lesson = Lesson(server.llm, say)

    @routes.get("/v1/lesson")
    async def scenes() -> dict[str, object]:
        return {"object": "list", "data": [{"scene": number, **scene.caption} for number, scene in enumerate(lesson.scenes, 1)]}

    @routes.post("/v1/lesson/{scene}")
    async def play(scene: int, request: Request) -> dict[str, object]:
        if not 1 <= scene <= len(lesson.scenes):
            raise ApiError(404, f"there is no scene {scene}; they are numbered from 1 to {len(lesson.scenes)}", param="scene")
        await unless(disconnect(request.receive), lesson.play(scene))
        return {"scene": scene, "status": "over"}

    return routes


RABBIT = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do. "
FALL = "Down, down, down. Would the fall never come to an end? I wonder how many miles I have fallen by this time, she said aloud. "
BOTTLE = "This bottle was not marked poison, so Alice ventured to taste it, and finding it very nice, she very soon finished it off. "
POOL = "She was in the pool of tears which she had wept when she was nine feet high, and swam about, trying to find her way out. "
CAT = "The Cat only grinned when it saw Alice. It looked good-natured, she thought: still it had very long claws and many teeth. "
TEA = "There was a table set out under a tree in front of the house, and the March Hare and the Hatter were having tea at it. "
QUEEN = "The players all played at once without waiting for turns, quarrelling all the while, and fighting for the hedgehogs. "
TRIAL = "The King and Queen of Hearts were seated on their throne when they arrived, with a great crowd assembled about them. "
SCENES = (
    Scene(
        "A prompt takes blocks",
        "A prompt of 40 tokens arrives and takes three blocks of 16 tokens. Look at the third block: it is only half full, and the answer "
        "is written into it. No other memory is reserved for the answer.",
        ("held", "fill", "sealed"),
        (Part(((RABBIT, 40),), 8),),
        frozenset({"admit"}),
    ),
    Scene(
        "The answer needs a new block",
        "Every new token of the answer goes into the last block. Watch that block: when it is full, the sequence takes another free block. "
        "The block table keeps the order, so any free block will do.",
        ("held", "write"),
        (Part(((FALL, 44),), 24),),
        frozenset({"admit"}),
    ),
    Scene(
        "A prefix is found in the cache",
        "The first request ends, and its full blocks stay in the cache. The second request begins with the same 64 tokens. "
        "Look at the framed blocks: it takes these four from the cache and computes only the rest of its prompt.",
        ("cached", "hit"),
        (Part(((BOTTLE, 64), (CAT, 8)), 6), Part(((BOTTLE, 64), (TEA, 12)), 10, after=(0, END))),
        frozenset({"admit", "hit"}),
    ),
    Scene(
        "Four requests share a prefix",
        "Four requests arrive together, and all begin with the same 80 tokens. The first one computes them while the others wait. "
        "Look for the number 4: all four share the same five blocks, and each writes its answer into blocks of its own.",
        ("shared", "held"),
        tuple(Part(((POOL, 80), (text, 8)), answer) for text, answer in ((RABBIT, 15), (FALL, 14), (CAT, 14), (TEA, 14))),  # end together
        frozenset({"admit", "hit"}),
    ),
    Scene(
        "Three answers to one prompt: copy-on-write",
        "One prompt gets three answers, and at first all three share its blocks, even the half full one at the end. Look for the arrows: "
        "a sequence gets a copy before it writes into a shared block. The last one left writes into the block itself.",
        ("shared", "copy"),
        (Part(((CAT, 40),), 16, samples=3),),
        frozenset({"admit", "fork", "copy"}),
    ),
    Scene(
        "Beam search: the best go on",
        "Four beams look for the likeliest answer. After every token the best four go on: a beam with several good continuations parts, "
        "and a beaten one ends and frees its blocks. Look how they share what they agree on, and copy the block they write into.",
        ("shared", "copy", "held"),
        (Part(((TEA, 40),), 24, samples=4, beams=True),),
        frozenset({"admit", "fork", "copy"}),
    ),
    Scene(
        "No block is free: preemption",
        "Three answers grow until no block is free. The youngest request then gives its blocks back and waits. "
        "When there is room again it takes from the cache what is still there, and computes the rest again.",
        ("preempt", "evict", "hit"),
        tuple(Part(((text, 144),), 40) for text in (TEA, QUEEN, TRIAL)),
        frozenset({"admit", "preempt", "evict"}),
    ),
    Scene(
        "Old blocks are evicted",
        "Blocks that nobody uses stay cached until the room is needed. Look for the crosses: the blocks unused for longest are evicted "
        "first. The last request repeats the first prompt, and only the beginning of it is still cached.",
        ("cached", "evict", "hit"),
        (
            Part(((RABBIT, 96),), 3),
            *(Part(((text, 96),), 3, after=(number, END)) for number, text in enumerate((FALL, BOTTLE, POOL, CAT, TEA, RABBIT))),
        ),
        frozenset({"admit", "evict", "hit"}),
    ),
    Scene(
        "A long prompt beside an answer",
        "A prompt of 200 tokens arrives while an answer is being written. A step computes at most 48 tokens, so the prompt takes five "
        "steps. Watch both letters: the prompt fills three blocks in a step, and the answer still gets its token.",
        ("write", "prefill", "decode"),
        (Part(((QUEEN, 20),), 30), Part(((TRIAL, 200),), 18, after=(0, 8))),
        frozenset({"admit"}),
    ),
    Scene(
        "An engine dies, the stream goes on",
        "Engine 0 writes an answer, and after 14 tokens it is killed. The request goes on in engine 1: look how it computes the prompt "
        "and those 14 tokens in two steps, and writes the rest. The client sees a pause, and the text is the same.",
        ("held", "prefill", "decode"),
        (Part(((TRIAL, 40),), 34),),
        frozenset({"admit"}),
        dies_after=14,
    ),
)
OF_STATES = Scene(
    "States of recurrent layers",
    "Recurrent layers have a state of each sequence, and a prefix is continued only where one was kept. The second request starts from the "
    "state after 64 tokens. The third shares 48 tokens, where none was kept: it computes them again.",
    ("states", "cached", "hit"),
    (
        Part(((POOL, 64), (CAT, 24)), 6, checkpoints=(64,)),
        Part(((POOL, 64), (TEA, 20)), 8, after=(0, END)),
        Part(((POOL, 48), (QUEEN, 20)), 10, after=(1, END)),
    ),
    frozenset({"admit", "hit"}),
)

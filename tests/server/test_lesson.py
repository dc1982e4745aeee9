"""The lesson: every scene shows what it says it shows, on the real engine in its tiny pool, and leaves nothing behind."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.args import Parser, add_server_flags, server_configs
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.supervisor import Serving
from octavo.errors import ConfigError
from octavo.messages import AddRequest, LifeRecord
from octavo.outputs import TextDelta
from octavo.server import lesson as lesson_module
from octavo.server.errors import ApiError
from octavo.server.lesson import OF_STATES, SCENES, Lesson
from octavo.server_config import LESSON, LESSON_SERVER, ServerConfig
from tests.server.test_view import Watching
from tests.support.engine_process import engine_process, is_idle, run, tokens, until
from tests.support.http_server import wait_for
from tests.support.hybrids import hybrid_story_folder
from tests.support.server_process import ServerProcess
from tests.support.soaked import rarely

Told = list[tuple[int, int, dict[str, object]]]


async def _events(llm: AsyncLLM, lesson: Lesson, number: int) -> list[tuple[Any, ...]]:
    """All that was seen in all engines while a scene played, until all that it shows was seen."""
    seen: list[tuple[Any, ...]] = []

    async def watch(engine: int, watching: asyncio.Event) -> None:
        async with aclosing(llm.view(engine)) as frames:
            async for frame in frames:
                watching.set()
                seen.extend(frame.events)

    begun = [asyncio.Event() for _ in llm.replicas]
    watchers = {asyncio.create_task(watch(engine, watching)) for engine, watching in enumerate(begun)}
    for watching in begun:
        await watching.wait()
    await lesson.play(number)
    shows = lesson.scenes[number - 1].shows
    await until(lambda: {event[2] for event in seen} >= shows, f"the scene shows {shows}")
    for watcher in watchers:
        watcher.cancel()
    await asyncio.wait(watchers)
    return seen


@pytest.mark.parametrize("engines", [*rarely(1), 2])
def test_a_scene_shows_what_it_says(engines: int, endless: str) -> None:
    scenes = [(number, scene) for number, scene in enumerate(SCENES, 1) if (scene.dies_after is None) == (engines == 1)]

    async def main() -> None:
        told: Told = []
        serving = Serving(inspector=True, step_seconds=0.01, engines=engines)  # what a scene asks for at once arrives within a few steps
        async with engine_process(endless, "", serving, **LESSON) as llm:
            lesson = Lesson(llm, lambda *words: told.append(words))
            for number, scene in scenes:
                told.clear()
                events = await _events(llm, lesson, number)
                captions = [scene.caption] if engines == 1 else [{**scene.caption, "engine": engine} for engine in (0, 1)]
                assert told == [(number, len(SCENES), caption) for caption in captions], scene.title
                assert len([event for event in events if event[2] == "admit"]) >= len(scene.parts), scene.title
                await until(lambda: is_idle(llm), f"the engine is idle after {scene.title}")

    run(main())


# promise: lesson-engine-dies
def test_the_engine_that_dies_changes_no_token_and_the_next_scene_waits_for_it(endless: str) -> None:
    number = next(number for number, scene in enumerate(SCENES, 1) if scene.dies_after is not None)

    async def main() -> None:
        serving = Serving(inspector=True, step_seconds=0.02, engines=2, routing="first", max_restarts=0)
        async with engine_process(endless, "", serving, **LESSON) as llm:
            assert [replica.state for replica in llm.replicas] == ["ready", "loading"], "the start does not wait for the reserve"
            await llm.reset_prefix_cache()
            asked, heard, generate = list[AddRequest](), list[TextDelta](), llm.generate

            async def listened(request: AddRequest, timeout: float | None = None) -> AsyncGenerator[list[TextDelta], None]:
                asked.append(request)
                async for news in generate(request, timeout):
                    heard.extend(news)
                    yield news

            llm.generate = listened  # type: ignore[method-assign]
            stages: list[list[str]] = []  # the engines' states at each caption
            lesson = Lesson(llm, lambda *words: stages.append([replica.state for replica in llm.replicas]))
            await lesson.play(number)
            assert stages[0] == ["ready", "ready"], "it waits for the reserve"
            before = [token for delta in heard for token in delta.token_ids]
            lives = [delta.life for delta in heard if delta.life is not None]
            assert (lives[-1].engine, lives[-1].resumed) == (1, 1) and len(before) == asked[0].params.max_tokens
            heard.clear()
            await lesson.play(1)
            lives = [delta.life for delta in heard if delta.life is not None]
            assert stages[-1][0] == "ready" and (lives[-1].engine, lives[-1].resumed) == (0, 0), "it plays in the new engine 0"
            assert await tokens(llm, asked[0]) == before, "the same as without a death"
            assert [replica.facts.epoch for replica in llm.replicas if replica.facts] == [2, 1]

    run(main())


# promise: lesson-states
def test_a_recurrent_model_has_a_scene_about_its_states(tmp_path: Path) -> None:
    folder = str(hybrid_story_folder(tmp_path / "model"))

    async def main() -> None:
        serving = Serving(inspector=True, step_seconds=0.01)
        async with engine_process(folder, "", serving, load_format="dummy", **LESSON) as llm:
            lives, generate = list[LifeRecord](), llm.generate

            async def listened(request: AddRequest, timeout: float | None = None) -> AsyncGenerator[list[TextDelta], None]:
                async for news in generate(request, timeout):
                    lives.extend(delta.life for delta in news if delta.life is not None and delta.finish_reason is not None)
                    yield news

            llm.generate = listened  # type: ignore[method-assign]
            lesson = Lesson(llm, lambda *words: None)
            assert len(lesson.scenes) == len(SCENES) + 1 and lesson.scenes[-2] is OF_STATES and lesson.scenes[-1] is SCENES[-1]
            events = await _events(llm, lesson, len(SCENES))
            assert [life.cached_tokens for life in lives] == [0, 64, 0]
            assert (lives[2].common_tokens, lives[2].hit_reason) == (48, "no_state")
            assert [event[4] for event in events if event[2] == "hit"] == [64]

    run(main())


def test_captions_are_short_and_scenes_fit_the_pool() -> None:
    for scene in (*SCENES, OF_STATES):
        assert scene.text.endswith(".") and scene.text.count(". ") <= 2 and len(scene.text) <= 250, scene.title
        for part in scene.parts:
            assert sum(count for _, count in part.prompt) + part.answer <= LESSON["max_model_len"]


def test_one_scene_plays_at_a_time_and_one_that_is_left_ends(endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lesson_module, "LEAVE_SECONDS", 0.3)

    async def main() -> None:
        async with engine_process(endless, "", Serving(inspector=True, step_seconds=0.05), **LESSON) as llm:
            lesson = Lesson(llm, lambda *words: None)
            playing = asyncio.create_task(lesson.play(7))
            await until(lambda: llm.num_open == 3)
            with pytest.raises(ApiError, match="another scene is being played"):
                await lesson.play(1)
            playing.cancel()
            await asyncio.wait({playing})
            await until(lambda: is_idle(llm))
            hits = llm.stats.prefix_hits
            for _ in range(2):
                await lesson.play(1)
            assert llm.stats.prefix_hits == hits, "each scene begins with an empty cache"

    run(main())


def test_the_lesson_sets_its_own_pool() -> None:
    def parsed(*words: str) -> Any:
        parser = Parser(prog="octavo serve", allow_abbrev=False)
        add_server_flags(parser)
        return server_configs(parser.parse(words))

    engine, server = parsed("--lesson")
    assert server.lesson and {name: getattr(engine, name) for name in LESSON} == LESSON
    assert {name: getattr(server, name) for name in LESSON_SERVER} == LESSON_SERVER
    with pytest.raises(ConfigError, match="block_size is set by the lesson"):
        parsed("--lesson", "--block-size", "32")
    with pytest.raises(ConfigError, match="data_parallel_size is set by the lesson"):
        parsed("--lesson", "-dp", "3")
    with pytest.raises(ConfigError, match="the lesson needs the inspector"):
        ServerConfig(lesson=True, inspector=False)


def test_scenes_over_http_and_their_captions(endless: str) -> None:
    """A caption reaches who watches, and who comes later."""
    env = {"OCTAVO_DEBUG": "runner=fake", "OCTAVO_LOG_LEVEL": "WARNING"}
    with ServerProcess("octavo serve", endless, "--lesson", "--lesson-pace", "0", env=env) as server:
        listed = server.ask("GET", "/v1/lesson").json["data"]
        assert [each["title"] for each in listed] == [scene.title for scene in SCENES]
        early = Watching(server)
        assert early.state.head["lesson"] and early.state.note is None
        assert server.ask("POST", "/v1/lesson/3").json == {"scene": 3, "status": "over"}
        wait_for(lambda: early.state.note is not None)
        late = Watching(server)
        wait_for(lambda: late.state.note is not None)
        for watcher in (early, late):
            note = watcher.state.note
            assert note is not None and (note["scene"], note["of"]) == (3, len(SCENES))
            assert {name: note[name] for name in listed[2]} == listed[2]
            assert note.get("engine") == (0 if watcher is early else None), "who comes later has chosen an engine, and stays there"
            watcher.leave()
        for wrong in ("0", "99", "-1", "x", "3.5"):
            assert server.ask("POST", f"/v1/lesson/{wrong}").status in (400, 404), wrong
    with ServerProcess("octavo serve", endless, env=env) as server:
        assert server.ask("GET", "/v1/lesson").status == 404

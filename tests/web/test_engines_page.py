"""The choice of one of several engines, in a real browser: by keyboard, kept while an engine is dead, and absent where there is one."""

from typing import Any

import pytest

from tests.support.http_server import wait_for
from tests.support.view_frames import ViewModel
from tests.support.view_host import Shown, view_host
from tests.web.conftest import OpenPage
from tests.web.layout import assert_all_can_be_seen

try:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import expect
except ModuleNotFoundError:
    pytest.skip("the page is tested with playwright and axe-playwright-python (requirements/dev.txt)", allow_module_level=True)


def engine(number: int, blocks: int) -> Shown:
    """The view of one of three engines, in which a sequence holds some blocks."""
    model = ViewModel(1, 20)
    model.admit()
    model.write(model.seqs[0], 4 * blocks)
    several: dict[str, Any] = {"engine": number, "engines": 3}
    return Shown([(0, {**model.head(), **several}), (0, model.frame("full"))])


# promise: engines-watched
@pytest.mark.soak
def test_one_of_several_engines_is_chosen_and_the_choice_stays_while_it_is_dead(open_page: OpenPage) -> None:
    words = {"message": "engine 2 is dead, 2 of 3 engines are ready", "code": None}
    with view_host(engine(0, 3), engine(1, 5), Shown(status=503, error=words), Shown(status=503, error=words), engine(2, 7)) as host:
        host.engines = {"ready": 3, "all": 3}
        page = open_page(f"{host.url}/page", expected=["503 .*engine=2$"]).page
        choice, figures = page.get_by_label("Engine", exact=True), page.locator(".pool-figures")
        expect(figures).to_contain_text("3 of 19 blocks in use")
        expect(choice).to_have_value("0")
        expect(page.locator(".pool-engines")).to_contain_text("of 33 of 3 ready")
        choice.focus()
        page.keyboard.press("ArrowDown")
        expect(choice).to_have_value("1")
        expect(figures).to_contain_text("5 of 19 blocks in use")
        assert_all_can_be_seen(page, "the choice of an engine")
        found = Axe().run(page).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")] == []

        host.engines = {"ready": 2, "all": 3}
        choice.select_option("2")
        expect(page.locator(".pool-status")).to_contain_text("engine 2 is dead, 2 of 3 engines are ready; trying again")
        expect(page.locator(".pool[data-empty] select")).to_be_visible()  # so that another one can be chosen
        expect(page.locator(".pool-engines b")).to_have_text("2 of 3 ready")
        expect(figures).to_contain_text("7 of 19 blocks in use")  # when it is there again
        expect(choice).to_have_value("2")
        wait_for(lambda: [path for path in host.asked if "v1/view" in path][-1] == "/v1/view?engine=2")
        page.close()  # before the stream ends


@pytest.mark.soak
def test_a_server_that_lost_an_engine_is_followed_at_its_first(open_page: OpenPage) -> None:
    """It was started again, with fewer of them."""
    model = ViewModel(1, 20)
    alone = Shown([(0, model.head()), (0, model.frame("full"))])
    with view_host(engine(0, 3), Shown(status=400), alone) as host:
        page = open_page(f"{host.url}/page", expected=["400 .*engine=2$"]).page
        page.get_by_label("Engine", exact=True).select_option("2")
        expect(page.locator(".pool-figures")).to_contain_text("0 of 19 blocks in use")
        assert [path for path in host.asked if "v1/view" in path] == ["/v1/view", "/v1/view?engine=2", "/v1/view"]
        expect(page.locator(".pool-engines")).to_be_hidden()  # there is one
        page.close()

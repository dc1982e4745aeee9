"""Whether everything on a page can be seen: nothing is cut off, sticks out of its box or lies over something else.

What is scrolled out of sight is fine, but for the controls that a test names: they are always in sight.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

SIZES = ((1440, 900), (1024, 768), (390, 844))

FIND_TROUBLE = """([allowed, controls]) => {
  const found = [];
  const name = (element) => element.tagName.toLowerCase() + (element.className ? `.${String(element.className).replaceAll(" ", ".")}` : "");
  const isShown = (element) => {
    const { width, height } = element.getBoundingClientRect();
    return width > 1 && height > 1 && element.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  };
  const skipped = [".hidden, .skip, .pool-said, svg, select, option", ...allowed].join(", ");
  const elements = [...document.body.querySelectorAll("*")].filter((element) => !element.closest(skipped) && isShown(element));
  const wide = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > wide) found.push(`the page is ${document.documentElement.scrollWidth} pixels wide`);
  for (const element of elements) {
    const { overflowX, overflowY, textOverflow } = getComputedStyle(element);
    const { clientWidth, scrollWidth, clientHeight, scrollHeight } = element;
    const { left, right } = element.getBoundingClientRect();
    if (clientWidth && scrollWidth > clientWidth + 3 && textOverflow !== "ellipsis" && !element.matches("input, textarea")) {
      found.push(`${name(element)}: ${scrollWidth} pixels of content in a width of ${clientWidth} (${overflowX})`);
    }
    if (clientHeight && scrollHeight > clientHeight + 3 && ["hidden", "clip"].includes(overflowY)) {
      found.push(`${name(element)}: ${scrollHeight} pixels of content in a height of ${clientHeight}`);
    }
    if (left < -1 || right > wide + 1) {
      found.push(`${name(element)}: from ${Math.round(left)} to ${Math.round(right)} on a page ${wide} wide`);
    }
  }
  const OVER = ["fixed", "sticky", "absolute"];
  const isOver = (element) => element.closest("dialog, .places") || OVER.includes(getComputedStyle(element).position);
  const covers = (element) => element && (isOver(element) ? true : covers(element.parentElement));
  const isScrolledAway = (element, x, y) => {
    for (let around = element.parentElement; around; around = around.parentElement) {
      const { left, right, top, bottom } = around.getBoundingClientRect();
      if (getComputedStyle(around).overflowY !== "visible" && (x < left || x > right || y < top || y > bottom)) return true;
    }
    return false;
  };
  const isCutOff = (element) => {
    const { left, right, top, bottom } = element.getBoundingClientRect();
    const frames = [{ left: 0, right: wide, top: 0, bottom: innerHeight }];
    for (let around = element.parentElement; around; around = around.parentElement) {
      if (getComputedStyle(around).overflowY !== "visible") frames.push(around.getBoundingClientRect());
    }
    return frames.some((frame) => left < frame.left - 1 || right > frame.right + 1 || top < frame.top - 1 || bottom > frame.bottom + 1);
  };
  for (const element of controls ? elements.filter((one) => one.matches(controls)) : []) {
    const { left, right, top, bottom } = element.getBoundingClientRect();
    const above = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
    if (isCutOff(element)) found.push(`${name(element)} is cut off`);
    else if (!element.contains(above) && !above?.contains(element)) found.push(`${name(element)} lies under ${name(above)}`);
  }
  for (const element of elements.filter((one) => one.matches("button, input, textarea, a, summary, p, h2, h3, li, dt, dd"))) {
    const box = element.getClientRects()[0];
    const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
    if (isScrolledAway(element, x, y)) continue;
    const top = document.elementFromPoint(x, y);
    if (top && !element.contains(top) && !top.contains(element) && !covers(top)) found.push(`${name(element)} lies under ${name(top)}`);
  }
  return found;
}"""


def assert_all_can_be_seen(
    page: "Page", state: str, allowed: tuple[str, ...] = (), controls: str = "", sizes: Sequence[tuple[int, int]] = SIZES
) -> None:
    """At each of the sizes. `allowed`: selectors of what may be larger than its box, say because it scrolls sideways on purpose.
    `controls`: the selector of what must be in sight without scrolling."""
    before, trouble = page.viewport_size, {}
    for width, height in sizes:
        page.set_viewport_size({"width": width, "height": height})
        page.evaluate("() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
        if found := page.evaluate(FIND_TROUBLE, [list(allowed), controls]):
            trouble[f"{state}, {width}x{height}"] = found
    if before:
        page.set_viewport_size(before)
    assert not trouble, trouble

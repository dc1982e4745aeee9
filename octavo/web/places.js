/* The links at the bottom of a phone, which go from part to part. The one whose part is in sight is marked. */

const SHARES = [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1];

/** `changed` is called when a link is followed. Returns { show(part) }, which goes there where there are links. */
export function mountPlaces(nav, changed) {
  const links = new Map([...nav.querySelectorAll("a")].map((link) => [document.querySelector(link.getAttribute("href")), link]));
  const { parentElement: screen } = links.keys().next().value;
  const shares = new Map(); // part -> how much of it is in sight, or how much of the screen it fills
  let followed = null; // the part one has gone to: it stays marked until one scrolls, though it may be a small one at the end

  function mark() {
    const [most] = [...shares].reduce((one, other) => (other[1] > one[1] ? other : one), [null, 0]);
    for (const [part, link] of links) {
      if (part === (followed ?? most)) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }

  const observer = new IntersectionObserver((entries) => {
    for (const { target, intersectionRect, boundingClientRect } of entries) {
      shares.set(target, intersectionRect.height / Math.max(1, Math.min(boundingClientRect.height, screen.clientHeight)));
    }
    mark();
  }, { threshold: SHARES });
  for (const part of links.keys()) observer.observe(part);

  function follow(part) {
    followed = part;
    mark();
  }

  for (const event of ["wheel", "touchmove"]) screen.addEventListener(event, () => { followed = null; }, { passive: true });
  for (const [part, link] of links) {
    link.addEventListener("click", () => {
      follow(part);
      changed();
    });
  }
  return {
    show(part) {
      if (!nav.checkVisibility()) return;
      follow(part);
      part.scrollIntoView();
    },
  };
}

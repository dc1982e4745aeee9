/* Elements out of script. Text is always a text node, so nothing that a model or a server says can become an element. */

const COPIED_MS = 1500;

/** `make("button", { class: "small", onclick: f }, "Send")`; a property that is undefined is left out. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (typeof value === "boolean") element.toggleAttribute(name, value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function press(element, pressed) {
  if (element.getAttribute("aria-pressed") !== String(pressed)) element.setAttribute("aria-pressed", String(pressed));
}

export function button(label, onclick, properties = {}) {
  return make("button", { type: "button", onclick, ...properties }, label);
}

/** A button that copies what `text()` returns, and says that it has. */
export function copyButton(text) {
  const copy = async () => {
    await navigator.clipboard.writeText(text());
    element.textContent = "Copied";
    setTimeout(() => { element.textContent = "Copy"; }, COPIED_MS);
  };
  const element = button("Copy", copy);
  return element;
}

/** `draw`, but once, with the next picture, however often it was asked for. */
export function oncePerPicture(draw) {
  let awake = false;
  return () => {
    if (awake) return;
    awake = true;
    requestAnimationFrame(() => {
      awake = false;
      draw();
    });
  };
}

let last = 0;

/** An id for `for` and `aria-labelledby`. */
export function freshId(prefix) {
  last += 1;
  return `${prefix}-${last}`;
}

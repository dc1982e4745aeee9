/* Colours for code. highlight.js finds the parts of a program; the elements are made here, of a few known classes.

It is loaded with the first code in a language that it knows. Until then, and if that fails, the code is plain text. */

import { make } from "./dom.js";

const MOST_CHARACTERS = 20_000; // longer code stays plain: it is read again whenever it grows
const CLASSES = {
  keyword: "keyword", "selector-tag": "keyword", name: "keyword", literal: "number", number: "number", symbol: "number", bullet: "number",
  string: "string", regexp: "string", char: "string", link: "string", code: "string", addition: "added", deletion: "removed",
  comment: "comment", quote: "comment", doctag: "comment", meta: "comment",
  title: "title", section: "title", "selector-id": "title", "selector-class": "title",
  built_in: "builtin", type: "builtin", attr: "builtin", attribute: "builtin", property: "builtin", "selector-attr": "builtin", "selector-pseudo": "builtin",
}; // what highlight.js calls a part (before the first dot) -> a class of chat.css

let library = null; // once it is loaded
let loading = null;

/** Colours `text`, which `element` shows, as a program in `language`. */
export function colour(element, text, language) {
  if (text.length > MOST_CHARACTERS) return;
  const show = () => {
    if (library.getLanguage(language)) element.replaceChildren(...nodes(library.highlight(text, { language, ignoreIllegals: true })._emitter.root.children));
  };
  if (library) show();
  else load().then(show, () => {}); // without it the code is plain
}

async function load() {
  loading ??= import("./vendor/highlight.min.js");
  library = (await loading).default;
}

function nodes(children) {
  return children.map((child) => {
    if (typeof child === "string") return child;
    const known = CLASSES[child.scope?.split(".")[0]];
    return make("span", known ? { class: `code-${known}` } : {}, ...nodes(child.children));
  });
}

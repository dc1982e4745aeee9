/* Markdown as elements. marked finds the structure; the elements are made here, of a few known kinds, and everything else is text.
The parts of code and of formulas are made in the same way, in code_colours.js and maths.js.

Raw HTML is shown as it was written. Links go to http and https alone, images are links: nothing loads by itself. Direction controls,
which can make a text read other than it is, are shown by their numbers. What is too long or too deep for Markdown is plain text. */

import { colour } from "./code_colours.js";
import { copyButton, make } from "./dom.js";
import { mathsSyntax, typeset } from "./maths.js";
import { Marked } from "./vendor/marked.esm.js";

const MOST_MARKDOWN = 50_000; // characters; beyond, plain text
const MOST_SHOWN = 200_000;
const MOST_DEPTH = 20;
const MOST_FORMULAS = 500; // with more of them, marked would take seconds
const [reader, readerWithoutMaths] = [new Marked(mathsSyntax), new Marked()];
const SIDES = { left: "to-left", center: "to-center", right: "to-right" }; // of a column
const CONTROLS = /[\u202a-\u202e\u2066-\u2069]/g;

/** A function that shows a text in `element`, again and again as it grows: what was shown and did not change stays as it is. */
export function shower(element) {
  let shown = []; // [source, nodes] of each block
  return (text) => {
    const blocks = markdown(text);
    let same = 0;
    while (same < blocks.length && shown[same]?.[0] === blocks[same][0]) same += 1;
    for (const [, nodes] of shown.slice(same)) for (const node of nodes) node.remove();
    shown = [...shown.slice(0, same), ...blocks.slice(same).map(([source, build]) => [source, build()])];
    for (const [, nodes] of shown.slice(same)) element.append(...nodes);
  };
}

/** [source, function that makes its nodes] of each block of a text. */
function markdown(text) {
  if (text.length > MOST_MARKDOWN) return plain(text);
  try {
    return readerOf(text).lexer(text).map((token) => [token.raw, () => block(token, 0)]);
  } catch {
    return plain(text); // nested beyond what marked can follow
  }
}

function readerOf(text) {
  return text.split("$$").length + text.split("\\[").length > MOST_FORMULAS ? readerWithoutMaths : reader;
}

export function visible(text) {
  return text.replace(CONTROLS, (character) => `⟨U+${character.codePointAt(0).toString(16).toUpperCase()}⟩`);
}

function plain(text) {
  const left = text.length - MOST_SHOWN;
  const parts = [[text.slice(0, MOST_SHOWN), () => [make("p", { class: "plain" }, visible(text.slice(0, MOST_SHOWN)))]]];
  const more = `${left.toLocaleString("en")} more characters are not shown.`;
  if (left > 0) parts.push([more, () => [make("p", { class: "muted" }, more)]]);
  return parts;
}

function blocks(tokens, depth) {
  return tokens.flatMap((token) => block(token, depth));
}

function block(token, depth) {
  if (depth > MOST_DEPTH) return [visible(token.raw)];
  switch (token.type) {
    case "space":
    case "def":
      return [];
    case "heading":
      return [make(`h${Math.min(6, token.depth + 2)}`, {}, ...inlines(token.tokens, depth))]; // below those of the page
    case "hr":
      return [make("hr")];
    case "blockquote":
      return [make("blockquote", {}, ...blocks(token.tokens, depth + 1))];
    case "code":
      return [code(token)];
    case "list":
      return [list(token, depth)];
    case "table":
      return [table(token, depth)];
    case "paragraph":
      return [make("p", {}, ...inlines(token.tokens, depth))];
    case "text":
    case "checkbox":
      return inlines([token], depth);
    case "maths":
      return [maths(token)];
    default:
      return [make("p", { class: "plain" }, visible(token.raw))];
  }
}

function code({ text, lang }) {
  const program = make("code", {}, visible(text));
  if (lang) colour(program, visible(text), lang.split(/\s/)[0]);
  const pre = make("pre", { tabindex: "0", "aria-label": lang ? `Code, ${visible(lang)}` : "Code" }, program);
  const copy = navigator.clipboard ? [copyButton(() => text)] : []; // browsers have one on https and on this machine
  return make("div", { class: "code" }, make("div", { class: "code-head" }, make("span", {}, visible(lang ?? "")), ...copy), pre);
}

function maths({ raw, text, display }) {
  const element = make("span", display ? { class: "formula", tabindex: "0", role: "group", "aria-label": "Formula" } : {}, visible(raw.trim()));
  typeset(element, visible(text), display);
  return element;
}

function list(token, depth) {
  const items = token.items.map((item) => make("li", item.task ? { class: "task" } : {}, ...blocks(item.tokens, depth + 1)));
  const start = token.ordered && Number.isSafeInteger(token.start) ? { start: String(token.start) } : {};
  return make(token.ordered ? "ol" : "ul", start, ...items);
}

function table(token, depth) {
  const row = (cells, tag) => make("tr", {}, ...cells.map((cell) => make(tag, { scope: tag === "th" ? "col" : undefined, class: SIDES[cell.align] }, ...inlines(cell.tokens, depth))));
  const body = token.rows.map((cells) => row(cells, "td"));
  const grid = make("table", {}, make("thead", {}, row(token.header, "th")), make("tbody", {}, ...body));
  return make("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, grid);
}

function inlines(tokens, depth) {
  return tokens.flatMap((token) => inline(token, depth));
}

function inline(token, depth) {
  if (depth > MOST_DEPTH) return [visible(token.raw)];
  const within = () => inlines(token.tokens, depth + 1);
  switch (token.type) {
    case "text":
      return token.tokens ? within() : [visible(token.text)];
    case "escape":
      return [visible(token.text)];
    case "strong":
      return [make("strong", {}, ...within())];
    case "em":
      return [make("em", {}, ...within())];
    case "del":
      return [make("s", {}, ...within())];
    case "codespan":
      return [make("code", {}, visible(token.text))];
    case "br":
      return [make("br")];
    case "checkbox":
      return [make("input", { type: "checkbox", disabled: true, checked: token.checked, "aria-label": token.checked ? "Done" : "Not done" }), " "];
    case "maths":
      return [maths(token)];
    case "link":
      return [link(token.href, within(), token.raw)];
    case "image":
      return [link(token.href, [`image: ${visible(token.text || token.href)}`], token.raw)];
    default:
      return [visible(token.raw)];
  }
}

function link(href, children, raw) {
  if (!/^https?:\/\//i.test(href)) return visible(raw);
  return make("a", { href, title: visible(href), target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

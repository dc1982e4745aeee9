/* Formulas. Temml reads TeX and makes a tree of MathML; the elements are made here, of known kinds with known attributes.

It is loaded with the first formula. Until then, and where it cannot read one, the formula is shown as it was written. */

const NAMESPACE = "http://www.w3.org/1998/Math/MathML";
const ELEMENTS = new Set(
  ("math menclose mfrac mi mmultiscripts mn mo mover mpadded mphantom mprescripts mroot mrow mspace msqrt mstyle msub msubsup msup mtable mtd mtext " +
    "mtr munder munderover none").split(" "),
);
const ATTRIBUTES = new Set(
  ("accent accentunder columnspan depth display displaystyle fence form height largeop linethickness lspace mathvariant maxsize minsize " +
    "movablelimits notation rowspan rspace scriptlevel separator stretchy symmetric voffset width").split(" "),
);
const CLASSES = { "tml-left": "to-left", "tml-right": "to-right" }; // cells of aligned equations

const CLOSED_BY = { "$$": "$$", "\\[": "\\]", "\\(": "\\)" };
const DISPLAYED = ["$$", "\\["];
const MOST_CHARACTERS = 1000; // of a formula
const LOOK = 1000; // characters: a text without formulas is not searched again and again to its end

/** For marked: formulas become tokens { type: "maths", text, display }. `$5 and $10` is none. */
export const mathsSyntax = {
  extensions: [
    { name: "maths", level: "block", start: firstDisplayed, tokenizer: displayed },
    { name: "maths", level: "inline", start: (source) => near(source, /\$|\\[([]/), tokenizer: (source) => bracketed(source) ?? dollars(source) },
  ],
};

function near(source, pattern) {
  const at = source.slice(0, LOOK).search(pattern);
  return at >= 0 ? at : source.length > LOOK ? LOOK : undefined;
}

/** Where the next one begins: a paragraph ends there, and marked reads on from there. */
function firstDisplayed(source) {
  const near = source.slice(0, LOOK + MOST_CHARACTERS);
  for (const { index } of near.matchAll(/\n(?=\$\$|\\\[)/g)) if (displayed(near.slice(index + 1))) return index;
  return undefined;
}

/** A formula that has its lines to itself. */
function displayed(source) {
  const found = bracketed(source);
  const [rest] = (found?.display && /^[ \t]*(?:\n|$)/.exec(source.slice(found.raw.length, found.raw.length + LOOK))) || [];
  return rest === undefined ? undefined : { ...found, raw: found.raw + rest };
}

function bracketed(source) {
  const opened = source.slice(0, 2);
  const closed = CLOSED_BY[opened];
  const end = closed ? source.slice(0, MOST_CHARACTERS).indexOf(closed, 2) : -1;
  const text = source.slice(2, Math.max(2, end)).trim();
  return text ? { type: "maths", raw: source.slice(0, end + 2), text, display: DISPLAYED.includes(opened) } : undefined;
}

/** `$x$`, but nothing that may be money or the name of a variable of a shell. */
function dollars(source) {
  const [raw, text] = /^\$(?![\s$])((?:\\.|[^\\$`\n])+?)(?<!\s)\$(?!\w)/.exec(source.slice(0, MOST_CHARACTERS)) ?? [];
  return raw && { type: "maths", raw, text, display: false };
}

let library = null; // once it is loaded
let loading = null;

/** Shows a formula in `element`. */
export function typeset(element, text, display) {
  const show = () => {
    const tree = read(text, display);
    if (tree) element.replaceChildren(tree);
  };
  if (library) show();
  else load().then(show, () => {}); // without it the formula is text
}

async function load() {
  loading ??= import("./vendor/temml.min.js");
  library = (await loading).temml;
}

function read(text, display) {
  try {
    return node(library.__renderToMathMLTree(text, { displayMode: display, throwOnError: true, maxExpand: 200, maxSize: [10, 10] }));
  } catch {
    return null; // it is no TeX, or too deep
  }
}

function node(found) {
  if (found.text !== undefined) return document.createTextNode(found.text);
  const made = ELEMENTS.has(found.type) ? document.createElementNS(NAMESPACE, found.type) : document.createDocumentFragment();
  if (made.setAttribute) {
    for (const [name, value] of Object.entries(found.attributes)) if (ATTRIBUTES.has(name)) made.setAttribute(name, value);
    for (const name of found.classes) if (CLASSES[name]) made.setAttribute("class", CLASSES[name]);
  }
  made.append(...found.children.map(node));
  return made;
}

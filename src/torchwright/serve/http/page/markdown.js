// Markdown to nodes. marked only splits the text into tokens; every node is made here, from text, so that no HTML of a
// model is ever parsed: tags are shown as they were written. Pictures are links: loading one would tell its server.

import { Lexer } from "./marked.esm.js";
import { button, copy, el } from "./dom.js";

const SAFE = new Set(["http:", "https:", "mailto:"]);
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const LONGEST = 8000; // characters of a paragraph whose marks are looked at: marked's time is quadratic in some of them
const drawn = new WeakMap(); // element → what it shows: the text of its closed blocks, their number, the open ones' texts

// Show a text in an element. Of a growing answer only its end is read and drawn again, so that the time of a step does
// not grow with the answer, and a selection in it stays. `whole` draws all: a late definition may change links.
export function render(target, source, whole = false) {
  const text = source.replace(/\r\n?/g, "\n");
  const before = drawn.get(target);
  const { closed, count, open } = before && !whole && text.startsWith(before.closed)
    ? before : { closed: "", count: 0, open: [] };
  const tokens = lex(text.slice(closed.length));
  const blocks = tokens.filter(seen);
  let same = 0;
  while (same < open.length && open[same] === blocks[same]?.raw) same++;
  while (target.childNodes.length > count + same) target.lastChild.remove();
  target.append(...blocks.slice(same).map(block));
  // A block is closed once another one has begun behind it; one more is left open for what marked joins afterwards.
  const done = Math.max(0, blocks.length - 2);
  const end = done ? tokens.indexOf(blocks[done]) : 0;
  drawn.set(target, {
    closed: closed + tokens.slice(0, end).map(({ raw }) => raw).join(""),
    count: count + done,
    open: blocks.slice(done).map(({ raw }) => raw),
  });
}

const seen = (token) => token.type !== "space" && token.type !== "def";

function lex(text) {
  const lexer = new Lexer({ gfm: true });
  try {
    lexer.blockTokens(text, lexer.tokens);
    for (const { src, tokens } of lexer.inlineQueue) {
      if (src.length > LONGEST) tokens.push({ type: "escape", raw: src, text: src });
      else lexer.inlineTokens(src, tokens);
    }
    return lexer.tokens;
  } catch {
    // Nested too deep for the parser's stack.
    return [{ type: "plain", raw: text }];
  }
}

function block(token) {
  switch (token.type) {
    case "heading": return el(`h${Math.min(6, token.depth + 2)}`, {}, ...inlines(token.tokens));
    case "paragraph": return el("p", {}, ...inlines(token.tokens));
    case "text": return el("p", {}, ...inlines(token.tokens ?? [token]));
    case "code": return code(token.text, token.lang);
    case "blockquote": return el("blockquote", {}, ...blocksOf(token.tokens));
    case "list": return list(token);
    case "table": return table(token);
    case "hr": return el("hr");
    default: return el("p", { className: "plain", textContent: token.raw.trimEnd() });
  }
}

const blocksOf = (tokens) => tokens.filter(seen).map(block);

function code(text, language) {
  const name = (language ?? "").trim().split(/\s/)[0];
  const bar = el("div", { className: "bar" }, el("span", { textContent: name }),
    button("Copy", (event) => copy(text, event.currentTarget), { "aria-label": "Copy code" }));
  const pre = el("pre", { tabIndex: 0, role: "group", "aria-label": name ? `Code, ${name}` : "Code" },
    el("code", { textContent: text }));
  return el("div", { className: "code" }, bar, pre);
}

function list(token) {
  const node = el(token.ordered ? "ol" : "ul");
  if (token.ordered && token.start > 1) node.start = token.start;
  for (const item of token.items) {
    // The words of a tight item are no paragraph of their own.
    const parts = item.tokens.flatMap((part) => part.type === "text" && !item.loose
      ? inlines(part.tokens ?? [part]) : part.type === "checkbox" ? [checkbox(part)] : blocksOf([part]));
    node.append(el("li", { className: item.task ? "task" : "" }, ...parts));
  }
  return node;
}

function checkbox(token) {
  return el("input", { type: "checkbox", checked: token.checked, disabled: true,
    "aria-label": token.checked ? "done" : "to do" });
}

function table(token) {
  const row = (cells, tag) => el("tr", {}, ...cells.map((cell, at) =>
    el(tag, { className: token.align[at] ? `align-${token.align[at]}` : "" }, ...inlines(cell.tokens))));
  return el("div", { className: "table", tabIndex: 0, role: "group", "aria-label": "Table" }, el("table", {},
    el("thead", {}, row(token.header, "th")), el("tbody", {}, ...token.rows.map((cells) => row(cells, "td")))));
}

const inlines = (tokens) => tokens.map(inline);

function inline(token) {
  switch (token.type) {
    case "strong": case "em": case "del": return el(token.type, {}, ...inlines(token.tokens));
    case "codespan": return el("code", { textContent: token.text });
    case "br": return el("br");
    case "link": return link(token.href, inlines(token.tokens));
    case "image": return link(token.href, [`Picture: ${decoded(token.text) || token.href}`]);
    case "checkbox": return checkbox(token);
    case "escape": return document.createTextNode(token.text);
    case "text": return token.tokens
      ? el("span", {}, ...inlines(token.tokens)) : document.createTextNode(decoded(token.text));
    case "html": return /^<br\s*\/?>$/i.test(token.raw) ? el("br") : document.createTextNode(token.raw);
    default: return document.createTextNode(token.raw);
  }
}

// A link to the web or to a mailbox, with its address in sight of the pointer; others are their words alone.
function link(source, words) {
  const href = decoded(source);
  const url = URL.canParse(href) ? new URL(href) : null;
  if (!url || !SAFE.has(url.protocol)) return el("span", {}, ...words);
  return el("a", { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...words);
}

function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w{2,6}));/gi, (raw, decimal, hex, name) => {
    if (name) return ENTITIES[name] ?? raw;
    const point = decimal ? Number(decimal) : parseInt(hex, 16);
    return point > 0 && point <= 0x10ffff ? String.fromCodePoint(point) : raw;
  });
}

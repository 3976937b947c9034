// The messages of one conversation as nodes, and the newest one as it grows.

import { $, button, copy, el } from "./dom.js";
import { render } from "./markdown.js";
import { node as shownNode } from "./pictures.js";

const NEAR = 80; // pixels from the end within which the view follows an answer
const IDLE = 4;  // times as long as it takes to draw an answer, the page is left to its reader
let waiting = false;
let addresses = []; // of sounds, pictures and videos in sight

// Show a conversation. `running` is true while its last message is being written. `acts` are the functions behind the
// buttons: edit(at, text), regenerate(), sendAll().
export function show(conversation, running, acts) {
  const { messages, from } = conversation;
  addresses.forEach(URL.revokeObjectURL);
  addresses = [];
  $("thread").replaceChildren(...messages.flatMap((message, at) => {
    const last = at === messages.length - 1;
    const node = message.role === "user"
      ? question(message, at, running, acts) : reply(message, last && running, last && !running, acts);
    if (at < from) node.classList.add("left-out");
    return at === from && from > 0 ? [divider(acts), node] : [node];
  }));
  $("empty").hidden = messages.length > 0;
}

export function toEnd() {
  $("chat").scrollTop = $("chat").scrollHeight;
}

export function isNearEnd() {
  const chat = $("chat");
  return chat.scrollHeight - chat.scrollTop - chat.clientHeight < NEAR;
}

// Draw the last message again, at most once a frame. A reader who has scrolled up stays there.
export function grow(message) {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    const begun = performance.now(), near = isNearEnd();
    const node = $("thread").lastElementChild;
    if (node?.message === message) fill(node, message, true);
    if (near) toEnd();
    setTimeout(() => { waiting = false; }, IDLE * (performance.now() - begun));
  });
}

// What went wrong, with what can be done about it; nothing where `text` is empty.
export function fault(text, detail = "", acts = []) {
  const words = text ? [el("p", { textContent: text })] : [];
  if (detail) words.push(el("details", {}, el("summary", { textContent: "What the server said" }),
    el("p", { textContent: detail })));
  if (acts.length) words.push(el("div", { className: "acts" }, ...acts));
  $("fault").replaceChildren(...words);
  $("fault").hidden = !text;
  if (text) $("fault").scrollIntoView({ block: "nearest" });
}

function addressOf(blob) {
  const address = URL.createObjectURL(blob);
  addresses.push(address);
  return address;
}

function question(message, at, running, acts) {
  const sound = message.sound
    ? el("audio", { controls: true, src: addressOf(message.sound), "aria-label": message.sound.name }) : null;
  const name = message.soundName ? el("p", { className: "file", textContent: message.soundName }) : null;
  const pictures = message.pictures ? el("div", { className: "shown" },
    ...message.pictures.map((picture) => shownNode(picture, addressOf(picture), { controls: true }))) : null;
  const body = el("div", { className: "body", textContent: message.content });
  const node = el("article", { className: "message user", "aria-label": "You" }, name, sound, pictures,
    message.content ? body : null);
  if (message.content) {
    const edit = () => node.replaceChildren(editor(message, node, (text) => acts.edit(at, text)));
    node.append(el("div", { className: "acts" },
      button("Copy", (event) => copy(message.content, event.currentTarget)),
      running || message.soundName ? null : button("Edit", edit)));
  }
  return node;
}

function editor(message, node, done) {
  const before = [...node.childNodes];
  const back = () => {
    node.replaceChildren(...before);
    node.querySelector(".acts button:last-child").focus();
  };
  const box = el("textarea", { value: message.content, "aria-label": "Edit the message" });
  const form = el("form", { className: "editor" }, box, el("div", { className: "acts" },
    button("Cancel", back), el("button", { type: "submit", className: "strong", textContent: "Send" })));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (box.value.trim()) done(box.value.trim());
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") back();
    if (sends(event)) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  requestAnimationFrame(() => box.focus());
  return form;
}

// True for the Enter that sends: not with Shift, and not one that ends a word of an input method (229 in Safari).
export const sends = (event) =>
  event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;

function reply(message, running, last, acts) {
  const node = el("article", { className: "message assistant", "aria-label": "The model" });
  node.message = message;
  fill(node, message, running);
  if (!running) {
    const source = message.picture ? null : button("Copy", (event) => copy(message.content, event.currentTarget));
    const again = last ? button("Regenerate", acts.regenerate) : null;
    const file = message.picture ? el("a", { className: "button", download: "picture.png", textContent: "Save",
      href: node.querySelector("img").src }) : null;
    const note = message.note
      ? el("details", { className: "note" }, el("summary", { textContent: "Details" }),
        el("span", { textContent: message.note })) : null;
    node.append(el("div", { className: "acts" }, source, file, again, note));
  }
  return node;
}

// Parts of an answer in their order: its reasoning, its text, a picture, and why it ended where it did.
function fill(node, message, running) {
  let body = node.querySelector(":scope > .body");
  if (!body) {
    body = el("div", { className: "body" });
    node.prepend(body);
  }
  if (message.reasoning) think(node, body, message, running);
  render(body, message.content, !running);
  body.classList.toggle("growing", running);
  if (message.picture && !node.querySelector("img")) {
    body.after(el("img", { src: addressOf(message.picture), alt: "The picture" }));
  }
  const end = running ? "" : message.cut ? "Cut off: it has as many tokens as it may." : message.ended ?? "";
  if (end) body.after(el("p", { className: "end", textContent: end }));
}

// Reasoning stays folded unless its reader unfolds it.
function think(node, body, message, running) {
  let fold = node.querySelector(":scope > .reasoning");
  if (!fold) {
    fold = el("details", { className: "reasoning" }, el("summary"), el("div"));
    body.before(fold);
  }
  const [head, text] = fold.children;
  head.textContent = running && !message.content ? "Thinking …"
    : message.thought >= 1 ? `Thought for ${Math.round(message.thought)} s` : "Reasoning";
  render(text, message.reasoning, !running);
}

function divider(acts) {
  return el("div", { className: "divider" }, el("span", { textContent: "The model no longer reads what is above." }),
    button("Send all again", acts.sendAll));
}

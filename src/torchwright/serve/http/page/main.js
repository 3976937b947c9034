// The page: which conversation is shown, which answers are being written, and what each button does.

import * as answers from "./answer.js";
import { card as askCard, Refusal, useKey } from "./api.js";
import { $, button, newId, notice, setUpNotice } from "./dom.js";
import { watch } from "./live.js";
import { setUpSettings } from "./settings.js";
import { setUpSidebar, showList } from "./sidebar.js";
import * as pictures from "./pictures.js";
import * as sounds from "./sounds.js";
import * as store from "./store.js";
import * as thread from "./thread.js";

const SAVED_EVERY = 1000; // ms between two copies of an answer that is being written
const TITLE = 60;         // characters of the first message that name a conversation

const settings = store.settings();
const running = new Map(); // id → {conversation, stop} of each answer that is being written
let card = null;           // the served model, as /v1/models describes it
let current = fresh();     // the conversation in sight

function fresh() {
  return { id: newId(), title: "", updated: 0, system: settings.system, messages: [], from: 0 };
}

// ---- What is in sight

function draw() {
  const busy = running.has(current.id);
  thread.show(current, busy, { edit, regenerate, sendAll });
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  document.title = [current.title, card?.id ?? "Torchwright"].filter(Boolean).join(" – ");
}

async function drawList() {
  showList(await store.list(), current.id, running, { rename, remove });
}

async function open(id) {
  const found = running.get(id)?.conversation ?? (id ? await store.load(id) : null);
  if (id !== here()) return; // another one was opened meanwhile
  // An answer of which nothing had come when the page was closed.
  if (found && !running.has(id) && found.messages.at(-1)?.role === "assistant" && isEmpty(found.messages.at(-1))) {
    found.messages.pop();
  }
  current = found ?? fresh();
  thread.fault("");
  draw();
  thread.toEnd();
  await drawList();
}

const modalities = () => card?.input_modalities ?? [];

const here = () => decodeURIComponent(location.hash.slice(1));

const isEmpty = ({ content, reasoning, picture }) => !content && !reasoning && !picture;

async function keep(conversation) {
  if (conversation.deleted) return;
  try {
    await store.save(conversation);
  } catch (error) {
    notice(error?.name === "QuotaExceededError"
      ? "The browser has no room for more conversations. Delete some of them."
      : "The browser does not keep this conversation.");
  }
}

// ---- Questions and answers

function ask(content, sound, shown) {
  if (running.has(current.id)) return;
  current.messages.push({ role: "user", content, ...(sound ? { sound, soundName: sound.name } : {}),
    ...(shown.length ? { pictures: shown } : {}) });
  const shownAs = shown.every(pictures.isVideo) ? "Video" : "Pictures";
  current.title ||= (content || sound?.name || shownAs).replace(/\s+/g, " ");
  current.title = Array.from(current.title).slice(0, TITLE).join("");
  if (here() !== current.id) history.pushState(null, "", `#${current.id}`);
  answer(current);
}

async function answer(conversation) {
  const message = { role: "assistant", content: "", ended: "The page was closed before this was complete." };
  const stop = new AbortController();
  conversation.messages.push(message);
  conversation.updated = Date.now();
  running.set(conversation.id, { conversation, stop });
  thread.fault("");
  notice("");
  draw();
  thread.toEnd();
  $("status").textContent = "The model is answering.";
  await keep(conversation);
  drawList();
  let saved = performance.now(), error = null;
  try {
    await answers.kindOf(card).answer(conversation, settings, stop.signal, message, () => {
      if (conversation === current) thread.grow(message);
      if (performance.now() - saved > SAVED_EVERY) {
        saved = performance.now();
        keep(conversation);
      }
    });
  } catch (caught) {
    error = caught;
  }
  running.delete(conversation.id);
  finish(conversation, message, error);
}

function finish(conversation, message, error) {
  const empty = isEmpty(message);
  message.ended = !error ? "" : error.name === "AbortError" ? "Stopped." : error.message;
  if (error && empty && conversation.messages.at(-1) === message) conversation.messages.pop();
  conversation.updated = Date.now();
  keep(conversation).then(drawList);
  if (conversation !== current) return;
  const follow = thread.isNearEnd();
  draw();
  if (follow) thread.toEnd();
  if (error && (empty || error.name !== "AbortError")) explain(error);
  $("status").textContent = error ? "There is no complete answer." : "The answer is complete.";
  // Back to the box, unless the reader is elsewhere, has selected something, or would get a keyboard on the screen.
  const free = document.activeElement === document.body && getSelection().isCollapsed;
  if (free && matchMedia("(hover: hover)").matches) $("text").focus();
}

// Say what happened, and offer what can be done.
function explain(error) {
  const again = button("Try again", retry);
  if (error.name === "AbortError") return thread.fault("Stopped before there was an answer.", "", [again]);
  if (!(error instanceof Refusal)) {
    console.error(error);
    return thread.fault("The page made a mistake.", String(error), [again]);
  }
  const acts = { none: [], retry: [again], key: [button("Enter the key", () => openSettings("key")), again] };
  if (error.action !== "drop") return thread.fault(error.message, error.detail, acts[error.action]);
  const limited = settings.limit !== "" && Number(settings.limit) >= (card?.max_model_len ?? Infinity);
  if (limited) {
    return thread.fault(`Answers may have ${settings.limit} tokens, but the model has room for ${card.max_model_len} together with the question.`,
      error.detail, [button("Change the limit", () => openSettings("limit")), again]);
  }
  const older = current.messages.filter(({ role }) => role === "user").length > 1;
  return older
    ? thread.fault(error.message, error.detail, [button("Leave out the oldest messages", leaveOut, { className: "strong" })])
    : thread.fault("The message is longer than the model can read. Edit it, or send it in parts.", error.detail);
}

async function leaveOut() {
  const conversation = current;
  try {
    if (await answers.dropOld(conversation, settings, card.max_model_len)) retry();
    else thread.fault("The last message is too long by itself. Edit it, or send it in parts.");
  } catch (error) {
    explain(error);
  }
}

// Ask again for the answer that is missing or broke off.
async function retry() {
  if (!card) await learn();
  if (!card || running.has(current.id)) return;
  if (current.messages.at(-1)?.role === "assistant") current.messages.pop();
  if (current.messages.length) answer(current);
}

function regenerate() {
  replace(current.messages.slice(0, -1), "The answer was replaced.");
}

function edit(at, content) {
  const text = at < current.messages.length - 2 ? "The messages after it were replaced." : "The message was replaced.";
  replace([...current.messages.slice(0, at), { ...current.messages[at], content }], text);
}

// Go on from other messages; the old ones can be brought back.
function replace(messages, said) {
  const conversation = current, before = { messages: conversation.messages, from: conversation.from };
  Object.assign(conversation, { messages, from: conversation.from < messages.length ? conversation.from : 0 });
  answer(conversation);
  notice(said, async () => {
    running.get(conversation.id)?.stop.abort();
    Object.assign(conversation, before);
    await keep(conversation);
    if (conversation === current) draw();
  });
}

function sendAll() {
  current.from = 0;
  keep(current);
  draw();
}

// ---- The list

async function rename(id, title) {
  const conversation = id === current.id ? current : running.get(id)?.conversation ?? await store.load(id);
  if (conversation && conversation.title !== title) {
    conversation.title = title;
    await keep(conversation);
  }
  draw();
  await drawList();
}

async function remove(head) {
  running.get(head.id)?.stop.abort();
  const seen = head.id === current.id;
  const conversation = running.get(head.id)?.conversation ?? (seen ? current : await store.load(head.id));
  conversation.deleted = true;
  await store.remove(head.id);
  notice(`“${head.title}” was deleted.`, async () => {
    conversation.deleted = false;
    await keep(conversation);
    if (seen) location.hash = head.id;
    else await drawList();
  });
  if (seen) startNew();
  else await drawList();
}

function startNew() {
  history.pushState(null, "", location.pathname + location.search);
  open("");
  $("text").focus();
}

// ---- The model

async function learn() {
  try {
    card = await askCard();
    thread.fault("");
  } catch (error) {
    card = null;
    explain(error);
    return;
  }
  const kind = answers.kindOf(card);
  const talks = kind?.path === "/v1/chat/completions";
  $("form").hidden = !kind;
  $("text").placeholder = kind?.question ?? "";
  pictures.offer();
  $("sound-row").hidden = !card.input_modalities.includes("audio");
  $("system-row").hidden = !talks;
  $("hello").textContent = !kind ? "This model does not write."
    : talks ? "What can I help with?" : `${kind.question}.`;
  $("plain").hidden = !(talks && card.chat_template?.length === 0);
  $("other").hidden = Boolean(kind);
  draw();
}

const openSettings = setUpSettings(settings, () => current, async (changed) => {
  useKey(settings.key);
  if (current.messages.length) await keep(current);
  if (changed.has("key")) {
    await learn();
    if (card && current.messages.at(-1)?.role === "user") retry();
  }
}, async () => {
  for (const { conversation, stop } of running.values()) {
    conversation.deleted = true;
    stop.abort();
  }
  await store.clear();
  startNew();
});

// ---- What the reader does

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!card) await learn();
  if (!card) return;
  const text = $("text").value.trim(), sound = sounds.taken();
  const hears = card.input_modalities.includes("audio");
  const shown = modalities().includes("image") ? pictures.taken() : [];
  if (running.has(current.id) || (hears ? !sound : !text && !shown.length)) {
    if (hears && !sound) sounds.pick();
    return;
  }
  $("text").value = "";
  sounds.clear();
  pictures.clear();
  ask(text, sound, shown);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing) running.get(current.id)?.stop.abort();
  if (thread.sends(event)) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running.get(current.id)?.stop.abort());
$("new").addEventListener("click", startNew);
addEventListener("hashchange", () => here() !== current.id && open(here()));
addEventListener("popstate", () => here() !== current.id && open(here()));
addEventListener("pagehide", () => { for (const { conversation } of running.values()) keep(conversation); });
store.onChange(async (id) => {
  if (id === current.id && !running.has(id)) {
    const found = await store.load(id);
    if (found) Object.assign(current, found);
    draw();
  }
  drawList();
});

useKey(settings.key);
setUpNotice();
setUpSidebar();
pictures.setUpPictures(modalities);
sounds.setUpSounds(() => card?.input_modalities.includes("audio"));
$("base").textContent = new URL("v1", location.href.split("#")[0]).href;
await open(here());
if (!(await store.keeps())) notice("This browser keeps no conversations here: they end with this page.");
watch(learn);

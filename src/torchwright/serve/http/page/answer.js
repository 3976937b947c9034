// From a conversation to a request, and from its answer to a message: one way for each kind of model, by the paths that
// /v1/models lists for it.

import { ask, count, events, Refusal } from "./api.js";
import { part } from "./pictures.js";

// The messages that the model is sent: the system prompt, then those that were not left out. A question that got no
// answer is left out too, because many chat templates want the roles to alternate.
export async function sent({ system, messages, from }, first = from) {
  const asked = messages.slice(first).filter((message, at, all) =>
    message.role !== "user" || all[at + 1]?.role !== "user");
  const plain = await Promise.all(asked.map(async ({ role, content, reasoning, pictures }) => ({
    role, content: pictures ? await parts(pictures, content) : content,
    ...(reasoning ? { reasoning_content: reasoning } : {}),
  })));
  return system ? [{ role: "system", content: system }, ...plain] : plain;
}

async function parts(pictures, content) {
  const shown = await Promise.all(pictures.map(part));
  return content ? [...shown, { type: "text", text: content }] : shown;
}

function sampling(settings) {
  const chosen = {};
  if (settings.temperature !== "") chosen.temperature = Number(settings.temperature);
  if (settings.limit !== "") chosen.max_tokens = Number(settings.limit);
  return chosen;
}

async function text(path, body, signal, message, changed) {
  const begun = performance.now();
  let first = null, finish = null, usage = null;
  const response = await ask(path, { ...body, stream: true, stream_options: { include_usage: true } }, signal);
  for await (const event of events(response)) {
    usage = event.usage ?? usage;
    for (const { delta = {}, text: piece, finish_reason } of event.choices) {
      const words = delta.content ?? piece ?? "";
      finish = finish_reason ?? finish;
      if (!words && !delta.reasoning_content) continue;
      first ??= performance.now();
      if (delta.reasoning_content) {
        message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
        message.thought = (performance.now() - first) / 1000;
      }
      message.content += words;
      changed();
    }
  }
  if (!finish) throw new Refusal("The answer broke off.", "retry");
  const seconds = (performance.now() - (first ?? begun)) / 1000;
  message.cut = finish === "length";
  message.note = usage && `${usage.completion_tokens} tokens, ${(usage.completion_tokens / Math.max(seconds, 0.001))
    .toFixed(1)} a second, the first after ${(((first ?? begun) - begun) / 1000).toFixed(2)} s; the question had ${
    usage.prompt_tokens}, ${usage.prompt_tokens_details?.cached_tokens ?? 0} of them remembered`;
}

const lastQuestion = ({ messages }) => messages.findLast((message) => message.role === "user");

async function chat(conversation, settings, signal, message, changed) {
  // The message that is being written is no part of the question.
  const messages = await sent({ ...conversation, messages: conversation.messages.slice(0, -1) });
  await text("v1/chat/completions", { messages, ...sampling(settings) }, signal, message, changed);
}

async function complete(conversation, settings, signal, message, changed) {
  const prompt = lastQuestion(conversation).content;
  await text("v1/completions", { prompt, ...sampling(settings) }, signal, message, changed);
}

async function transcribe(conversation, settings, signal, message, changed) {
  const { sound, content } = lastQuestion(conversation);
  if (!sound) throw new Refusal("This page does not keep sound files. Choose the file again.", "none");
  const form = new FormData();
  form.append("file", sound, sound.name);
  form.append("stream", "true");
  if (content) form.append("prompt", content);
  let ended = false;
  for await (const event of events(await ask("v1/audio/transcriptions", form, signal))) {
    if (event.type === "transcript.text.delta") message.content += event.delta;
    if (event.type === "transcript.text.done") {
      message.content = event.text;
      ended = true;
    }
    changed();
  }
  if (!ended) throw new Refusal("The transcript broke off.", "retry");
  message.content ||= "*Nothing was said in it.*";
}

async function paint(conversation, settings, signal, message) {
  const response = await ask("v1/images/generations", { prompt: lastQuestion(conversation).content }, signal);
  const { data, notices = [] } = await response.json();
  const bytes = Uint8Array.from(atob(data[0].b64_json), (character) => character.charCodeAt(0));
  message.picture = new Blob([bytes], { type: "image/png" });
  message.note = [`seed ${data[0].seed}`, ...notices].join("; ");
}

// In the order in which a model's paths are looked through. `question` is what the box asks for.
const KINDS = [
  { path: "/v1/chat/completions", answer: chat, question: "Write a message" },
  { path: "/v1/completions", answer: complete, question: "Write a text" },
  { path: "/v1/audio/transcriptions", answer: transcribe, question: "Names to expect in it, if you like" },
  { path: "/v1/images/generations", answer: paint, question: "Describe a picture" },
];

// How a model is talked to on this page; undefined for one that embeds or classifies.
export const kindOf = (card) => KINDS.find(({ path }) => card.endpoints.includes(path));

// Move the beginning of what is sent forward to the first question from which the rest fits into the context, and return
// true; false if even the last question is too long by itself. A quarter of the context, or the limit of tokens that
// was set, is left for the answer.
export async function dropOld(conversation, settings, context) {
  const room = settings.limit === "" ? Math.floor(context / 4) : Number(settings.limit);
  const { messages } = conversation;
  const starts = messages.flatMap(({ role }, at) => role === "user" && at > conversation.from ? [at] : []);
  let low = 0, high = starts.length; // the first that fits is among them, or there is none
  while (low < high) {
    const middle = (low + high) >> 1;
    if (await count(await sent(conversation, starts[middle])) + room <= context) high = middle;
    else low = middle + 1;
  }
  // The last question alone may leave less room than that.
  if (low === starts.length && !(low && await count(await sent(conversation, starts[--low])) < context)) return false;
  conversation.from = starts[low];
  return true;
}

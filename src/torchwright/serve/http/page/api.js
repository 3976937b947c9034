// Requests to the server that this page came from, and its errors in a person's words. Addresses are relative, so that
// the page also works behind a proxy that puts it under a path.

// What the server, or the way to it, answered instead; `action` names what the page can offer: "key", "drop" or "retry".
export class Refusal extends Error {
  constructor(text, action = "retry", detail = "") {
    super(text);
    this.action = action;
    this.detail = detail;
  }
}

let key = "";

export function useKey(given) {
  key = given.trim();
}

// The response to a request; raises `Refusal`. An object as body is sent as JSON, a form as it is.
export async function ask(path, body = null, signal = null) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const form = body instanceof FormData;
  if (body && !form) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET", headers, signal, body: form || !body ? body : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    // A header with other characters than Latin-1 is refused by the browser itself.
    if (/[^\x20-\x7e]/.test(key)) throw new Refusal("The API key has characters that no key has. Enter it again.", "key");
    throw new Refusal("The server does not answer. Is it still running?", "retry", error.message);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const wait = response.headers.get("retry-after");
  const { message = "", code = "" } = (await response.json().catch(() => ({})))?.error ?? {};
  const later = wait ? ` Try again in ${wait} s.` : " Try again in a moment.";
  switch (response.status) {
    case 401: return new Refusal(/missing/.test(message)
      ? "This server asks for an API key." : "The server does not know this API key.", "key", message);
    case 413: return new Refusal("This is too long to be sent.", "none", message);
    case 429: return new Refusal(`The server has too much to do.${later}`, "retry", message);
    case 502: case 503: case 504: return new Refusal(`The model cannot answer now.${later}`, "retry", message);
    case 500: return new Refusal("The server made a mistake. Its log has the details.", "retry",
      `${message} (${response.headers.get("x-request-id") ?? "no request id"})`);
  }
  return wordsOf(message, code) ?? new Refusal(`The server answered ${response.status}.`, "retry");
}

function wordsOf(message, code) {
  if (code === "context_length_exceeded") {
    return new Refusal("The conversation is longer than the model can read.", "drop", message);
  }
  return message ? new Refusal(`${message[0].toUpperCase()}${message.slice(1).replace(/\.$/, "")}.`, "retry") : null;
}

// The server-sent events of a response, as objects; raises `Refusal` where the server says so, or the stream breaks off.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refusal("The connection was lost.", "retry", error.message);
    }
    if (piece.done) return;
    const parts = (held + piece.value).split(/\r?\n\r?\n/);
    held = parts.pop();
    for (const part of parts) {
      const line = part.split(/\r?\n/).find((text) => text.startsWith("data:"));
      const data = line?.slice(5).trim();
      if (!data || data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw wordsOf(event.error.message, event.error.code) ?? new Refusal("The answer broke off.");
      yield event;
    }
  }
}

// The served model's card, or null while the engine is not ready.
export async function card() {
  return (await (await ask("v1/models")).json()).data[0];
}

// How many tokens a conversation has as the model reads it.
export async function count(messages) {
  return (await (await ask("tokenize", { messages })).json()).count;
}

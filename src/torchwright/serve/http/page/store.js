// Conversations in this browser: IndexedDB, in two stores, so that the list needs no messages. Where the browser offers
// none (some private windows), they are in memory and end with the page.

const heads = "heads";   // id, title, updated
const bodies = "bodies"; // id, system, messages, from

let opening = null;
const memory = { [heads]: new Map(), [bodies]: new Map() };

function open() {
  opening ??= new Promise((resolve) => {
    let asked;
    try {
      asked = indexedDB.open("torchwright", 1);
    } catch {
      resolve(null);
      return;
    }
    asked.onupgradeneeded = () => {
      for (const name of [heads, bodies]) asked.result.createObjectStore(name, { keyPath: "id" });
    };
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = asked.onblocked = () => resolve(null);
  });
  return opening;
}

export const keeps = async () => (await open()) !== null;

// Run one transaction over both stores; the result is that of the request that `act` returns, once all is written.
async function transact(mode, act) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction([heads, bodies], mode);
    const asked = act(transaction.objectStore(heads), transaction.objectStore(bodies));
    transaction.oncomplete = () => resolve(asked?.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

// The heads of all conversations, the newest first.
export async function list() {
  const found = (await keeps())
    ? await transact("readonly", (titles) => titles.getAll())
    : [...memory[heads].values()];
  return found.sort((a, b) => b.updated - a.updated);
}

export async function load(id) {
  if (!(await keeps())) {
    return memory[bodies].has(id) ? { ...memory[bodies].get(id), ...memory[heads].get(id) } : null;
  }
  const body = await transact("readonly", (_, texts) => texts.get(id));
  const head = await transact("readonly", (titles) => titles.get(id));
  return body && head ? { ...body, ...head } : null;
}

// Sound files are not kept, because they are large; their names and transcripts are.
export async function save({ id, title, updated, system, messages, from }) {
  const head = { id, title, updated };
  const body = { id, system, messages: messages.map(({ sound, ...message }) => message), from };
  if (await keeps()) {
    await transact("readwrite", (titles, texts) => { titles.put(head); texts.put(body); });
  } else {
    memory[heads].set(id, head);
    memory[bodies].set(id, body);
  }
  changes?.postMessage(id);
}

export async function remove(id) {
  if (await keeps()) await transact("readwrite", (titles, texts) => { titles.delete(id); texts.delete(id); });
  for (const place of Object.values(memory)) place.delete(id);
  changes?.postMessage(id);
}

export async function clear() {
  if (await keeps()) await transact("readwrite", (titles, texts) => { titles.clear(); texts.clear(); });
  for (const place of Object.values(memory)) place.clear();
  changes?.postMessage(null);
}

// Other tabs of this page tell what they have changed.
const changes = "BroadcastChannel" in window ? new BroadcastChannel("torchwright") : null;

export function onChange(act) {
  if (changes) changes.onmessage = (event) => act(event.data);
}

const SETTINGS = "torchwright.settings";

// The key, the system prompt of new conversations, and how answers are sampled.
export function settings() {
  try {
    return { key: "", system: "", temperature: "", limit: "", ...JSON.parse(localStorage.getItem(SETTINGS) ?? "{}") };
  } catch {
    return { key: "", system: "", temperature: "", limit: "" };
  }
}

// True if they will be there after a reload.
export function saveSettings(values) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(values));
    return true;
  } catch {
    return false;
  }
}

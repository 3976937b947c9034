// What the server is doing: its state, and its figures while somebody can see them.

import { ask, Refusal } from "./api.js";
import { $ } from "./dom.js";

const EVERY = 1000; // ms between two looks

let last = null; // the figures of the last look, and when it was

// name → value of a Prometheus text, summed over labels; values by position are lists.
function parse(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^torchwright:(\w+)(\{[^}]*\})? (\S+)$/.exec(line);
    if (!match) continue;
    const [, name, labels = "", value] = match;
    const position = /\bposition="(\d+)"/.exec(labels)?.[1];
    if (position === undefined) found[name] = (found[name] || 0) + Number(value);
    else (found[name] ??= [])[Number(position)] = Number(value);
  }
  return found;
}

// The share of the proposals that were right, in all and at each position.
function acceptance(now, share) {
  const proposed = now.spec_decode_num_draft_tokens_per_pos_total ?? [];
  const accepted = now.spec_decode_num_accepted_tokens_per_pos_total ?? [];
  $("accepted").title = proposed.map((count, place) => `${place + 1}: ${share(accepted[place] ?? 0, count)}`).join("\n");
  return share(now.spec_decode_num_accepted_tokens_total, now.spec_decode_num_draft_tokens_total);
}

async function state() {
  const response = await fetch("health");
  const { status, detail, model } = await response.json();
  $("model").textContent = model;
  $("state").textContent = status === "ready" ? "ready" : detail;
  $("state").classList.toggle("trouble", status !== "ready");
  return status === "ready";
}

async function figures() {
  if (!$("figures").open || !$("figures").checkVisibility()) return;
  const now = { at: performance.now(), ...parse(await (await ask("metrics")).text()) };
  const rate = (name) => last ? Math.max(0, (now[name] - last[name]) / (now.at - last.at) * 1000) : 0;
  const share = (part, whole) => whole ? `${(100 * part / whole).toFixed(1)} %` : "–";
  $("rate").textContent = rate("generation_tokens_total").toFixed(1);
  $("prompt-rate").textContent = rate("prompt_tokens_total").toFixed(0);
  $("batch").textContent = `${now.num_requests_running} / ${now.num_requests_waiting}`;
  $("hits").textContent = share(now.prefix_cache_hits_total, now.prefix_cache_queries_total);
  $("accepted").textContent = acceptance(now, share);
  $("kv").textContent = share(now.kv_cache_usage_perc, 1);
  last = now;
}

// Look again and again while the page is in sight; `ready` is called whenever the server has come (back).
export async function watch(ready) {
  let was = false;
  for (;;) {
    if (!document.hidden) {
      try {
        const is = await state();
        if (is && !was) ready();
        was = is;
        if (is) await figures();
      } catch (error) {
        last = null;
        if (!(error instanceof Refusal && error.action === "key")) {
          was = false;
          $("state").textContent = "the server does not answer";
          $("state").classList.add("trouble");
        }
      }
    }
    await new Promise((resolve) => { setTimeout(resolve, EVERY); });
  }
}

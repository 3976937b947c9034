// Small helpers around the document. Text always becomes a text node: nothing here parses HTML.

export const $ = (id) => document.getElementById(id);

// An element with properties (or attributes, where no property has the name) and children; null children are left out.
export function el(tag, values = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(values)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export function button(text, act, values = {}) {
  return el("button", { type: "button", textContent: text, onclick: act, ...values });
}

// An icon of the page's sprite, for buttons that have a label of their own.
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const use = document.createElementNS(space, "use");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

// Copy a text and say so on the button. Pages of plain HTTP have no clipboard, but from this machine.
export async function copy(text, from) {
  let done = false;
  if (navigator.clipboard) {
    done = await navigator.clipboard.writeText(text).then(() => true, () => false);
  }
  if (!done) {
    const box = el("textarea", { value: text, className: "hidden-text", readOnly: true });
    document.body.append(box);
    box.select();
    done = document.execCommand("copy");
    box.remove();
    from.focus();
  }
  const label = (from.dataset.label ??= from.textContent);
  from.textContent = done ? "Copied" : "Could not copy";
  setTimeout(() => { from.textContent = label; }, 1500);
}

// crypto.randomUUID is not there on pages of plain HTTP.
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(36).padStart(2, "0")).join("");
}

let undone = null;

// Say what was done, with a button that takes it back; it stays until the next one, or until it is closed.
export function notice(text, undo = null) {
  undone = undo;
  $("notice-text").textContent = text;
  $("undo").hidden = !undo;
  $("notice").hidden = !text;
}

export function setUpNotice() {
  $("undo").addEventListener("click", () => {
    const act = undone;
    notice("");
    act?.();
  });
  $("notice-close").addEventListener("click", () => notice(""));
}

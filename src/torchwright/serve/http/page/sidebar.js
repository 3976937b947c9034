// The list of conversations, and the panel that it is in: beside the chat on a wide screen, over it on a narrow one.

import { $, button, el, icon } from "./dom.js";

const narrow = matchMedia("(max-width: 48rem)");

// `acts`: rename(id, title), remove(head). Opening one is a link, so that it has a place in the browser's history.
export function showList(heads, current, busy, acts) {
  if ($("list").querySelector("input")) return; // a name is being written: its end draws the list again
  const focused = document.activeElement?.closest?.("#list li")?.dataset.id;
  $("list").replaceChildren(...heads.map((head) => row(head, head.id === current, busy.has(head.id), acts)));
  $("no-conversations").hidden = heads.length > 0;
  if (focused) $("list").querySelector(`[data-id="${CSS.escape(focused)}"] a`)?.focus();
}

function row(head, current, busy, acts) {
  const link = el("a", { href: `#${head.id}`, textContent: head.title, title: head.title, className: busy ? "busy" : "" });
  if (current) link.setAttribute("aria-current", "page");
  const rename = button("", () => item.replaceChildren(renamer(head, acts)), { "aria-label": `Rename ${head.title}`,
    title: "Rename" });
  const remove = button("", () => acts.remove(head), { "aria-label": `Delete ${head.title}`, title: "Delete" });
  rename.append(icon("pencil"));
  remove.append(icon("bin"));
  const item = el("li", {}, link, rename, remove);
  item.dataset.id = head.id;
  return item;
}

function renamer(head, acts) {
  const box = el("input", { value: head.title, maxLength: 200, "aria-label": "New name" });
  let done = false;
  const end = (title) => {
    if (done) return;
    done = true;
    box.remove();
    acts.rename(head.id, title.trim() || head.title);
  };
  box.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Enter") end(box.value);
    if (event.key === "Escape") {
      event.stopPropagation();
      end(head.title);
    }
  });
  box.addEventListener("blur", () => end(box.value));
  requestAnimationFrame(() => box.select());
  return box;
}

export function setUpSidebar() {
  // On a narrow screen the panel is closed at first, and after each choice.
  const set = (open) => {
    document.body.classList.toggle("side-open", open);
    $("side-toggle").setAttribute("aria-expanded", String(open));
    $("main").inert = open && narrow.matches;
    $("shade").hidden = !(open && narrow.matches);
    if (open && narrow.matches) $("new").focus();
  };
  const close = (back) => {
    if (!narrow.matches || !document.body.classList.contains("side-open")) return;
    set(false);
    if (back) $("side-toggle").focus();
  };
  $("side-toggle").addEventListener("click", () => set(!document.body.classList.contains("side-open")));
  $("side-close").addEventListener("click", () => close(true));
  $("shade").addEventListener("click", () => close(true));
  $("side").addEventListener("keydown", (event) => event.key === "Escape" && close(true));
  $("list").addEventListener("click", (event) => event.target.closest("a") && close(false));
  $("new").addEventListener("click", () => close(false));
  narrow.addEventListener("change", () => set(!narrow.matches));
  set(!narrow.matches);
}

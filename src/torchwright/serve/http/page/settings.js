// The dialog of settings: they are taken over when it is closed, and cancelled by Escape.

import { $, notice } from "./dom.js";
import { saveSettings } from "./store.js";

const FIELDS = ["key", "system", "temperature", "limit"];

// Returns a function that opens the dialog, at a field if one is named. `conversation` gives the one in sight, whose
// system prompt is set together with that of new ones; `changed` is called with the names of what has changed.
export function setUpSettings(settings, conversation, changed, deleteAll) {
  const dialog = $("settings"), form = $("settings-form");
  const open = (field = "system") => {
    for (const name of FIELDS) form.elements[name].value = settings[name];
    if (conversation().messages.length) form.elements.system.value = conversation().system;
    dialog.returnValue = "";
    dialog.showModal();
    (form.elements[field].checkVisibility() ? form.elements[field] : form.elements.temperature).focus();
  };
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "delete") return void deleteAll();
    if (dialog.returnValue !== "save") return;
    const given = Object.fromEntries(FIELDS.map((name) => [name, form.elements[name].value.trim()]));
    const names = new Set(FIELDS.filter((name) => given[name] !== settings[name]));
    Object.assign(settings, given);
    conversation().system = given.system;
    if (!saveSettings(settings)) notice("This browser keeps no settings here: they end with this page.");
    changed(names);
  });
  $("settings-cancel").addEventListener("click", () => dialog.close(""));
  $("delete-all").addEventListener("click", () => {
    if (confirm("Delete all conversations in this browser? This cannot be undone.")) dialog.close("delete");
  });
  $("open-settings").addEventListener("click", () => open());
  return open;
}

// The sound file that goes with the next message, for models that hear: chosen, or dropped on the page.

import { $ } from "./dom.js";

let sound = null;

export const taken = () => sound;
export const pick = () => $("sound").click();

export function clear() {
  $("sound").value = "";
  take(null);
}

function take(file) {
  sound = file;
  $("sound-name").textContent = file ? file.name : "";
  $("sound-drop").hidden = !file;
  $("sound-pick").textContent = file ? "Another file" : "Choose a sound file";
}

export function setUpSounds(hears) {
  $("sound-pick").addEventListener("click", pick);
  $("sound").addEventListener("change", () => $("sound").files[0] && take($("sound").files[0]));
  $("sound-drop").addEventListener("click", clear);
  addEventListener("dragover", (event) => hears() && event.preventDefault());
  addEventListener("drop", (event) => {
    if (!hears()) return;
    event.preventDefault();
    if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
  });
}


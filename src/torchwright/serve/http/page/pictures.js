// The pictures that go with the next message, for models that see: chosen, pasted, or dropped on the page.

import { $, el, icon, notice } from "./dom.js";

const LONGEST = 2048; // pixels of a side: a larger picture is scaled down before it is kept and sent
const SENT = ["image/png", "image/jpeg", "image/webp"];
let pictures = [];

export const taken = () => pictures;
export const clear = () => show([]);

function show(found) {
  for (const image of $("pictures").querySelectorAll("img")) URL.revokeObjectURL(image.src);
  pictures = found;
  $("picture").value = "";
  $("pictures").hidden = !found.length;
  $("pictures").replaceChildren(...found.map((picture) => {
    const drop = el("button", { type: "button", className: "round", "aria-label": "Take the picture away" }, icon("close"));
    drop.addEventListener("click", () => show(pictures.filter((other) => other !== picture)));
    return el("li", {}, el("img", { src: URL.createObjectURL(picture), alt: picture.name ?? "Picture" }), drop);
  }));
}

async function take(files) {
  const chosen = [...files].filter((file) => file.type.startsWith("image/"));
  const found = await Promise.all(chosen.map((file) => scaled(file).catch(() => null)));
  if (found.includes(null)) notice("This browser cannot read the picture.");
  show([...pictures, ...found.filter(Boolean)]);
}

// The file itself, or a picture of bounded size in a form that the server reads.
async function scaled(file) {
  const picture = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST / Math.max(picture.width, picture.height));
  if (scale === 1 && SENT.includes(file.type)) return file;
  const canvas = new OffscreenCanvas(Math.ceil(scale * picture.width), Math.ceil(scale * picture.height));
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.convertToBlob({ type: file.type === "image/jpeg" ? "image/jpeg" : "image/png", quality: .9 });
}

// A picture as requests bring it.
export function asUrl(picture) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(picture);
  });
}

export function setUpPictures(sees) {
  $("picture-pick").addEventListener("click", () => $("picture").click());
  $("picture").addEventListener("change", () => take($("picture").files));
  $("text").addEventListener("paste", (event) => {
    if (!sees() || !event.clipboardData.files.length) return;
    event.preventDefault();
    take(event.clipboardData.files);
  });
  addEventListener("dragover", (event) => sees() && event.preventDefault());
  addEventListener("drop", (event) => {
    if (!sees()) return;
    event.preventDefault();
    take(event.dataTransfer.files);
  });
}

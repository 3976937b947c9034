// The pictures and videos that go with the next message, for models that see: chosen, pasted, or dropped on the page.

import { $, el, icon, notice } from "./dom.js";

const LONGEST = 2048; // pixels of a side: a larger picture is scaled down before it is kept and sent
const SENT = ["image/png", "image/jpeg", "image/webp"];
const MIB = 1 << 20;
// What the server takes in one request (limits.py); it checks frames and pixels itself.
const MOST_PICTURES = 64; // and videos
const MOST_VIDEOS = 4;
const MOST_VIDEO_MIB = 20;
let pictures = [];
let modalities = () => []; // of the served model

export const taken = () => pictures;
export const clear = () => show([]);

function show(found) {
  for (const shown of $("pictures").querySelectorAll("img, video")) URL.revokeObjectURL(shown.src);
  pictures = found;
  $("picture").value = "";
  $("pictures").hidden = !found.length;
  $("pictures").replaceChildren(...found.map((picture) => {
    const label = `Take the ${isVideo(picture) ? "video" : "picture"} away`;
    const drop = el("button", { type: "button", className: "round", "aria-label": label }, icon("close"));
    drop.addEventListener("click", () => show(pictures.filter((other) => other !== picture)));
    return el("li", {}, node(picture, URL.createObjectURL(picture)), drop);
  }));
}

export const isVideo = (file) => file.type.startsWith("video/");

// A picture or video on the page; `more` are properties of a video.
export const node = (file, src, more = {}) => isVideo(file)
  ? el("video", { src, preload: "metadata", "aria-label": file.name ?? "Video", ...more })
  : el("img", { src, alt: file.name ?? "Picture" });

async function take(files) {
  const kinds = ["image", "video"].filter((kind) => modalities().includes(kind));
  const chosen = [...files].filter(({ type }) => kinds.includes(type.split("/")[0]));
  const whole = chosen.filter((file) => !isVideo(file) || file.size <= MOST_VIDEO_MIB * MIB);
  if (whole.length < chosen.length) notice(`A video may have ${MOST_VIDEO_MIB} MiB.`);
  const found = await Promise.all(whole.map((file) => isVideo(file) ? file : scaled(file).catch(() => null)));
  if (found.includes(null)) notice("This browser cannot read the picture.");
  const all = [...pictures, ...found.filter(Boolean)];
  if (all.length <= MOST_PICTURES && all.filter(isVideo).length <= MOST_VIDEOS) return show(all);
  notice(`A message may have ${MOST_PICTURES} pictures and videos, ${MOST_VIDEOS} videos among them.`);
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

// A picture or video as a part of a request's message.
export async function part(file) {
  const kind = isVideo(file) ? "video_url" : "image_url";
  return { type: kind, [kind]: { url: await asUrl(file) } };
}

function asUrl(picture) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(picture);
  });
}

// Offer what the served model takes.
export function offer() {
  const moves = modalities().includes("video");
  const label = moves ? "Add pictures or videos" : "Add pictures";
  $("picture").accept = moves ? "image/*,video/*" : "image/*";
  $("picture-pick").title = label;
  $("picture-pick").setAttribute("aria-label", label);
  $("picture-pick").hidden = !modalities().includes("image");
}

// `takes` returns the served model's modalities.
export function setUpPictures(takes) {
  modalities = takes;
  const sees = () => modalities().includes("image");
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

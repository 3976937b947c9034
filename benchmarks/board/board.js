"use strict";
// Shows the lines and trends that every filter allows, and the columns of the chosen technique.
const form = document.getElementById("filter");
const head = document.querySelector(".board thead tr");
const FIXED = 2; // the workload and the device
const count = document.getElementById("count");

function apply() {
  const wanted = Object.fromEntries(new FormData(form));
  const words = wanted.workload.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const item of document.querySelectorAll("[data-workload]")) {
    const has = item.dataset;
    const visible =
      (!wanted.device || has.device === wanted.device) &&
      (!wanted.verdict || has.verdict === wanted.verdict) &&
      (!wanted.technique || JSON.parse(has.techniques).includes(wanted.technique)) &&
      words.every((word) => has.workload.toLowerCase().includes(word));
    item.hidden = !visible;
    shown += visible && item.tagName === "TR";
  }
  for (const row of document.querySelectorAll(".board tr")) {
    for (const cell of Array.from(row.cells).slice(FIXED)) {
      const column = head.cells[cell.cellIndex].textContent;
      cell.hidden = Boolean(wanted.technique) && column !== wanted.technique;
    }
  }
  count.textContent = `${shown} lines`;
}

form.hidden = false;
form.addEventListener("input", apply);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(apply));
apply();

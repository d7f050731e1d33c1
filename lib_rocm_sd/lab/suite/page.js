"use strict";
// Sorts, filters and compares the rows of the table; without it the table stands as it was written.
const table = document.querySelector("#rows");
const body = table.tBodies[0];
const rows = [...body.rows];
const SPEED = 3;  // the column of the percentages
const choices = Object.fromEntries(["card", "workload", "way", "base"].map((id) => [id, document.getElementById(id)]));

function compare() {
  const base = rows[Number(choices.base.value)];
  for (const row of rows) {
    row.classList.toggle("base", row === base);
    const alike = base && base.dataset.alike.split(" ").includes(row.dataset.run);
    const same = alike && row.dataset.workload === base.dataset.workload;
    const percent = same ? (100 * base.dataset.seconds) / row.dataset.seconds : NaN;
    row.cells[SPEED].textContent = same ? `${percent.toFixed(0)} %` : "";
    row.cells[SPEED].dataset.value = same ? percent : "";
  }
}

function filter() {
  for (const row of rows) {
    row.hidden = ["card", "workload", "way"].some((id) => choices[id].value && row.dataset[id] !== choices[id].value);
  }
}

function sort(head) {
  const column = head.cellIndex;
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const valueOf = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const inOrder = [...rows].sort((one, other) => {
    const [a, b] = [valueOf(one), valueOf(other)];
    if (a === "" || b === "") return (a === "") - (b === "");  // what was not measured stays last
    const numbers = head.classList.contains("text") ? a.localeCompare(b) : a - b;
    return up ? numbers : -numbers;
  });
  body.append(...inOrder);
}

for (const id of ["card", "workload", "way"]) choices[id].addEventListener("change", filter);
choices.base.addEventListener("change", compare);
for (const button of table.querySelectorAll("th button")) {
  button.addEventListener("click", () => sort(button.parentNode));
}
document.querySelector(".choices").hidden = false;
compare();

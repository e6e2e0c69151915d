"use strict";
// Tables are sorted by their heads. The pages say all they have to say without.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const key = (row, column) => {
    const cell = row.cells[column];
    const exact = cell.querySelector("data");
    const text = exact ? exact.value : cell.textContent.replaceAll(",", "");
    return text !== "" && Number.isFinite(Number(text)) ? Number(text) : cell.textContent;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
  for (const button of table.tHead.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const now = head.getAttribute("aria-sort");
      const down = now === "none" ? head.classList.contains("n") : now === "ascending";
      for (const other of table.tHead.querySelectorAll("th")) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = Array.from(body.rows, (row) => [key(row, head.cellIndex), row]);
      rows.sort((a, b) => (down ? compare(b[0], a[0]) : compare(a[0], b[0])));
      body.append(...rows.map(([, row]) => row));
    });
  }
}

"use strict";
// Sorting and filtering the table of tensors, and reading the heat map cell by cell. The page says
// all it has to say without.
{
  const table = document.getElementById("tensors");
  const body = table.tBodies[0];
  const key = (row, column) => {
    const cell = row.cells[column];
    const exact = cell.querySelector("data");
    return exact ? (exact.value === "" ? -1 : Number(exact.value)) : cell.textContent;
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number"
      ? a - b
      : String(a).localeCompare(String(b), "en", { numeric: true });
  for (const button of table.tHead.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const numbers = head.classList.contains("n");
      const now = head.getAttribute("aria-sort");
      const down = now === "none" ? numbers : now === "ascending";
      for (const other of table.tHead.querySelectorAll("th"))
        other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = Array.from(body.rows, (row) => [key(row, head.cellIndex), row]);
      rows.sort((a, b) => (down ? compare(b[0], a[0]) : compare(a[0], b[0])));
      body.append(...rows.map(([, row]) => row));
    });
  }
  const filter = document.getElementById("filter");
  const shown = document.getElementById("shown");
  filter.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase();
    let n = 0;
    for (const row of body.rows) {
      row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
      n += row.hidden ? 0 : 1;
    }
    shown.textContent = wanted ? `${n} of ${body.rows.length} shown` : "";
  });
}
const heat = document.getElementById("heat");
if (heat) {
  const {
    source_hosts: writers,
    target_hosts: readers,
    bytes,
  } = JSON.parse(document.getElementById("flow").textContent);
  const cursor = heat.querySelector(".cursor");
  const cell = document.getElementById("cell");
  const hosts = ([first, stop]) =>
    stop - first === 1 ? `host ${first}` : `hosts ${first}–${stop - 1}`;
  const size = (n) => {
    let unit = 0;
    for (; n >= 1000 && unit < 4; unit++) n /= 1024;
    return `${n.toFixed(unit && n < 100 ? 1 : 0).replace(/\.0$/, "")} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
  };
  let row = 0;
  let column = 0;
  const show = (i, j) => {
    row = Math.min(Math.max(i, 0), writers.length - 1);
    column = Math.min(Math.max(j, 0), readers.length - 1);
    cursor.setAttribute("x", column);
    cursor.setAttribute("y", row);
    cursor.setAttribute("visibility", "visible");
    cell.textContent = `${hosts(writers[row])} → ${hosts(readers[column])}: ${size(bytes[row][column])}`;
  };
  heat.addEventListener("pointermove", (event) => {
    const box = heat.getBoundingClientRect();
    show(
      Math.floor(((event.clientY - box.top) / box.height) * writers.length),
      Math.floor(((event.clientX - box.left) / box.width) * readers.length),
    );
  });
  heat.addEventListener("focus", () => show(row, column));
  heat.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[
      event.key
    ];
    if (!step) return;
    event.preventDefault();
    show(row + step[0], column + step[1]);
  });
}

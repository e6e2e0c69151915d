"use strict";
// Tables are sorted by their heads, and jobs are followed. The pages say all they have to say
// without.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const key = (row, column) => {
    const cell = row.cells[column];
    const exact = cell.querySelector("data");
    const text = exact ? exact.value : cell.textContent.replaceAll(",", "");
    return text !== "" && Number.isFinite(Number(text)) ? Number(text) : cell.textContent;
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number"
      ? a - b
      : String(a).localeCompare(String(b), "en", { numeric: true });
  for (const button of table.tHead.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const now = head.getAttribute("aria-sort");
      const down = now === "none" ? head.classList.contains("n") : now === "ascending";
      for (const other of table.tHead.querySelectorAll("th"))
        other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = Array.from(body.rows, (row) => [key(row, head.cellIndex), row]);
      rows.sort((a, b) => (down ? compare(b[0], a[0]) : compare(a[0], b[0])));
      body.append(...rows.map(([, row]) => row));
    });
  }
}
// Jobs that are not over are followed: one by its events, those of a list by asking from time to
// time.
const over = (job) => ["done", "failed", "cancelled"].includes(job.state);
const show = (job) => {
  for (const one of document.querySelectorAll(`[data-job="${Number(job.number)}"]`)) {
    const share = job.total ? `${Math.floor((100 * job.done) / job.total)} %` : "";
    if (one.matches("progress")) {
      one.hidden = job.state !== "running";
      if (job.total) [one.max, one.value] = [job.total, job.done];
    } else if (one.matches(".percent")) {
      one.textContent = share;
    } else {
      const words =
        job.state +
        (job.state === "running" && job.cancelling ? ", is being cancelled" : "") +
        (job.waits_for ? `: ${job.waits_for}` : "") +
        (job.found_damage ? ", found damage" : "");
      if (one.textContent !== words) one.textContent = words;
      one.className = `state mark-${job.found_damage ? "unreadable" : job.state}`;
    }
  }
};
const followed = document.querySelector("[data-events]");
if (followed) {
  const hint = document.getElementById("follow");
  const words = hint.textContent;
  const events = new EventSource(followed.dataset.events);
  events.addEventListener("open", () => {
    hint.textContent = "This page follows the job.";
  });
  events.addEventListener("error", () => {
    hint.textContent = words;
  });
  events.addEventListener("job", (event) => {
    const job = JSON.parse(event.data);
    show(job);
    if (over(job)) {
      events.close();
      location.reload();
    }
  });
} else {
  const MOST = 6;
  const ask = async () => {
    // The oldest one runs first.
    const queued = [...document.querySelectorAll(".state.mark-queued[data-job]")].reverse();
    const marks = [...document.querySelectorAll(".state.mark-running[data-job]"), ...queued].slice(
      0,
      document.hidden ? 0 : MOST,
    );
    try {
      for (const mark of marks) {
        const reply = await fetch(
          `${document.documentElement.dataset.prefix ?? ""}/v1/jobs/${mark.dataset.job}`,
        );
        if (reply.ok) show(await reply.json());
      }
    } catch {} // the service is being started again
    if (document.querySelector(".state:is(.mark-running, .mark-queued)[data-job]"))
      setTimeout(ask, 2000);
  };
  ask();
}

// The list of jobs.
import { api, ask, bytes, cell, duration, el, jobDoes, jobPath, listTable, loss, perSecond, present, renew, repeat, say, sayAgain, setText, statePill, whole } from "./dom.js";

const COLUMNS = ["Job", "State", "Task", "Mode", "Workers", "Version", "Versions", "Loss", "Last change", "Age", "Model"];

export function showJobs(page) {
  const list = el("tbody");
  const table = listTable("", COLUMNS, list);
  table.hidden = true;
  const none = el("p.card.none", { hidden: true }, "This server has no jobs. Start one: ", el("code", {}, "kvps up digits"));
  page.replaceChildren(el("h1", {}, "Jobs"), none, table);
  repeat(async () => {
    try {
      const jobs = await ask(api("/jobs"));
      none.hidden = jobs.length > 0;
      table.hidden = jobs.length === 0;
      update(list, jobs);
      say("");
    } catch (error) {
      sayAgain(error.message);
    }
  }, 1500);
}

function update(list, jobs) {
  renew(list, jobs.map((job) => job.job), () => jobs.map(() => el("tr")));
  jobs.forEach((job, i) => renew(list.children[i], job, () => cells(job)));
  setText(document.querySelector("h1"), jobs.length ? `Jobs (${jobs.length})` : "Jobs");
}

function cells(job) {
  const name = el("a", { href: jobPath(job.job) }, job.job);
  const state = cell("State", statePill(job.state, jobDoes(job)));
  if (job.reason) return [el("th", { scope: "row" }, name), state, el("td.reason", { colspan: COLUMNS.length - 2 }, job.reason)];
  return [
    el("th", { scope: "row" }, name),
    state,
    cell("Task", job.task || "made in Python"),
    cell("Mode", job.mode),
    cell("Workers", present(job.state, job.active, job.workers)),
    cell("Version", whole(job.version)),
    cell("Versions", perSecond(job.commits_per_s)),
    cell("Loss", loss(job.loss)),
    cell("Last change", job.silent_s < 1 ? "just now" : `${duration(1000 * job.silent_s)} ago`),
    cell("Age", duration(1000 * job.age_s)),
    cell("Model", bytes(job.model_bytes)),
  ];
}

// Shows what the path names.
import { ask, el, jobPath, say, setText, workerPath } from "./dom.js";
import { showJob } from "./job.js";
import { showJobs } from "./jobs.js";
import { showLog } from "./log.js";
import { showWorker } from "./worker.js";

const page = document.getElementById("page");
const names = location.pathname.split("/").filter(Boolean).map(decoded);
const path = document.getElementById("path");

/** A part of a path; as it is where it is not in UTF-8, so that the server can say that there is no such job. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function crumb(text, href) {
  path.append(el("span.muted", { "aria-hidden": "true" }, "/"), el("a", { href }, text));
}

const [, job, what, worker] = names;
if (!job) {
  document.title = "Jobs · kvps";
  showJobs(page);
} else {
  crumb(job, jobPath(job));
  if (what === "log") {
    crumb("log", `${jobPath(job)}/log`);
    document.title = `Log of ${job} · kvps`;
    showLog(page, job);
  } else if (what === "workers") {
    crumb(worker, workerPath(job, worker));
    document.title = `${worker} of ${job} · kvps`;
    showWorker(page, job, worker);
  } else {
    document.title = `${job} · kvps`;
    showJob(page, job);
  }
}
path.lastElementChild.setAttribute("aria-current", "page");

ask("/api/server").then(
  (found) => setText(document.getElementById("server"), found.server),
  (error) => say(error.message),
);

// What has happened to a job, as a person reads it.
import { clock, day, el, plural, whole, workerPath } from "./dom.js";

const SHOWN = 24; // contributions of a version, before one asks for the rest

let near = Infinity;

/** Say which bound the job has: a staleness near to what that allows is coloured. While a worker does a round, each of
 *  the others can commit 2s + 1, because nobody is more than s rounds from the slowest. */
export function setBound(staleness, workers) {
  near = staleness < 0 ? Infinity : 0.75 * (2 * staleness + 1) * Math.max(1, workers - 1);
}

/** One event as a line, with its contributions below if it is a version. `contributions` are all, or the first few. */
export function eventNode(job, event, whole_ = false) {
  const time = el("time", { title: `${day(event.at_ms)} ${clock(event.at_ms, true)}` }, clock(event.at_ms, true));
  return el(`li.event.${event.event}`, {}, time, el("span.kind", {}, event.event), el("div.facts", {}, ...facts(job, event, whole_)));
}

const name = (job, worker) => el("a", { href: workerPath(job, worker) }, worker);

function facts(job, event, whole_) {
  switch (event.event) {
    case "commit":
      return commit(job, event, whole_);
    case "create":
      return [`version ${whole(event.version)}`];
    case "restore":
      return [`version ${whole(event.version)}, from a checkpoint of job ${event.job}`];
    case "join":
      return [name(job, event.worker), `, rank ${whole(event.rank)}, clock ${whole(event.clock)}`];
    case "leave":
      return [name(job, event.worker)];
    case "evict":
      return [name(job, event.worker), event.reason ? `: ${event.reason}` : ""];
    case "reject":
      return [name(job, event.worker), ` round ${whole(event.round)}: ${event.reason}`];
    case "backup":
      return [`unit ${whole(event.unit)} to `, name(job, event.worker), " too: ", name(job, event.of), ` has had it for ${(event.out_ms / 1000).toFixed(2)} s`];
    case "duplicate":
      return [`unit ${whole(event.unit)} of `, name(job, event.worker), ": another worker had pushed it before"];
    case "recover":
      return [`version ${whole(event.version)}: the server has lost ${plural(event.lost, "version")}`];
    case "take":
      return [`shard ${event.shard} by ${event.holder} (term ${whole(event.term)})`];
    case "release":
      return [`by ${event.holder} (term ${event.term})`];
    case "evaluate":
      return [`version ${whole(event.version)}: ${figures(event.figures)}, by ${event.by}`];
    case "pause":
    case "resume":
    case "suspend":
    case "stop":
      return [asked(event)];
    case "set":
      return [[event.lr === null ? "the optimizer's own learning rate" : `learning rate ${event.lr}`, asked(event)].filter(Boolean).join(", ")];
    case "adopt":
      return [`by ${event.by}`];
    case "stale":
      return [`${plural(event.items, "item")}, too old after version ${whole(event.version)}${event.then === "again" ? ": the prompts are handed out again" : ""}`];
    case "rejected":
      return [`${plural(event.items, "item")} after version ${whole(event.version)}: ${event.reason}`];
    case "gone":
      return [`actor ${event.actor}: ${event.reason}`];
    case "scale":
      return [`from ${whole(event.before)} to ${plural(event.workers, "worker")}`];
    default:
      return [];
  }
}

/** Who asked for what happened, and why. */
const asked = (event) => [event.round ? `all workers end with round ${whole(event.round)}` : "", event.by && `by ${event.by}`, event.reason].filter(Boolean).join(", ");

/** Figures of an evaluation; one that is no finite number comes as null. */
const figures = (all) => Object.entries(all).map(([each, value]) => `${each} ${value === null ? "not finite" : Number(value.toPrecision(6))}`).join(", ");

function commit(job, event, whole_) {
  const counted = event.contributions;
  const number = event.contributions_in_all ?? counted.length;
  const title = el("b", {}, `version ${whole(event.version)}`);
  const on = event.trained ? `, trained on ${plural(event.trained, "item")}` : "";
  if (event.by) return [title, el("span.muted", {}, ` published by ${event.by}${event.loss === null ? "" : `, loss ${Number(event.loss.toPrecision(6))}`}${on}`)];
  const said = [title, el("span.muted", {}, ` ${number ? plural(number, "contribution") : "no contribution"}`)];
  const chips = el("div.chips", {}, ...counted.slice(0, whole_ ? SHOWN : 4).map((each) => chip(job, each)));
  const left = number - Math.min(counted.length, whole_ ? SHOWN : 4);
  if (left > 0) {
    const more = whole_
      ? el("button.quiet", { type: "button", onclick: () => more.replaceWith(...counted.slice(SHOWN).map((c) => chip(job, c))) }, `${whole(left)} more`)
      : el("span.muted", {}, `and ${whole(left)} more`);
    chips.append(more);
  }
  const out = event.rejected ?? [];
  if (out.length) chips.append(el("span.muted", {}, "without"), ...out.map((each) => chip(job, each)));
  return number || out.length ? [...said, chips] : said;
}

function chip(job, c) {
  const said = [c.unit === null ? `round ${whole(c.round)}` : `unit ${whole(c.unit)}`];
  if (c.part) said.push(`part ${c.part}`);
  if (!c.weight) said.push("counts as zeros");
  else if (c.weight !== 1) said.push(`weight ${whole(c.weight)}`);
  if (c.staleness) said.push(`staleness ${whole(c.staleness)}`);
  return el(`span.chip${c.staleness >= near ? ".stale" : ""}`, { title: `computed on version ${whole(c.base)}` }, name(job, c.worker), ` ${said.join(" · ")}`);
}

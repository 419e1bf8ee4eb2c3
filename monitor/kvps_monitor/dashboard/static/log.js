// All that has happened to a job, newest first, with every contribution of each version.
import { api, ask, day, el, jobPath, repeat, say, sayAgain } from "./dom.js";
import { eventNode, setBound } from "./events.js";

const COUNT = 40;
const MOST = 2000; // events in the page
const KINDS = { "all events": "", versions: "commit", "workers that came or went": "join,leave,evict", "backup tasks": "backup,duplicate", evaluations: "evaluate", "what went wrong": "evict,reject,recover,stale,rejected,gone", aggregators: "take,release" };

export function showLog(page, job) {
  const list = el("ol.log");
  const older = el("button", { type: "button", hidden: true, onclick: () => more() }, "Show older");
  const end = el("p.muted", { hidden: true }, "This is the beginning of what Redis has. An aggregator that writes checkpoints keeps the older part in a file beside them.");
  const kinds = el("select", { "aria-label": "Which events", onchange: () => again() }, ...Object.entries(KINDS).map(([text, value]) => el("option", { value }, text)));
  page.replaceChildren(el("div.heading", {}, el("h1", {}, "Log"), kinds), list, older, end);
  // Before any event is shown: its colour depends on the bound. Of a job that cannot be read, the log says why.
  const bound = ask(api(jobPath(job))).then((found) => setBound(found.staleness, found.expected_workers), () => {});
  let newest = "";
  let before = "";
  let shown = 0;

  const url = (from) => `${api(jobPath(job))}/log?count=${COUNT}&kinds=${kinds.value}${from ? `&before=${from}` : ""}`;
  const dated = (event, above) => {
    const nodes = [];
    if (above !== day(event.at_ms)) nodes.push(el("li.day", {}, day(event.at_ms)));
    return [...nodes, eventNode(job, event, true)];
  };
  let lastDay = "";

  function append(found) {
    for (const event of found.events) {
      list.append(...dated(event, lastDay));
      lastDay = day(event.at_ms);
    }
    shown += found.events.length;
    before = found.before;
    older.hidden = !before || shown >= MOST;
    end.hidden = Boolean(before);
  }

  async function more() {
    older.disabled = true;
    try {
      append(await ask(url(before)));
    } catch (error) {
      say(error.message);
    } finally {
      older.disabled = false;
    }
  }

  async function again() {
    newest = "";
    await look();
  }

  async function look() {
    const chosen = kinds.value;
    try {
      await bound;
      const found = await ask(url(""));
      if (chosen !== kinds.value) return; // this answer is to an earlier question
      say("");
      const known = found.events.findIndex((event) => event.id === newest);
      if (newest === "" || known < 0 || shown > MOST) {
        list.replaceChildren();
        [lastDay, shown] = ["", 0];
        newest = "";
        append(found);
      } else {
        const first = list.firstElementChild; // the day of what was newest
        for (const event of found.events.slice(0, known)) {
          list.insertBefore(eventNode(job, event, true), mark(list, first));
        }
        shown += known;
      }
      newest = found.events[0]?.id ?? "";
      marked = null;
    } catch (error) {
      sayAgain(error.message);
    }
  }
  repeat(look, 1000);

  let marked = null;
  /** Where new events of one answer go: below the day, above what was newest. */
  function mark(within, heading) {
    marked ??= heading?.classList.contains("day") ? heading.nextElementSibling : within.firstElementChild;
    return marked;
  }
}

// All that has happened to a job, newest first, with every contribution of each version.
import { api, ask, day, el, jobPath, repeat, say, sayAgain } from "./dom.js";
import { eventNode } from "./events.js";

const COUNT = 40;
const MOST = 2000; // events in the page

export function showLog(page, job) {
  const list = el("ol.log");
  const older = el("button", { type: "button", hidden: true, onclick: () => more() }, "Show older");
  const end = el("p.muted", { hidden: true }, "This is the beginning of what Redis has. An aggregator that writes checkpoints keeps the older part in a file beside them.");
  page.replaceChildren(el("h1", {}, "Log"), list, older, end);
  let newest = "";
  let before = "";
  let shown = 0;

  const url = (from) => `${api(jobPath(job))}/log?count=${COUNT}${from ? `&before=${from}` : ""}`;
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

  repeat(async () => {
    try {
      const found = await ask(url(""));
      say("");
      const known = found.events.findIndex((event) => event.id === newest);
      if (newest === "" || known < 0 || shown > MOST) {
        list.replaceChildren();
        [lastDay, shown] = ["", 0];
        append(found);
      } else {
        const first = list.firstElementChild; // the day of what was newest
        for (const event of found.events.slice(0, known)) {
          const node = eventNode(job, event, true);
          (list.insertBefore(node, mark(list, first)));
        }
        shown += known;
      }
      newest = found.events[0]?.id ?? "";
      marked = null;
    } catch (error) {
      sayAgain(error.message);
    }
  }, 1000);

  let marked = null;
  /** Where new events of one answer go: below the day, above what was newest. */
  function mark(within, heading) {
    marked ??= heading?.classList.contains("day") ? heading.nextElementSibling : within.firstElementChild;
    return marked;
  }
}

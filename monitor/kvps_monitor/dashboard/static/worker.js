// One worker: what it does, its phases, losses, iterations, and what the log says of it.
import { api, ask, bytes, cell, clock, duration, el, jobPath, listTable, loss, renew, repeat, setText, statePill, whole, workerPath } from "./dom.js";
import { Axis } from "./axes.js";
import { Chart } from "./charts.js";
import { eventNode, setBound } from "./events.js";
import { JobStream } from "./stream.js";
import { about, Tiles } from "./tiles.js";
import { phaseBar } from "./phases.js";
import { PHASE_WORDS } from "./words.js";

const ROWS = 30;
const COLUMNS = ["Began", "Round", "On version", "Loss", "Took", "Phases", "Pulled", "Pushed"];

export function showWorker(page, job, worker) {
  const state = el("span");
  const more = el("span.muted");
  const where = el("p.muted");
  const tiles = new Tiles(["Rounds pushed", "Committed", "Clock", "Behind", "Staleness", "Loss", "A round takes", "Pulls", "Pushes"]);
  const shares = phaseBar("tall");
  const legend = el("span.legend");
  const rounds = new Axis("round");
  const losses = new Chart("Loss by round", { lines: [{ label: "loss", colour: "compute", value: loss }] });
  const times = new Chart("Milliseconds of a round", {
    lines: [
      { label: "whole", colour: "compute", value: duration },
      { label: "waits", colour: "wait", value: duration },
    ],
  });
  const rows = el("tbody");
  const history = el("ol.log");
  page.replaceChildren(
    el("div.heading", {}, el("h1", {}, worker), state, more),
    where,
    tiles.node,
    el("section.card", {}, el("h2", {}, "Where its time goes"), shares.node, legend),
    el("div.charts", {}, losses.node, times.node),
    el("section.card", {}, el("h2", {}, "Last rounds"), el("div.wide-table", {}, listTable(".small", COLUMNS, rows))),
    el("section.card", {}, el("div.title", {}, el("h2", {}, "History"), el("a", { href: `${jobPath(job)}/log` }, "Log of the job")), history),
  );

  const stream = new JobStream(
    job,
    () => {
      const w = stream.workers[0];
      setBound(stream.facts.staleness, stream.facts.expected_workers);
      if (!w) {
        setText(where, "The job has no worker of this name.");
        return;
      }
      renew(state, w.state, () => [statePill(w.state)]);
      setText(more, about(w, stream.nowMs));
      setText(where, [`rank ${w.rank}`, w.host && `process ${w.pid} on ${w.host}`, w.device].filter(Boolean).join(" · "));
      tiles.set({
        "Rounds pushed": whole(w.pushed),
        Committed: whole(w.committed),
        Clock: whole(w.clock),
        Behind: whole(w.behind),
        Staleness: whole(w.staleness),
        Loss: loss(w.loss),
        "A round takes": duration(w.round_ms),
        Pulls: `${bytes(w.pulled_per_s)}/s`,
        Pushes: `${bytes(w.pushed_per_s)}/s`,
      });
      const names = stream.phases.worker;
      shares.fill(names, w.shares);
      legend.replaceChildren(...names.map((name, i) => el("span", {}, el(`i.swatch.${name}`), `${PHASE_WORDS[name]} `, el("b", {}, `${Math.round(100 * (w.shares[i] ?? 0))} %`))));
    },
    worker,
  );

  repeat(async () => {
    const found = await ask(api(workerPath(job, worker))).catch(() => null);
    if (!found?.iterations.length) return;
    const made = () => found.iterations.slice(0, ROWS).map((each) => row(each, found.phases));
    if (!renew(rows, found.iterations[0], made)) return;
    losses.draw("losses", { losses: new Map(found.iterations.map((each) => [each.round, [each.loss]])) }, null, rounds);
    const wait = found.phases.indexOf("wait");
    times.draw("times", { times: new Map(found.iterations.map((each) => [each.round, [total(each), each.phases[wait]]])) }, null, rounds);
  }, 700);
  repeat(async () => {
    const found = await ask(`${api(jobPath(job))}/log?count=30&worker=${encodeURIComponent(worker)}`).catch(() => null);
    if (found) history.replaceChildren(...found.events.slice(0, 30).map((event) => eventNode(job, event)));
  }, 3000);
}

const total = (each) => each.phases.reduce((sum, ms) => sum + ms, 0);

function row(each, phases) {
  const bar = phaseBar();
  const ms = bar.fillTimes(phases, each.phases);
  return el(
    "tr",
    {},
    cell("Began", each.at_us ? clock(each.at_us / 1000, true) : "–"),
    cell("Round", whole(each.round) + (each.unit === null ? "" : `, unit ${whole(each.unit)}`)),
    cell("On version", whole(each.version)),
    cell("Loss", loss(each.loss)),
    cell("Took", ms ? duration(ms) : "–"),
    cell("Phases", bar.node),
    cell("Pulled", bytes(each.pulled)),
    cell("Pushed", bytes(each.pushed)),
  );
}

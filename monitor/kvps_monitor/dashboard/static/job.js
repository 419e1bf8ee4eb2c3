// One job: figures, timeline, charts, workers, shards, and what has happened.
import { bytes, cell, clock, duration, el, jobDoes, jobPath, listTable, loss, perSecond, plural, present, renew, set, setText, short, statePill, whole, workerPath } from "./dom.js";
import { AXES, Axis } from "./axes.js";
import { Beside } from "./beside.js";
import { Chart } from "./charts.js";
import { eventNode, setBound } from "./events.js";
import { phaseBar } from "./phases.js";
import { JobStream } from "./stream.js";
import { Table, textColumn } from "./table.js";
import { about, Tiles } from "./tiles.js";
import { Timeline } from "./timeline.js";
import { GONE, stateTone } from "./words.js";

const EVENTS = 10;

export function showJob(page, job) {
  const state = el("span");
  const what = el("p.muted");
  const final = el("p", { hidden: true });
  const evaluation = el("p.muted", { hidden: true });
  const tiles = new Tiles(["Progress", "Elapsed", "Time left", "Version", "Versions", "Loss", "Workers", "Contributions", "Backlog", "Rollouts waiting", "Taken", "Dropped", "Actors", "Units", "Backup tasks", "Memory"]);
  const charts = makeCharts();
  const chartsNode = el("div.charts", {}, ...Object.values(charts).map((chart) => chart.node));
  const beside = new Beside(job, (name) => {
    for (const chart of Object.values(charts)) chart.name(chart.lines.length - 1, name);
    draw();
  });
  let axis = new Axis();
  const over = el("select", { "aria-label": "What the charts are over", onchange: () => ((axis = new Axis(over.value)), draw()) }, ...AXES.map((name) => el("option", { value: name }, `over ${name}`)));
  const settings = el("dl.settings");
  const filter = el("input", { type: "search", placeholder: "Filter by name, state, host", "aria-label": "Filter workers" });
  const counts = el("span.counts");
  const events = el("ol.log");
  const shards = el("tbody");
  const actors = el("tbody");
  const unnamed = el("p.muted", { hidden: true }, "More than these: kvps rollouts shows all.");
  const actorsCard = el("section.card", { hidden: true }, el("h2", {}, "Actors"), el("div.wide-table", {}, listTable(".small", ACTOR_COLUMNS, actors)), unnamed);
  let stream = null;
  const workers = workerTable(job, () => stream);
  stream = new JobStream(job, () => update());
  const timeline = new Timeline(job, stream);
  filter.addEventListener("input", () => showWorkers());
  const workersCard = el("section.card", {}, el("div.title", {}, el("h2", {}, "Workers"), counts, filter), workers.node);
  page.replaceChildren(
    el("div.heading", {}, el("h1", {}, job), state),
    what,
    final,
    evaluation,
    tiles.node,
    timeline.node,
    el("div.over", {}, el("h2", {}, "The whole run"), over, beside.choice, beside.facts),
    chartsNode,
    workersCard,
    actorsCard,
    el("section.card", {}, el("h2", {}, "Shards"), el("div.wide-table", {}, listTable(".small", SHARD_COLUMNS, shards))),
    el("details.card", {}, el("summary", {}, "Settings"), settings),
    el("section.card", {}, el("div.title", {}, el("h2", {}, "Latest"), el("a", { href: `${jobPath(job)}/log` }, "Whole log")), events),
  );

  function showWorkers() {
    const wanted = filter.value.trim().toLowerCase();
    const fits = (w) => [w.worker, w.state, w.host].some((text) => text.toLowerCase().includes(wanted));
    workers.show(wanted ? stream.workers.filter(fits) : stream.workers);
  }

  function draw() {
    for (const name of Object.keys(stream.series)) if (name.startsWith("eval.") && !charts[name]) addEvaluation(name);
    for (const [name, chart] of Object.entries(charts)) chart.draw(name, stream.series, beside.series, axis);
  }

  /** A chart for a figure that somebody reports, behind that of the loss. */
  function addEvaluation(name) {
    charts[name] = new Chart(`Evaluation: ${name.slice(5)}`, { lines: [{ label: name.slice(5), colour: "reduce", value: loss }], shaped: true });
    charts[name].name(1, beside.choice.value);
    const before = Object.keys(charts).filter((each) => each.startsWith("eval.")).at(-2) ?? "loss";
    charts[before].node.after(charts[name].node);
  }

  function update() {
    const f = stream.facts;
    renew(state, [f.state, jobDoes(f)], () => [statePill(f.state, jobDoes(f))]);
    setText(what, [f.task || "made in Python", f.mode, f.optimizer, f.published_by, `over ${f.transport}`, bytes(f.model_bytes)].filter(Boolean).join(" · "));
    const published = f.published_by !== ""; // by a learner: no workers, and no gradients
    workersCard.hidden = published;
    for (const name of ["lr", "norm", "staleness"]) charts[name].node.hidden = published;
    if (published) charts.loss.name(0, "said by its learner");
    const active = stream.workers.filter((w) => !GONE.includes(w.state)).length;
    const done = f.state === "finished";
    setBound(f.staleness, f.expected_workers);
    final.hidden = !done;
    if (done) setText(final, finalFigures(f));
    evaluation.hidden = !f.evaluation_text;
    setText(evaluation, f.evaluation_text);
    tiles.set({
      Progress: f.progress === null ? "" : `${Math.floor(100 * f.progress)} %`,
      Elapsed: f.elapsed_s === null ? "" : roughly(f.elapsed_s),
      Version: whole(f.version),
      Versions: perSecond(done ? ratio(f.version, f.elapsed_s) : f.commits_per_s),
      Loss: loss(f.loss),
      Workers: published ? "" : present(f.state, active, f.expected_workers),
      Backlog: published ? "" : whole(f.backlog),
      Contributions: f.rounds || published ? "" : whole(f.contributions), // the same as the units
      "Rollouts waiting": f.rollouts ? whole(f.rollouts.waiting) : "",
      Taken: f.rollouts ? whole(f.rollouts.taken) : "",
      Dropped: f.rollouts ? whole(f.rollouts.dropped) : "",
      Actors: f.rollouts ? whole(f.rollouts.actors) : "",
      Units: f.units ? `${whole(f.units_done)} of ${whole(f.units)}` : "",
      "Backup tasks": f.backups ? whole(f.backups) : "",
      "Time left": f.eta_s ? roughly(f.eta_s) : "",
      Memory: bytes(f.memory) + (f.memory_limit ? ` of ${bytes(f.memory_limit)}` : ""),
    });
    draw();
    renew(settings, f.settings, () => Object.entries(f.settings).map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text || "–"))));
    setCounts(counts, stream.workers);
    showWorkers();
    updateShards(shards, stream);
    actorsCard.hidden = f.actors.length === 0;
    unnamed.hidden = !f.rollouts || f.rollouts.actors === f.actors.length;
    renew(actors, [f.version, f.actors], () => f.actors.map((actor) => actorRow(actor, f.version)));
    const latest = stream.events.slice(-EVENTS).reverse();
    renew(events, latest, () => latest.map((event) => eventNode(job, event)));
    timeline.update();
  }
}

/** A time as a figure of a few letters. */
function roughly(s) {
  if (s < 600) return duration(1000 * s);
  return s < 5400 ? `${Math.round(s / 60)} min` : s < 172_800 ? `${(s / 3600).toFixed(1)} h` : `${Math.round(s / 86_400)} days`;
}

const ratio = (number, seconds) => (seconds ? number / seconds : null);

function finalFigures(f) {
  if (f.published_by) return `${plural(f.version, "version")}, loss ${loss(f.loss)}`;
  const counted = `${plural(f.contributions, "contribution")} in ${plural(f.version, "version")}`;
  const rate = `${perSecond(ratio(f.contributions, f.elapsed_s)).replace("/s", "")} contributions/s`;
  return [counted, duration(1000 * f.elapsed_s), rate, `loss ${loss(f.loss)}`].join(", ");
}

function makeCharts() {
  const rate = (value) => `${bytes(value)}/s`;
  return {
    loss: new Chart("Loss", {
      lines: [
        { label: "mean of workers", colour: "compute", value: loss },
        { label: "lowest", colour: "band", value: loss, hidden: true, thin: true },
        { label: "highest", colour: "band", value: loss, hidden: true, thin: true },
      ],
      band: [3, 2],
      shaped: true,
    }),
    lr: new Chart("Learning rate", { lines: [{ label: "of parameters in no group", colour: "step", value: loss }], shaped: true }),
    norm: new Chart("Norm of the reduced gradient", { lines: [{ label: "norm", colour: "reduce", value: loss }], shaped: true }),
    rate: new Chart("Rate", {
      lines: [
        { label: "versions", colour: "compute", value: perSecond },
        { label: "contributions", colour: "fetch", value: perSecond },
      ],
    }),
    staleness: new Chart("Staleness", {
      lines: [
        { label: "mean", colour: "compute", value: short },
        { label: "highest", colour: "other", value: short },
      ],
    }),
    traffic: new Chart("Bytes of aggregators or learner", {
      lines: [
        { label: "received", colour: "fetch", value: rate },
        { label: "stored", colour: "store", value: rate },
      ],
    }),
  };
}

function workerTable(job, stream) {
  const state = {
    name: "state",
    title: "State",
    sort: (w) => w.state,
    make: () => el("span.state", {}, el("span.pill"), el("span.muted")),
    fill(cell, w) {
      const [pill, more] = cell.children;
      setText(pill, w.state);
      set(pill, "className", `pill ${stateTone(w.state)}`);
      const said = about(w, stream().nowMs);
      setText(more, said);
      set(more, "title", said);
    },
  };
  const name = {
    name: "worker",
    title: "Worker",
    sort: (w) => w.rank,
    make: () => el("a"),
    fill(cell, w) {
      setText(cell, w.worker);
      const href = workerPath(job, w.worker);
      if (cell.getAttribute("href") !== href) cell.setAttribute("href", href);
    },
  };
  const phases = {
    name: "shares",
    title: "Time",
    wide: true,
    sort: (w) => w.shares[1] ?? null, // waiting
    make() {
      const bar = phaseBar();
      bar.node.bar = bar;
      return bar.node;
    },
    fill: (cell, w) => cell.bar.fill(stream().phases.worker, w.shares),
  };
  return new Table(
    [
      name,
      state,
      textColumn("round", "Round", (w) => whole(w.pushed), (w) => w.pushed),
      textColumn("clock", "Clock", (w) => whole(w.clock), (w) => w.clock, true),
      textColumn("behind", "Behind", (w) => whole(w.behind), (w) => w.behind, true),
      textColumn("stale", "Staleness", (w) => whole(w.staleness), (w) => w.staleness, true),
      textColumn("took", "A round", (w) => duration(w.round_ms), (w) => w.round_ms, true),
      phases,
      textColumn("loss", "Loss", (w) => loss(w.loss), (w) => w.loss),
      textColumn("host", "Host", (w) => w.host, (w) => w.host, true),
    ],
    { label: "Workers", order: "worker" },
  );
}

const STATES = ["silent", "evicted", "waiting", "awaited", "rejoining", "paused", "computing", "fetching", "pushing", "finished", "left"];

function setCounts(node, workers) {
  const number = new Map();
  for (const w of workers) number.set(w.state, (number.get(w.state) ?? 0) + 1);
  const words = STATES.filter((state) => number.has(state)).map((state) => `${whole(number.get(state))} ${state}`);
  renew(node, words, () => words.map((word) => statePill(word.split(" ")[1], word)));
}

const ACTOR_COLUMNS = ["Actor", "Version", "Behind", "Prompt", "Items", "Silent", "Host"];

function actorRow(actor, version) {
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, actor.name),
    cell("Version", whole(actor.version)),
    cell("Behind", whole(actor.version === null ? null : version - actor.version)),
    cell("Prompt", whole(actor.unit)),
    cell("Items", whole(actor.items)),
    cell("Silent", actor.silent_s ? `for ${duration(1000 * actor.silent_s)}` : "–"),
    cell("Host", actor.host),
  );
}

const SHARD_COLUMNS = ["Shard", "Holder", "Term", "Versions", "Makes one in", "Time", "Receives", "Stores"];

function updateShards(rows, stream) {
  renew(rows, stream.shards, () =>
    stream.shards.map((shard) => {
      const bar = phaseBar();
      const ms = bar.fillTimes(stream.phases.shard, shard.phases);
      return el(
        "tr",
        {},
        el("th", { scope: "row" }, String(shard.shard)),
        cell("Holder", shard.holder || "nobody"),
        cell("Term", whole(shard.term)),
        cell("Versions", perSecond(shard.commits_per_s)),
        cell("Makes one in", ms ? duration(ms) : "–"),
        cell("Time", bar.node),
        cell("Receives", `${bytes(shard.received_per_s)}/s`),
        cell("Stores", `${bytes(shard.stored_per_s)}/s`),
      );
    }),
  );
}

// Another job's losses in the chart of this one, and its figures in a line below.
import { api, ask, duration, el, loss, perSecond, setText, whole } from "./dom.js";
import { JobStream } from "./stream.js";

const OTHER = 3; // the chart's line for it
const NOBODY = "-"; // no worker has this name, so that the stream has no rows of workers

export class Beside {
  /** `changed` is called when the other job has new losses. */
  constructor(job, chart, changed) {
    Object.assign(this, { chart, changed, stream: null });
    this.choice = el("select", { "aria-label": "Beside which job", onchange: () => this.#open(this.choice.value) }, el("option", { value: "" }, "beside …"));
    this.facts = el("p.muted", { hidden: true });
    chart.buttons.prepend(this.choice);
    chart.node.append(this.facts);
    ask(api("/jobs")).then((jobs) => {
      const names = jobs.map((each) => each.job).filter((name) => name !== job);
      this.choice.append(...names.map((name) => el("option", { value: name }, name)));
      this.choice.hidden = !names.length;
      const asked = new URLSearchParams(location.search).get("beside") ?? "";
      if (names.includes(asked)) {
        this.choice.value = asked;
        this.#open(asked);
      }
    }, () => {}); // the stream says what is wrong
  }

  /** This job's losses, with the other one's as one more value of each round. */
  joined(losses) {
    const other = this.stream?.series.loss;
    if (!other || !losses) return losses;
    const all = new Map();
    for (const round of new Set([...losses.keys(), ...other.keys()])) {
      all.set(round, [...(losses.get(round) ?? [null, null, null]), other.get(round)?.[0] ?? null]);
    }
    return all;
  }

  #open(name) {
    this.stream?.end();
    this.stream = name ? new JobStream(name, () => this.#update(name), NOBODY) : null;
    this.chart.name(OTHER, name);
    this.facts.hidden = !name;
    history.replaceState(null, "", name ? `?beside=${encodeURIComponent(name)}` : location.pathname);
    this.changed();
  }

  #update(name) {
    const f = this.stream.facts;
    const said = [`${name}: ${f.state}`, f.mode, `version ${whole(f.version)}`, perSecond(f.commits_per_s), `loss ${loss(f.loss)}`];
    if (f.elapsed_s !== null) said.push(duration(1000 * f.elapsed_s));
    setText(this.facts, said.join(" · "));
    this.changed();
  }
}

// Another job's curves in the charts of this one, and its figures in a line.
import { api, ask, duration, el, loss, perSecond, setText, whole } from "./dom.js";
import { JobStream } from "./stream.js";

const NOBODY = "-"; // no worker has this name, so that the stream has no rows of workers

export class Beside {
  /** `changed` is called with the other job's name when it has new points. */
  constructor(job, changed) {
    Object.assign(this, { changed, stream: null });
    this.choice = el("select", { "aria-label": "Beside which job", onchange: () => this.#open(this.choice.value) }, el("option", { value: "" }, "beside …"));
    this.facts = el("p.muted", { hidden: true });
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

  /** The other job's series; null if there is none. */
  get series() {
    return this.stream?.series ?? null;
  }

  #open(name) {
    this.stream?.end();
    this.stream = name ? new JobStream(name, () => this.#update(name), NOBODY) : null;
    this.facts.hidden = !name;
    history.replaceState(null, "", name ? `?beside=${encodeURIComponent(name)}` : location.pathname);
    this.changed(name);
  }

  #update(name) {
    const f = this.stream.facts;
    const said = [`${name}: ${f.state}`, f.mode, `version ${whole(f.version)}`, perSecond(f.commits_per_s), `loss ${loss(f.loss)}`];
    if (f.elapsed_s !== null) said.push(duration(1000 * f.elapsed_s));
    setText(this.facts, said.join(" · "));
    this.changed(name);
  }
}

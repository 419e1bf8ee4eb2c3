// What the server sends of a job: everything once, then what has changed. See frames.py.
import { api, ask, el, jobPath, say, sayAgain } from "./dom.js";

const SILENT_MS = 4000;

/** A job as this page knows it. Calls `changed(job)` after each frame, and says on the page what is wrong. */
export class JobStream {
  constructor(name, changed, worker = null) {
    this.name = name;
    this.url = api(`${jobPath(name)}/events`) + (worker === null ? "" : `?worker=${encodeURIComponent(worker)}`);
    this.changed = changed;
    this.facts = {};
    this.workers = []; // objects, by rank
    this.shards = [];
    this.events = []; // oldest first
    this.series = {}; // name -> Map of x -> values
    this.phases = { worker: [], shard: [] };
    this.atMs = 0; // the server's time of the newest frame
    this.receivedAt = 0; // this page's time then
    this.trouble = "";
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
    setInterval(() => this.#watchSilence(), 1000);
    this.open();
  }

  /** The server's time now, in ms, as far as this page knows. */
  get nowMs() {
    return this.atMs + (performance.now() - this.receivedAt);
  }

  open() {
    if (this.source || document.hidden || this.ended) return;
    this.openedAt = performance.now();
    this.source = new EventSource(this.url);
    this.source.onmessage = (message) => this.#take(message.data);
    this.source.onerror = () => {
      if (this.source?.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
      this.close();
      this.#askWhy();
      setTimeout(() => this.open(), 2000);
    };
  }

  /** Say why the server refused the stream, as it does for a name that no job can have. An EventSource does not say. */
  async #askWhy() {
    try {
      await ask(api(jobPath(this.name)));
    } catch (error) {
      this.trouble = error.message;
      sayAgain(this.trouble);
      if (error.status === 404) this.#nameOthers();
    }
  }

  /** Name the jobs that there are, where this one is not. */
  async #nameOthers() {
    const jobs = await ask(api("/jobs")).catch(() => []);
    const links = jobs.flatMap((one) => [" ", el("a", { href: jobPath(one.job) }, one.job)]);
    if (links.length && this.trouble) document.getElementById("banner")?.append(" There are:", ...links);
  }

  close() {
    this.source?.close();
    this.source = null;
  }

  /** Ask for nothing any more. */
  end() {
    this.ended = true;
    this.close();
  }

  #watchSilence() {
    if (this.ended) return;
    const last = Math.max(this.receivedAt, this.openedAt ?? 0);
    const silentMs = performance.now() - last;
    if (this.trouble || document.hidden) return;
    if (silentMs > SILENT_MS) say(`No news for ${Math.round(silentMs / 1000)} s: the dashboard or its server does not answer.`);
  }

  #take(text) {
    const frame = JSON.parse(text);
    this.receivedAt = performance.now();
    if (frame.trouble) {
      const words = {
        gone: "This job is not on the server.",
        lost: "The server does not answer.",
        unreadable: "This job cannot be read.",
      };
      this.trouble = `${words[frame.trouble] ?? ""} ${frame.message}`;
      sayAgain(this.trouble);
      if (frame.trouble === "gone") this.#nameOthers();
      return;
    }
    this.trouble = "";
    say("");
    this.atMs = frame.at_ms;
    if (frame.full) {
      this.fields = frame.fields;
      this.phases = frame.phases;
      this.events = [];
      this.series = {};
    }
    Object.assign(this.facts, frame.job);
    if (frame.workers) this.workers = frame.workers.map((row) => this.#worker(row));
    for (const [place, ...changes] of frame.changes ?? []) {
      for (let i = 0; i < changes.length; i += 2) this.workers[place][this.fields[changes[i]]] = changes[i + 1];
    }
    if (frame.shards) this.shards = frame.shards;
    this.events = [...this.events, ...frame.events].slice(-60);
    for (const [name, part] of Object.entries(frame.series)) {
      if (part.all || !this.series[name]) this.series[name] = new Map();
      for (const [x, ...values] of part.points) this.series[name].set(x, values);
    }
    this.changed(this);
  }

  #worker(row) {
    return Object.fromEntries(this.fields.map((field, i) => [field, row[i]]));
  }
}

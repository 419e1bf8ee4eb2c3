// The last rounds of shards and workers as lanes of spans. Only lanes that are visible are asked for and drawn.
import { api, ask, bytes, duration, el, jobPath, set, setText, whole } from "./dom.js";
import { GONE, PHASE_WORDS } from "./words.js";

const WINDOWS_MS = [100, 200, 500, 1000, 2000, 5000, 10000, 20000, 60000];
const ROUNDS = 12; // of the slowest worker, for which a window should have room
const LIVE_MS = 5000; // a window from here on moves with the clock; a shorter one ends with what is recorded
const QUIET_MS = 2000; // after so long without a span the window grows with the time that nothing moves
const LANE = 24; // px
const MOST_LANES = 14; // visible at once
const AXIS = 22;
const NOW = { computing: "compute", waiting: "wait", fetching: "fetch", pushing: "push", silent: "silent" };

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Timeline {
  constructor(job, stream) {
    this.url = api(`${jobPath(job)}/spans`);
    this.stream = stream;
    this.lanes = new Map(); // name -> spans {phase, start, end, version, round, bytes}, oldest first
    this.frozenAt = 0;
    this.chosen = null; // the window that the user chose, as a place in WINDOWS_MS
    this.fitting = WINDOWS_MS.indexOf(10000); // the one that suits the rounds
    this.lastEnd = 0; // when the newest span ended
    this.canvas = el("canvas", { "aria-label": "Timeline", role: "img" });
    this.about = el("span.muted");
    const zoom = (text, label, step) => el("button.quiet", { type: "button", "aria-label": label, title: label, onclick: () => this.#zoom(step) }, text);
    this.space = el("div.space", {}, this.canvas);
    this.view = el("div.lanes", { tabindex: 0, "aria-label": "Lanes of shards and workers" }, this.space);
    this.tip = el("div.tip", { hidden: true });
    this.legends = el("div.legends", {});
    this.freeze = el("button.quiet", { type: "button", "aria-pressed": "false", onclick: () => this.#toggle() }, "Pause");
    this.node = el(
      "section.card.timeline",
      {},
      el("div.title", {}, el("h2", {}, "Timeline"), this.about, el("span.buttons", {}, zoom("−", "A longer time", 1), zoom("+", "A shorter time", -1), zoom("fit", "As many rounds as one can tell apart", 0), this.freeze)),
      this.legends,
      this.view,
      this.tip,
    );
    this.visible = false;
    new IntersectionObserver(([entry]) => {
      this.visible = entry.isIntersecting;
      this.#animate();
    }).observe(this.node);
    new ResizeObserver(() => this.#draw()).observe(this.view);
    this.view.addEventListener("scroll", () => this.#draw(), { passive: true });
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#colours());
    document.addEventListener("visibilitychange", () => this.#animate());
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.#colours();
  }

  /** The names of all lanes: shards, then workers by rank. */
  get names() {
    return [...this.stream.shards.map((shard) => `shard ${shard.shard}`), ...this.stream.workers.map((w) => w.worker)];
  }

  /** Take what is new. Called after each frame. */
  async update() {
    const { worker, shard } = this.stream.phases;
    if (worker.length && !this.legends.firstChild)
      this.legends.append(legend("workers", [...worker, "silent"]), legend("shards", shard));
    const wanted = this.#shown();
    if (!this.visible || this.frozenAt || this.asking || !wanted.count) return;
    this.asking = true;
    this.#fit();
    const oldest = !this.lastEnd ? 0 : this.#endMs - 1.2 * Math.max(this.windowMs, 10000);
    const names = this.names.slice(wanted.first, wanted.first + wanted.count);
    const after = Math.max(oldest, Math.min(...names.map((name) => this.lanes.get(name)?.at(-1)?.end ?? oldest)));
    try {
      const found = await ask(`${this.url}?first=${wanted.first}&count=${wanted.count}&after=${after.toFixed(0)}`);
      for (const lane of found.lanes) this.#add(lane, found.base_ms, oldest);
      for (const name of this.lanes.keys()) if (!names.includes(name)) this.lanes.delete(name);
      this.lastEnd = Math.max(this.lastEnd, ...[...this.lanes.values()].map((lane) => lane.at(-1)?.end ?? 0));
    } catch {
      // the stream says what is wrong
    } finally {
      this.asking = false;
    }
    if (!this.running) this.#animate();
  }

  get windowMs() {
    return WINDOWS_MS[this.chosen ?? this.fitting];
  }

  /** Choose a window with room for some rounds, or for the time in which nothing has moved. It changes only where it is
   *  much too long or too short, so that it does not change at every look. */
  #fit() {
    const quiet = this.#isOver || !this.lastEnd ? 0 : this.stream.nowMs - this.lastEnd;
    const slowest = Math.max(0, ...this.stream.workers.map((w) => w.round_ms ?? 0));
    const wanted = Math.max(ROUNDS * slowest, quiet > QUIET_MS ? 1.5 * quiet : 0) || 10000;
    const has = WINDOWS_MS[this.fitting];
    if (wanted > has || wanted < has / 3) {
      const fits = WINDOWS_MS.findIndex((each) => each >= wanted);
      this.fitting = fits < 0 ? WINDOWS_MS.length - 1 : fits;
    }
  }

  /** Show a longer time (1), a shorter one (-1), or that which suits the rounds (0). */
  #zoom(step) {
    const at = (this.chosen ?? this.fitting) + step;
    this.chosen = step ? Math.max(0, Math.min(WINDOWS_MS.length - 1, at)) : null;
    if (step > 0) this.lanes.clear(); // what is longer ago is asked for anew
    this.#animate();
    this.update();
  }

  get #isOver() {
    return this.stream.facts.state === "finished";
  }

  /** Whether the window moves with the clock. */
  get #isLive() {
    const quiet = this.stream.nowMs - this.lastEnd > QUIET_MS;
    return !this.lastEnd || (!this.#isOver && (this.windowMs >= LIVE_MS || quiet));
  }

  #add({ lane, spans }, base, oldest) {
    const phases = this.stream.phases[lane.startsWith("shard ") ? "shard" : "worker"];
    const kept = (this.lanes.get(lane) ?? []).filter((span) => span.end > oldest);
    for (const [phase, start, ms, version, round, moved] of spans) {
      const span = { phase: phases[phase], start: base + start, end: base + start + ms, version, round, moved };
      if (!kept.length || span.start >= kept.at(-1).end - 0.1) kept.push(span);
    }
    this.lanes.set(lane, kept);
  }

  #shown() {
    const all = this.names.length;
    const first = Math.min(Math.floor(this.view.scrollTop / LANE), Math.max(0, all - 1));
    return { first, count: Math.min(MOST_LANES + 1, all - first) };
  }

  #toggle() {
    this.frozenAt = this.frozenAt ? 0 : this.#endMs;
    setText(this.freeze, this.frozenAt ? "Go on" : "Pause");
    this.freeze.setAttribute("aria-pressed", String(Boolean(this.frozenAt)));
    this.#animate();
  }

  #colours() {
    this.colours = Object.fromEntries([...Object.keys(PHASE_WORDS), "silent"].map((phase) => [phase, css(`--${phase}`)]));
    this.ink = { text: css("--ink"), muted: css("--muted"), line: css("--line"), lane: css("--lane"), bad: css("--bad") };
    this.#draw();
  }

  #animate() {
    if (this.running) return;
    const turn = () => {
      this.running = this.visible && this.#isLive && !document.hidden && !this.frozenAt && !this.still.matches;
      this.#draw();
      if (this.running) requestAnimationFrame(turn);
    };
    this.running = true;
    requestAnimationFrame(turn);
  }

  get #endMs() {
    if (this.frozenAt) return this.frozenAt;
    return this.#isLive ? this.stream.nowMs + 100 : this.lastEnd;
  }

  #draw() {
    const names = this.names;
    const width = this.view.clientWidth;
    if (!width || !names.length) return;
    const shown = Math.min(names.length, MOST_LANES);
    const height = shown * LANE + AXIS;
    const ratio = window.devicePixelRatio || 1;
    set(this.view.style, "height", `${height}px`);
    set(this.space.style, "height", `${names.length * LANE + AXIS}px`);
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      set(this.canvas.style, "width", `${width}px`);
      set(this.canvas.style, "height", `${height}px`);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const left = width < 480 ? 62 : 104;
    this.place = { left, width, perMs: (width - left) / this.windowMs, from: this.#endMs - this.windowMs };
    const until = this.#isOver ? " before its end" : this.#isLive ? "" : " that are recorded";
    setText(this.about, `the last ${rounded(this.windowMs)}${until}, by the server's clock`);
    this.#drawGrid(pen, height);
    const offset = this.view.scrollTop % LANE;
    const first = Math.floor(this.view.scrollTop / LANE);
    pen.save();
    pen.beginPath();
    pen.rect(0, 0, width, height - AXIS);
    pen.clip();
    names.slice(first, first + shown + 1).forEach((name, i) => this.#drawLane(pen, name, i * LANE - offset));
    pen.restore();
  }

  #drawGrid(pen, height) {
    const { left, perMs, width } = this.place;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.lineWidth = 1;
    const end = this.#isOver ? "end" : this.#isLive ? "now" : "newest";
    for (let tenths = 0; tenths <= 10; tenths += width < 480 ? 5 : 2) {
      const ms = (this.windowMs * tenths) / 10;
      const x = Math.min(width - 0.5, Math.round(left + ms * perMs) + 0.5);
      pen.strokeStyle = this.ink.line;
      pen.beginPath();
      pen.moveTo(x, 0);
      pen.lineTo(x, height - AXIS + 4);
      pen.stroke();
      pen.fillStyle = this.ink.muted;
      pen.textAlign = tenths === 10 ? "right" : tenths === 0 ? "left" : "center";
      pen.fillText(tenths === 10 ? end : `−${rounded(this.windowMs - ms)}`, x, height - AXIS / 2 + 2);
    }
  }

  #drawLane(pen, name, top) {
    const { left, perMs, from } = this.place;
    pen.fillStyle = this.ink.lane;
    pen.fillRect(left, top + 3, this.windowMs * perMs, LANE - 6);
    pen.fillStyle = this.ink.text;
    pen.textAlign = "left";
    pen.fillText(fitted(pen, name, left - 10), 0, top + LANE / 2 + 0.5);
    const spans = this.lanes.get(name) ?? [];
    for (const span of spans) {
      if (span.end < from) continue;
      const x = Math.max(left, left + (span.start - from) * perMs);
      const wide = left + (span.end - from) * perMs - x;
      pen.fillStyle = this.colours[span.phase];
      pen.fillRect(x, top + 3, Math.max(0.4, wide - (wide > 4 ? 0.6 : 0)), LANE - 6);
    }
    this.#drawPresent(pen, name, top, spans.at(-1)?.end ?? 0);
  }

  /** What a worker does now is in no trace yet: it is drawn paler, from when its last span ended. */
  #drawPresent(pen, name, top, lastEnd) {
    const worker = this.stream.workers[this.names.indexOf(name) - this.stream.shards.length];
    const { left, perMs, from, width } = this.place;
    if (worker && GONE.includes(worker.state) && left + (lastEnd - from) * perMs < width - 60) {
      pen.fillStyle = this.ink[worker.state === "evicted" ? "bad" : "muted"];
      pen.textAlign = "right";
      pen.fillText(worker.state, width - 6, top + LANE / 2 + 0.5);
    }
    const phase = worker && this.#isLive && NOW[worker.state];
    if (!phase || (!worker.since_ms && !lastEnd)) return;
    const start = phase === "silent" ? Math.max(lastEnd, worker.since_ms ?? 0) : Math.max(lastEnd, from);
    const x = Math.max(left, left + (start - from) * perMs);
    pen.globalAlpha = phase === "silent" ? 1 : 0.3;
    pen.fillStyle = this.colours[phase];
    if (phase === "silent") {
      for (let at = x; at < width; at += 6) pen.fillRect(at, top + 3, 3, LANE - 6);
    } else pen.fillRect(x, top + 3, Math.max(0, width - x), LANE - 6);
    pen.globalAlpha = 1;
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const name = this.names[Math.floor((y + this.view.scrollTop) / LANE)];
    const at = this.place.from + (x - this.place.left) / this.place.perMs;
    const near = 1.5 / this.place.perMs;
    const span = this.lanes.get(name)?.find((each) => at >= each.start - near && at <= each.end + near);
    this.tip.hidden = !span || x < this.place.left;
    if (this.tip.hidden) return;
    const what = [`${name} ${PHASE_WORDS[span.phase]}`, duration(span.end - span.start)];
    if (span.round) what.push(`round ${whole(span.round)}`);
    what.push(`version ${whole(span.version)}`);
    if (span.moved) what.push(bytes(span.moved));
    setText(this.tip, what.join(" · "));
    const outer = this.node.getBoundingClientRect();
    this.tip.style.left = `${Math.max(0, Math.min(event.clientX - outer.left + 12, outer.width - this.tip.offsetWidth - 8))}px`;
    this.tip.style.top = `${event.clientY - outer.top + 18}px`;
  }
}

const rounded = (ms) => duration(ms).replace(/\.0(?= )| 0 s$/, "");

function legend(title, phases) {
  const items = phases.map((phase) => el("span", {}, el(`i.swatch.${phase}`), PHASE_WORDS[phase] ?? phase));
  return el("span.legend", {}, el("b", {}, title), ...items);
}

function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && pen.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}

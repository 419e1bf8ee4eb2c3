// Charts of series that grow, drawn by uPlot.
import { el, setText } from "./dom.js";

const GAP_S = 10; // on an axis of time, at least so long a way between two points is a gap
const SMOOTH = 0.9; // the weight of what was before
const HEIGHT = 184;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/**
 * A chart in a card. Its last line is another job's.
 *   title   over it
 *   lines   [{label, colour: a CSS variable, value: how it is written, dash}]; one without a label is in no legend
 *   band    two numbers of lines: what is between them is filled
 *   shaped  whether the user may smooth the lines, and have a logarithmic axis
 */
export class Chart {
  constructor(title, { lines, band = null, shaped = false }) {
    lines = [...lines, { label: "", colour: "push", value: lines[0].value, hidden: true, dash: [6, 3] }];
    Object.assign(this, { lines, band, plot: null, data: null, smooth: false, log: false });
    this.values = lines.map(() => el("b"));
    this.names = lines.map((line) => el("span", {}, line.label));
    this.legends = lines.map((line, i) => el("span", { hidden: line.hidden }, el(`i.swatch.${line.colour}`), this.names[i], " ", this.values[i]));
    this.buttons = el("span.buttons", {}, ...(shaped ? [this.#switch("smooth"), this.#switch("log")] : []));
    this.at = el("span.muted");
    this.host = el("div.plot", { role: "img", "aria-label": title });
    this.empty = el("p.muted.empty", {}, "nothing yet");
    this.node = el("section.card.chart", {}, el("div.title", {}, el("h3", {}, title, " ", this.at), this.buttons), el("span.legend", {}, ...this.legends), this.host);
    this.host.append(this.empty);
    new ResizeObserver(() => this.#resize()).observe(this.host);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#make());
  }

  /** Draw the series `name` of a job over an axis, and beside it that of another job: each a Map of version -> values. */
  draw(name, series, other, axis) {
    this.drawn = [name, series, other, axis];
    const own = this.lines.length - 1;
    const points = new Map();
    const add = (of, first, count) => {
      const place = axis.places(of);
      for (const [version, values] of of[name] ?? []) {
        const x = place(version);
        if (x === null || values.every((value) => value === null)) continue;
        if (!points.has(x)) points.set(x, new Array(own + 1).fill(undefined));
        for (let i = 0; i < count; i += 1) points.get(x)[first + i] = values[i] ?? null;
      }
    };
    add(series, 0, own);
    if (other) add(other, own, 1);
    const xs = [...points.keys()].sort((a, b) => a - b);
    this.empty.hidden = xs.length > 0;
    if (!xs.length) return;
    const rows = withGaps(xs, points, axis.hasGaps, own + 1);
    const moved = this.axis?.name !== axis.name;
    this.axis = axis;
    this.data = [rows.map(([x]) => x), ...this.lines.map((_, i) => this.#shaped(rows.map(([, values]) => values[i])))];
    if (this.plot && !moved) this.plot.setData(this.data);
    else this.#make();
    if (this.plot?.cursor.idx === null || this.plot?.cursor.idx === undefined) this.#show(null);
  }

  /** Give a line another name, or none, which hides it from the legend. */
  name(line, label) {
    setText(this.names[line], label);
    this.legends[line].hidden = !label;
  }

  #switch(what) {
    const change = () => {
      this[what] = !this[what];
      button.setAttribute("aria-pressed", String(this[what]));
      if (this.drawn) this.draw(...this.drawn);
      this.#make();
    };
    const button = el("button.quiet", { type: "button", "aria-pressed": "false", onclick: change }, what);
    return button;
  }

  /** Values as they are drawn: smoothed by an exponential mean without bias at its beginning; positive on a log axis. */
  #shaped(values) {
    let [sum, weight] = [0, 0];
    return values.map((value) => {
      if (value === null || value === undefined) return value;
      if (this.smooth) {
        [sum, weight] = [SMOOTH * sum + (1 - SMOOTH) * value, SMOOTH * weight + 1 - SMOOTH];
        value = sum / weight;
      }
      return this.log && value <= 0 ? null : value;
    });
  }

  #show(index) {
    if (!this.data) return;
    this.lines.forEach((line, i) => {
      const all = this.data[i + 1];
      let at = index ?? all.length - 1;
      while (index === null && at > 0 && (all[at] === null || all[at] === undefined)) at -= 1;
      setText(this.values[i], line.value(all[at]));
    });
    setText(this.at, index === null ? "" : this.axis.text(this.data[0][index]));
  }

  #resize() {
    if (this.plot) this.plot.setSize({ width: Math.max(100, this.host.clientWidth), height: HEIGHT });
    else if (this.data) this.#make();
  }

  #make() {
    this.plot?.destroy();
    this.plot = null;
    if (!this.data || !this.host.clientWidth) return;
    const [ink, grid] = [colour("--muted"), colour("--line")];
    const font = "11px system-ui, sans-serif";
    const axis = { stroke: ink, font, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    this.plot = new window.uPlot(
      {
        width: this.host.clientWidth,
        height: HEIGHT,
        legend: { show: false },
        padding: [8, 28, 0, 0],
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
        scales: {
          x: { time: false, range: (plot, low, high) => (plot.data[0].length > 1 ? [low, high] : [plot.data[0][0] - 1, plot.data[0][0] + 1]) },
          y: this.log ? { distr: 3 } : { range: (_, low, high) => range(low, high) },
        },
        axes: [
          { ...axis, size: 24, space: 70, label: this.axis.label, labelSize: 16, labelFont: font, labelGap: 0, values: (_, ticks) => ticks.map((tick) => (this.axis.name === "time" ? ticking(tick) : tickText(tick))) },
          { ...axis, size: (_, texts) => Math.max(40, 14 + 6.4 * Math.max(0, ...(texts ?? []).map((text) => text.length))), values: (_, ticks) => ticks.map((tick) => tickText(tick)) },
        ],
        series: [
          {},
          ...this.lines.map((line) => ({
            label: line.label,
            stroke: colour(`--${line.colour}`),
            width: line.thin ? 0.5 : 1.6,
            dash: line.dash,
            points: { show: (plot) => plot.data[0].length < 2, size: 5 },
            spanGaps: false,
          })),
        ],
        bands: this.band ? [{ series: this.band, fill: colour("--band") }] : [],
        hooks: { setCursor: [(plot) => this.#show(plot.cursor.idx ?? null)] },
      },
      this.data,
      this.host,
    );
  }
}

/** The range of an axis: with a margin, and with zero if that is near. */
function range(low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, low * 1.2), Math.max(0, high * 1.2)];
  const margin = (high - low) * 0.08;
  const from = low >= 0 && low < (high - low) * 0.6 ? 0 : low - margin;
  return [from, high + margin];
}

/** Points as rows, [x, values]; where a long time lies between two, a row without values breaks the lines. */
function withGaps(xs, points, breaks, width) {
  const rows = xs.map((x) => [x, points.get(x)]);
  if (!breaks || xs.length < 3) return rows;
  const ways = xs.slice(1).map((x, i) => x - xs[i]).sort((a, b) => a - b);
  const long = Math.max(GAP_S, 20 * ways[ways.length >> 1]);
  return rows.flatMap((row, i) => (i && row[0] - rows[i - 1][0] > long ? [[(row[0] + rows[i - 1][0]) / 2, new Array(width).fill(null)], row] : [row]));
}

/** Seconds on an axis of time. */
function ticking(s) {
  if (s === null) return "";
  if (s >= 7200) return `${Number((s / 3600).toPrecision(3))} h`;
  return s >= 120 ? `${Number((s / 60).toPrecision(3))} min` : `${Number(s.toPrecision(3))} s`;
}

function tickText(value) {
  if (value === null) return ""; // a tick of a logarithmic axis for which there is no room
  const size = Math.abs(value);
  if (size >= 1e12 || (size !== 0 && size < 0.001)) return Number(value.toPrecision(3)).toExponential().replace("+", "");
  if (size >= 1e9) return `${value / 1e9}G`;
  if (size >= 1e6) return `${value / 1e6}M`;
  if (size >= 1e4) return `${value / 1e3}k`;
  return String(Number(value.toPrecision(4)));
}

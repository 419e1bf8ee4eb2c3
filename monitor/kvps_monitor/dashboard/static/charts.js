// Charts of series that grow, drawn by uPlot.
import { el, setText } from "./dom.js";

const SMOOTH = 0.9; // the weight of what was before
const HEIGHT = 168;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/**
 * A chart in a card.
 *   title   over it
 *   x       how a value of x is written; on the axis, `tick`, which is told the axis' length too
 *   lines   [{label, colour: a CSS variable, value: how it is written, dash}]; one without a label is in no legend
 *   band    two numbers of lines: what is between them is filled
 *   shaped  whether the user may smooth the lines, and have a logarithmic axis
 */
export class Chart {
  constructor(title, { x, tick = tickText, lines, band = null, shaped = false }) {
    Object.assign(this, { x, tick, lines, band, plot: null, data: null, smooth: false, log: false });
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

  /** Draw a series: a Map of x -> values. */
  draw(series) {
    const xs = [...(series?.keys() ?? [])].sort((a, b) => a - b);
    const known = xs.filter((x) => series.get(x).some((value) => value !== null));
    this.empty.hidden = known.length > 0;
    if (!known.length) return;
    this.series = series;
    this.data = [known, ...this.lines.map((_, i) => this.#shaped(known.map((x) => series.get(x)[i] ?? null)))];
    if (this.plot) this.plot.setData(this.data);
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
      this.draw(this.series);
      this.#make();
    };
    const button = el("button.quiet", { type: "button", "aria-pressed": "false", onclick: change }, what);
    return button;
  }

  /** Values as they are drawn: smoothed by an exponential mean without bias at its beginning; positive on a log axis. */
  #shaped(values) {
    let [sum, weight] = [0, 0];
    return values.map((value) => {
      if (value === null) return null;
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
      while (index === null && at > 0 && all[at] === null) at -= 1;
      setText(this.values[i], line.value(all[at]));
    });
    setText(this.at, index === null ? "" : this.x(this.data[0][index]));
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
        padding: [8, 20, 0, 0],
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
        scales: {
          x: { time: false, range: (plot, low, high) => (plot.data[0].length > 1 ? [low, high] : [plot.data[0][0] - 1, plot.data[0][0] + 1]) },
          y: this.log ? { distr: 3 } : { range: (_, low, high) => range(low, high) },
        },
        axes: [
          { ...axis, size: 24, space: 70, values: (_, ticks) => ticks.map((tick) => this.tick(tick, ticks.at(-1) - ticks[0])) },
          { ...axis, size: 46, values: (_, ticks) => ticks.map((tick) => tickText(tick)) },
        ],
        series: [
          {},
          ...this.lines.map((line) => ({
            label: line.label,
            stroke: colour(`--${line.colour}`),
            width: line.thin ? 0.5 : 1.6,
            dash: line.dash,
            points: { show: (plot) => plot.data[0].length < 2, size: 5 },
            spanGaps: true,
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

function tickText(value) {
  if (value === null) return ""; // a tick of a logarithmic axis for which there is no room
  const size = Math.abs(value);
  if (size >= 1e12 || (size !== 0 && size < 0.001)) return Number(value.toPrecision(3)).toExponential().replace("+", "");
  if (size >= 1e9) return `${value / 1e9}G`;
  if (size >= 1e6) return `${value / 1e6}M`;
  if (size >= 1e4) return `${value / 1e3}k`;
  return String(Number(value.toPrecision(4)));
}

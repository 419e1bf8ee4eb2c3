// Charts of series that grow, drawn by uPlot.
import { el, setText } from "./dom.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/**
 * A chart in a card.
 *   title   over it
 *   x       how a value of x is written; on the axis, `tick`
 *   lines   [{label, colour: a CSS variable, value: how it is written, dash}]; a chart has at most three
 *   band    two numbers of lines: what is between them is filled
 */
export class Chart {
  constructor(title, { x, tick = tickText, lines, band = null }) {
    Object.assign(this, { x, tick, lines, band, plot: null, data: null });
    this.values = lines.map(() => el("b"));
    const legend = el("span.legend");
    lines.forEach((line, i) => {
      if (line.hidden) return;
      legend.append(el("span", {}, el(`i.swatch.${line.colour}`), `${line.label} `, this.values[i]));
    });
    this.at = el("span.muted");
    this.host = el("div.plot", { role: "img", "aria-label": title });
    this.empty = el("p.muted.empty", {}, "nothing yet");
    this.node = el("section.card.chart", {}, el("h3", {}, title, " ", this.at), legend, this.host);
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
    this.data = [known, ...this.lines.map((_, i) => known.map((x) => series.get(x)[i]))];
    if (this.plot) this.plot.setData(this.data);
    else this.#make();
    if (this.plot?.cursor.idx === null || this.plot?.cursor.idx === undefined) this.#show(null);
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
    if (this.plot) this.plot.setSize({ width: Math.max(100, this.host.clientWidth), height: this.#height });
    else if (this.data) this.#make();
  }

  get #height() {
    return 168;
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
        height: this.#height,
        legend: { show: false },
        padding: [8, 20, 0, 0],
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
        scales: { x: { time: false }, y: { range: (_, low, high) => range(low, high) } },
        axes: [
          { ...axis, size: 24, space: 70, values: (_, ticks) => ticks.map((tick) => this.tick(tick)) },
          { ...axis, size: 46, values: (_, ticks) => ticks.map((tick) => tickText(tick)) },
        ],
        series: [
          {},
          ...this.lines.map((line) => ({
            label: line.label,
            stroke: colour(`--${line.colour}`),
            width: line.hidden ? 0.5 : 1.6,
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
  const size = Math.abs(value);
  if (size >= 1e12 || (size !== 0 && size < 0.001)) return Number(value.toPrecision(3)).toExponential().replace("+", "");
  if (size >= 1e9) return `${value / 1e9}G`;
  if (size >= 1e6) return `${value / 1e6}M`;
  if (size >= 1e4) return `${value / 1e3}k`;
  return String(Number(value.toPrecision(4)));
}

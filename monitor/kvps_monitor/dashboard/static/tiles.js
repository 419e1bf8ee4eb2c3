// Figures that one sees first.
import { duration, el, set, setText } from "./dom.js";

export class Tiles {
  constructor(titles) {
    this.values = new Map(titles.map((title) => [title, el("dd")]));
    this.node = el("dl.tiles", {}, ...titles.map((title) => el("div", {}, el("dt", {}, title), this.values.get(title))));
  }

  /** Set values by title; a tile without a value is not shown. */
  set(values) {
    for (const [title, node] of this.values) {
      const value = values[title] ?? "";
      setText(node, value);
      set(node, "title", value); // where it is cut
      set(node.parentElement, "hidden", value === "");
    }
  }
}

/** What stands behind a worker's state: whom it waits for, and for how long it has had that state. */
export function about(w, nowMs) {
  const whom = w.waits_for.length ? `for ${w.waits_for.join(", ")}` : "";
  const since = w.since_ms && w.state !== "computing" ? duration(Math.max(0, nowMs - w.since_ms)) : "";
  return [whom, w.state === "silent" ? `for ${since}` : since].filter(Boolean).join(", ");
}

// What the charts of a job may be drawn over. A series is by version; another axis knows where a version lies on it.
import { duration, whole } from "./dom.js";

/** When each version of a job was made, and how many contributions had come with it: between those that are known,
 *  even parts. `made` is a Map of version -> [ms since the first, contributions]. */
class Made {
  constructor(made) {
    this.versions = [...(made?.keys() ?? [])].sort((a, b) => a - b);
    this.known = made;
  }

  /** The first (0) or second (1) number of a version; null if none is known. */
  of(version, which) {
    const all = this.versions;
    if (!all.length) return null;
    let [low, high] = [0, all.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (all[middle] < version) low = middle + 1;
      else high = middle;
    }
    const [from, to] = [all[Math.max(0, low - 1)], all[low]];
    const [start, end] = [this.known.get(from)[which], this.known.get(to)[which]];
    if (from === to || version >= to) return end;
    return start + ((end - start) * Math.max(0, version - from)) / (to - from);
  }
}

const WORDS = { round: "round", version: "version", contributions: "contributions", time: "time since the first version" };

/** An axis for all charts of a page: of a job by version, or of one worker by round. */
export class Axis {
  constructor(name = "version") {
    this.name = name;
  }

  get label() {
    return WORDS[this.name];
  }

  /** Return a function that gives the place of a version of the job whose series these are. */
  places(series) {
    if (this.name === "version" || this.name === "round") return (x) => x;
    const made = new Made(series.made);
    if (this.name === "contributions") return (version) => made.of(version, 1);
    return (version) => (made.versions.length ? made.of(version, 0) / 1000 : null);
  }

  text(value) {
    if (this.name === "time") return duration(1000 * value);
    return this.name === "contributions" ? `${whole(value)} contributions` : `${this.name} ${whole(value)}`;
  }

  /** Whether a long way between two points says that nothing was made meanwhile. */
  get hasGaps() {
    return this.name === "time";
  }
}

/** Those among which the reader of a job's page chooses. */
export const AXES = ["version", "contributions", "time"];

// One word and one tone a thing, the same as in palette.py, which a test compares with this.
export const PHASE_WORDS = {
  other: "own code",
  wait: "waits",
  fetch: "fetches",
  compute: "computes",
  push: "pushes",
  reduce: "reduces",
  step: "optimizer steps",
  store: "stores",
  commit: "commits",
};

/** States of a worker that is not in the job any more. */
export const GONE = ["finished", "left", "evicted"];

const TONES = {
  bad: ["silent", "stalled", "all workers left", "evicted", "unreadable"],
  warn: ["waiting", "awaited", "rejoining", "paused", "suspended"],
  done: ["finished", "left", "stopped"],
};

/** The tone of a worker's state or a job's. */
export function stateTone(state) {
  if (state.startsWith("waits")) return "warn";
  return Object.keys(TONES).find((tone) => TONES[tone].includes(state)) ?? "good";
}

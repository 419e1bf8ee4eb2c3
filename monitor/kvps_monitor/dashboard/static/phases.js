// A bar of shares of time, one colour for each phase.
import { el, set } from "./dom.js";
import { PHASE_WORDS } from "./words.js";

export function phaseBar(kind = "") {
  const node = el(`span.phases${kind ? `.${kind}` : ""}`, { role: "img" });
  return {
    node,
    /** Show the share of each phase, 0 to 1. */
    fill(names, shares) {
      while (node.children.length < names.length) node.append(el("i"));
      names.forEach((name, i) => {
        set(node.children[i], "className", name);
        set(node.children[i].style, "width", `${Math.round(1000 * (shares[i] ?? 0)) / 10}%`);
      });
      const words = names.map((name, i) => `${PHASE_WORDS[name]} ${Math.round(100 * (shares[i] ?? 0))} %`).join(", ");
      if (node.title !== words) {
        node.title = words;
        node.setAttribute("aria-label", words);
      }
    },
    /** Show the milliseconds of each phase, and return their sum. */
    fillTimes(names, times) {
      const all = times.reduce((sum, ms) => sum + ms, 0);
      this.fill(names, times.map((ms) => (all ? ms / all : 0)));
      return all;
    },
  };
}

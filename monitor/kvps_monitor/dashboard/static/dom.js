// Elements and words. Whatever comes from the server becomes text, never markup.
import { stateTone } from "./words.js";

/** Make an element: el("a.name", {href}, "text", child, ...). */
export function el(what, properties = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Set a property, if it has another value: a page that is not touched is not drawn. */
export function set(target, property, value) {
  if (target[property] !== value) target[property] = value;
}

export function setText(element, text) {
  set(element, "textContent", text);
}

/** Make the children of an element anew, if what they are made from is another. Return whether it was. */
export function renew(element, from, make) {
  const key = JSON.stringify(from);
  if (element.madeFrom === key) return false;
  element.madeFrom = key;
  element.replaceChildren(...make());
  return true;
}

/** A table with these titles above the rows of `body`. */
export function listTable(kind, titles, body) {
  return el(`table.list${kind}`, {}, el("thead", {}, el("tr", {}, ...titles.map((title) => el("th", { scope: "col" }, title)))), body);
}

/** A cell of such a table: a phone shows its title too. */
export const cell = (title, ...content) => el("td", { "data-title": title }, ...content);

const NONE = "–";

export function whole(value) {
  return value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en-US");
}

/** A number with three digits that matter. */
export function short(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size >= 10000) return whole(value);
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

export function loss(value) {
  if (value === null || value === undefined) return NONE;
  const text = Math.abs(value) < 0.001 && value !== 0 ? value.toExponential(2) : value.toPrecision(4);
  return text.replace("+", ""); // 1.000e30
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toPrecision(2)} ${units[unit]}`;
}

export function perSecond(value) {
  return value === null || value === undefined ? NONE : `${short(value)}/s`;
}

/** Milliseconds, as a person says them. */
export function duration(ms) {
  if (ms === null || ms === undefined) return NONE;
  if (ms < 1) return `${ms.toFixed(2)} ms`;
  if (ms < 1000) return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
  const s = ms / 1000;
  if (s < 60) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

const pad = (number, digits = 2) => String(number).padStart(digits, "0");

export function clock(ms, exact = false) {
  const at = new Date(ms);
  const time = `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
  return exact ? `${time}.${pad(at.getMilliseconds(), 3)}` : time;
}

export function day(ms) {
  const at = new Date(ms);
  return `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
}

/** How many workers of a job are there; of a finished job, how many it had; a dash if it has none. */
export function present(state, there, expected) {
  if (!expected) return "–";
  return state === "finished" ? whole(expected) : `${whole(there)} of ${whole(expected)}`;
}

export function plural(number, one, many = `${one}s`) {
  return `${whole(number)} ${number === 1 ? one : many}`;
}

export const jobPath = (job) => `/jobs/${encodeURIComponent(job)}`;
export const workerPath = (job, worker) => `${jobPath(job)}/workers/${encodeURIComponent(worker)}`;
export const api = (path) => `/api${path}`;

/** A state in a coloured pill; its word says all that its colour says. */
export function statePill(state, words = state) {
  return el(`span.pill.${stateTone(state)}`, {}, words);
}

const NAMED = 4; // workers that a stalled job waits for

/** What a job does, as "stalled: waits for w2" or "paused by w0: a look at the data". */
export function jobDoes({ state, waits_for: names = [], why }) {
  if (why) return why.startsWith(state) ? why : `${state}; ${why}`;
  if (!names.length) return state;
  return `${state}: waits for ${names.slice(0, NAMED).join(", ")}${names.length > NAMED ? ` and ${whole(names.length - NAMED)} more` : ""}`;
}

/** Ask the API. An answer that is an error is thrown with its message. */
export async function ask(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json" } });
  if (answer.status === 401) throw new Error("The dashboard asks for its token: open the URL that it has printed.");
  const found = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(found.error ?? `status ${answer.status}`), { status: answer.status });
  return found;
}

/** Call `again` at once and each `ms` while somebody sees the page. It is never called twice at the same time. */
export function repeat(again, ms) {
  let timer = 0;
  let runs = false;
  const turn = async () => {
    if (runs) return;
    clearTimeout(timer);
    runs = true;
    try {
      if (!document.hidden) await again();
    } finally {
      runs = false;
      if (!document.hidden) timer = setTimeout(turn, ms);
    }
  };
  document.addEventListener("visibilitychange", turn);
  turn();
}

const banner = document.getElementById("banner");

/** Say on top of the page what is wrong; nothing for "". */
export function say(text, tone = "bad") {
  setText(banner, text);
  set(banner, "className", tone);
  banner.hidden = !text;
}

/** Say what is wrong, and that this page looks again by itself. */
export function sayAgain(message) {
  say(`${message.replace(/\.?$/, ".")} Looking again.`);
}

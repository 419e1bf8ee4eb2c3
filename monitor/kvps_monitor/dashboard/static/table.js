// A table of any number of rows: only those that are visible are in the page.
import { el, set, setText } from "./dom.js";

const ROW = 36; // px, as in style.css
const MOST_VISIBLE = 14; // rows, before the table scrolls

/**
 * columns  [{name, title, sort: (row) => value, make: () => element, fill: (element, row), wide: hidden on phones}]
 */
export class Table {
  constructor(columns, { label, order }) {
    this.columns = columns;
    this.rows = [];
    this.pool = [];
    [this.by, this.descending] = [order, false];
    this.headers = columns.map((column) => this.#header(column));
    this.body = el("div.rows", { role: "presentation" });
    this.view = el("div.scroll", { role: "presentation", tabindex: 0, "aria-label": label }, this.body);
    this.node = el("div.table", { role: "table", "aria-label": label }, el("div.row.head", { role: "row" }, ...this.headers), this.view);
    this.view.addEventListener("scroll", () => this.#later(), { passive: true });
    new ResizeObserver(() => this.#later()).observe(this.view);
  }

  /** Show these rows. */
  show(rows) {
    this.rows = rows;
    this.node.setAttribute("aria-rowcount", String(rows.length));
    this.#later();
  }

  #header(column) {
    const button = el("button", { type: "button", onclick: () => this.#sortBy(column.name) }, column.title);
    return this.#place(column, "columnheader", button);
  }

  #sortBy(name) {
    this.descending = this.by === name ? !this.descending : false;
    this.by = name;
    this.#later();
  }

  #later() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      this.#draw();
    });
  }

  #sorted() {
    const column = this.columns.find((each) => each.name === this.by);
    const sign = this.descending ? -1 : 1;
    const keyed = this.rows.map((row) => [column.sort(row), row]);
    keyed.sort(([a], [b]) => (a === b ? 0 : a === null ? 1 : b === null ? -1 : a < b ? -sign : sign));
    return keyed.map(([, row]) => row);
  }

  #draw() {
    this.columns.forEach((column, i) => {
      const sorted = column.name === this.by ? (this.descending ? "descending" : "ascending") : "none";
      if (this.headers[i].getAttribute("aria-sort") !== sorted) this.headers[i].setAttribute("aria-sort", sorted);
    });
    const rows = this.#sorted();
    set(this.view.style, "height", `${Math.max(1, Math.min(rows.length, MOST_VISIBLE)) * ROW}px`);
    set(this.body.style, "height", `${rows.length * ROW}px`);
    const first = Math.max(0, Math.floor(this.view.scrollTop / ROW) - 2);
    const shown = rows.slice(first, first + MOST_VISIBLE + 5);
    while (this.pool.length < shown.length) this.pool.push(this.#makeRow());
    this.pool.forEach((made, i) => {
      const row = shown[i];
      made.node.hidden = !row;
      if (!row) return;
      set(made.node.style, "transform", `translateY(${(first + i) * ROW}px)`);
      this.columns.forEach((column, c) => column.fill(made.cells[c], row));
    });
  }

  #makeRow() {
    const cells = this.columns.map((column) => (column.make ? column.make() : el("span")));
    const node = el("div.row", { role: "row" }, ...this.columns.map((column, c) => this.#place(column, "cell", cells[c])));
    this.body.append(node);
    return { node, cells };
  }

  #place(column, role, content) {
    return el(`div.${column.name}${column.wide ? ".wide" : ""}`, { role }, content);
  }
}

/** A column of text. */
export function textColumn(name, title, text, sort, wide = false) {
  return { name, title, sort, wide, fill: (cell, row) => setText(cell, text(row)) };
}

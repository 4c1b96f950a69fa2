// A table whose heads ask for another order, and whose rows open.

import { h } from "./dom.js";

/**
 * `columns`: [{name, sort (the field that it sorts by, if it does), cell(row) (text or element), number}]. Rows have
 * names. `order`: {sort, descending}, which a head changes before it calls `reorder`.
 */
export class Table {
  constructor(columns, order, reorder) {
    Object.assign(this, { columns, order, reorder, rows: [], open: new Map() });
    this.heads = columns.map((column) => this.makeHead(column));
    this.body = h("tbody");
    this.element = h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, this.heads)), this.body));
    this.markHeads();
    // Drawing anew between the press and the release of a button would lose the click.
    this.element.addEventListener("pointerdown", () => (this.held = true));
    for (const end of ["pointerup", "pointercancel"]) {
      window.addEventListener(end, () => setTimeout(() => this.release()));
    }
  }

  release() {
    if (this.waiting) this.redraw();
    this.held = false;
  }

  /** Now, for the click itself asks for it. */
  redraw() {
    this.held = false;
    this.render(this.rows);
  }

  makeHead(column) {
    const head = h("th", { scope: "col", class: column.number ? "number" : null });
    if (column.sort === undefined) head.append(column.name);
    else head.append(h("button", { type: "button", onclick: () => this.sortBy(column) }, column.name));
    return head;
  }

  sortBy(column) {
    this.order.descending = this.order.sort === column.sort ? !this.order.descending : Boolean(column.number);
    this.order.sort = column.sort;
    this.markHeads();
    this.reorder();
  }

  markHeads() {
    this.heads.forEach((head, place) => {
      const { sort } = this.columns[place];
      if (sort === undefined) return;
      head.setAttribute("aria-sort", sort !== this.order.sort ? "none" : this.order.descending ? "descending" : "ascending");
    });
  }

  /** Show these rows. A focused button stays focused; rows that are open stay so while they are there. */
  render(rows) {
    this.rows = rows;
    this.waiting = Boolean(this.held);
    if (this.held) return;
    const focused = this.body.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
    const there = new Set(rows.map((row) => row.name));
    for (const name of [...this.open.keys()]) if (!there.has(name)) this.open.delete(name);
    const lines = [];
    for (const row of rows) {
      const { name } = row;
      lines.push(
        h("tr", { "data-row": name }, this.columns.map((column) => h("td", { class: column.number ? "number" : column.kind }, column.cell(row)))),
      );
      const inner = this.open.get(name);
      if (inner !== undefined) lines.push(h("tr", { class: "inner" }, h("td", { colspan: this.columns.length }, inner)));
    }
    this.body.replaceChildren(...lines);
    if (focused !== undefined) this.body.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  close(name) {
    this.open.delete(name);
    this.redraw();
  }

  /** A button that opens and closes the row. `fill(place)` is called when it opens. */
  expander(name, label, fill) {
    const isOpen = this.open.has(name);
    return h("button", {
      type: "button", class: "linklike expander", "data-key": name, "aria-expanded": String(isOpen),
      onclick: () => {
        if (!this.open.delete(name)) {
          const place = h("div", {}, h("p", { class: "quiet" }, "Loading…"));
          this.open.set(name, place);
          fill(place);
        }
        this.redraw();
      },
    }, label);
  }
}

/** A small table that does not sort. `columns`: [[name, isNumber], …]; cells are text or elements. */
export function plain(columns, rows) {
  const head = columns.map(([name, isNumber]) => h("th", { scope: "col", class: isNumber ? "number" : null }, name));
  const body = rows.map((row) => h("tr", {}, row.map((cell, place) => h("td", { class: columns[place][1] ? "number" : columns[place][2] }, cell))));
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}

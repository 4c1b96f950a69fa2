// A table that sorts by its heads and whose rows open.

import { h } from "./dom.js";

/**
 * `columns`: [{name, value(row) to sort by, cell(row) (text or element), number}], `key(row)` names a row for as long as
 * it is there. `inner(row)` makes what is shown below a row that is open; `opened` is called with each.
 */
export class Table {
  constructor(columns, key, sortedBy, descending = false) {
    Object.assign(this, { columns, key, sortedBy, descending, rows: [], open: new Map() });
    this.heads = columns.map((column, place) => this.makeHead(column, place));
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

  makeHead(column, place) {
    const head = h("th", { scope: "col", class: column.number ? "number" : null });
    if (column.value === undefined) head.append(column.name);
    else head.append(h("button", { type: "button", onclick: () => this.sortBy(place) }, column.name));
    return head;
  }

  sortBy(place) {
    this.descending = this.sortedBy === place ? !this.descending : Boolean(this.columns[place].number);
    this.sortedBy = place;
    this.markHeads();
    this.redraw();
  }

  markHeads() {
    this.heads.forEach((head, place) => {
      if (this.columns[place].value === undefined) return;
      head.setAttribute("aria-sort", place !== this.sortedBy ? "none" : this.descending ? "descending" : "ascending");
    });
  }

  /** Show these rows. A focused button stays focused; open rows stay open. */
  render(rows) {
    this.rows = rows;
    this.waiting = Boolean(this.held);
    if (this.held) return;
    const focused = this.body.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
    const value = this.columns[this.sortedBy].value;
    const sorted = [...rows].sort((one, other) => compare(value(one), value(other)) * (this.descending ? -1 : 1));
    const lines = [];
    for (const row of sorted) {
      const name = this.key(row);
      lines.push(
        h("tr", { "data-row": name }, this.columns.map((column) => h("td", { class: column.number ? "number" : column.kind }, column.cell(row)))),
      );
      const inner = this.open.get(name);
      if (inner !== undefined) lines.push(h("tr", { class: "inner" }, h("td", { colspan: this.columns.length }, inner)));
    }
    this.body.replaceChildren(...lines);
    if (focused !== undefined) this.body.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
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

function compare(one, other) {
  if (one === other) return 0;
  if (one === null || one === undefined) return -1;
  if (other === null || other === undefined) return 1;
  return one < other ? -1 : 1;
}

/** A small table that does not sort. `columns`: [[name, isNumber], …]; cells are text or elements. */
export function plain(columns, rows) {
  const head = columns.map(([name, isNumber]) => h("th", { scope: "col", class: isNumber ? "number" : null }, name));
  const body = rows.map((row) => h("tr", {}, row.map((cell, place) => h("td", { class: columns[place][1] ? "number" : columns[place][2] }, cell))));
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}

// A long list, a page at a time: the console searches, sorts and cuts it, this shows what it answers.

import { $, attribute, h, text } from "./dom.js";
import * as format from "./format.js";
import { ask } from "./stream.js";
import { state } from "./store.js";
import { Table } from "./table.js";

const SEARCH_MS = 150;
const DROPPED_MS = 5000; // by then the console has looked again
const ASK_MS = 5000; // the console looks most often at what was asked for within ten seconds

export class List {
  /**
   * `about`: {panel (its id), path, things ("topics"), columns, order: {sort, descending}, internal (its toggle's words),
   * none (what to say of an empty list, also as a function), command (which lists all), silent() (why nothing can be told yet, if so)}.
   * Columns and rows as in `Table`; rows have names.
   */
  constructor(about) {
    this.about = about;
    this.panel = $(about.panel);
    this.wanted = { search: "", page: 0, internal: false, ...about.order };
    this.told = { loaded: false, error: "", seen_ms: 0, version: -1 };
    this.found = null;
    this.dropped = new Map();
    this.problem = "";
    this.table = new Table(about.columns, this.wanted, () => this.turn(0));
    this.table.element.hidden = true;
    this.say = h("p", { class: "empty", role: "status" }, `Loading ${about.things}…`);
    this.range = h("span", { class: "quiet", role: "status" });
    this.buttons = ["First", "Previous", "Next", "Last"].map((words) =>
      h("button", { type: "button", class: "ghost", "aria-label": `${words} page of ${about.things}`, onclick: () => this.press(words) }, words));
    this.pager = h("p", { class: "pager", hidden: true }, this.range, h("span", { class: "pager-buttons" }, this.buttons));
    this.panel.append(this.makeTools(), this.table.element, this.say, this.pager);
    document.addEventListener("visibilitychange", () => this.show());
    setInterval(() => state.connection === "live" && this.ask(), ASK_MS);
  }

  makeTools() {
    const { things, internal } = this.about;
    const search = h("input", {
      type: "search", class: "find", placeholder: `Search ${things}`, "aria-label": `Search ${things} by a part of the name`,
      autocomplete: "off", spellcheck: "false", maxlength: 255,
      oninput: () => {
        clearTimeout(this.typing);
        this.typing = setTimeout(() => this.turn(0, { search: search.value.trim() }), SEARCH_MS);
      },
    });
    const all = internal && h("input", { type: "checkbox", onchange: () => this.turn(0, { internal: all.checked }) });
    return h("div", { class: "list-tools" }, search, internal && h("label", { class: "toggle" }, all, internal));
  }

  /** What the console says of the list; asks for the page anew if it has changed. */
  renew(told) {
    const isNew = told.version !== this.told.version;
    this.told = told;
    if (isNew) this.ask();
    this.render();
  }

  /**
   * This was deleted here: its row goes now, not when the console has looked, or the rows below would move up when
   * somebody is about to click on one of them.
   */
  drop(name) {
    this.dropped.set(name, Date.now() + DROPPED_MS);
    this.table.open.delete(name);
    this.render();
  }

  /** The rows found, without those that are about to go. */
  rows() {
    const rows = this.found?.rows ?? [];
    const listed = new Set(rows.map((row) => row.name));
    for (const [name, until] of this.dropped) if (!listed.has(name) || until < Date.now()) this.dropped.delete(name);
    return rows.filter((row) => !this.dropped.has(row.name));
  }

  /** It may have come into view. */
  show() {
    if (this.stale) this.ask();
  }

  turn(page, wanted = {}) {
    Object.assign(this.wanted, wanted, { page });
    this.ask();
  }

  press(words) {
    const { page, pages } = this.found;
    const to = { First: 0, Previous: page - 1, Next: page + 1, Last: pages - 1 }[words];
    if (to !== page && to >= 0 && to < pages) this.turn(to);
  }

  /** One question at a time; the last one counts. */
  async ask() {
    this.stale = document.hidden || this.panel.hidden || this.asking;
    if (this.stale) return;
    this.asking = true;
    const wanted = { ...this.wanted };
    try {
      const found = await ask(this.about.path, wanted);
      if (wanted.page === this.wanted.page) this.wanted.page = found.page; // the list may have become shorter
      this.found = found;
      this.problem = "";
    } catch (error) {
      this.problem = error.message;
    }
    this.asking = false;
    if (this.stale) await this.ask();
    else this.render();
  }

  render() {
    const rows = this.rows();
    const figures = JSON.stringify(rows, (name, value) => (name === "seen_ms" ? undefined : value));
    if (figures !== this.figures) this.table.render(rows); // drawing the same anew would end a selection of text
    this.figures = figures;
    this.table.element.hidden = rows.length === 0;
    const [words, isBad] = this.words(rows.length);
    this.say.hidden = words === "";
    this.say.className = isBad ? "empty bad" : "empty";
    text(this.say, words);
    this.pager.hidden = rows.length === 0;
    if (rows.length) this.renderPager();
  }

  /** What there is to say below the rows, and whether it is bad. */
  words(shown) {
    const { things, none, command } = this.about;
    const error = this.problem || this.told.error;
    if (error && !shown) return [error, true];
    if (error) return [`As last seen${this.told.seen_ms ? ` at ${format.clock(this.told.seen_ms)}` : ""}: ${error}`, true];
    const silent = this.found?.loaded ? "" : (this.about.silent?.() ?? "");
    if (silent) return [silent, true];
    if (!this.found?.loaded) return [`Loading ${things}…`, false];
    if (!shown) return [this.wanted.search ? `No ${things} have “${this.wanted.search}” in their names.` : typeof none === "function" ? none() : none, false];
    const { unseen, left_out: leftOut } = this.found;
    const some = unseen ? `The figures of ${format.count(unseen)} ${things} are still being asked for. ` : "";
    const more = leftOut ? `${format.count(leftOut)} more ${things} are not listed here. To see all: ${command}` : "";
    return [(some + more).trim(), false];
  }

  renderPager() {
    const { page, pages, page_rows: size, matching, total, rows } = this.found;
    const first = page * size + 1;
    const span = pages > 1 ? `${format.count(first)} to ${format.count(first + rows.length - 1)} of ` : "";
    const of = matching < total ? `${format.count(matching)} found in ${format.count(total)}` : format.count(total);
    text(this.range, `${span}${of} ${total === 1 ? this.about.things.replace(/s$/, "") : this.about.things}`);
    const enabled = [page > 0, page > 0, page < pages - 1, page < pages - 1];
    this.buttons.forEach((button, place) => {
      button.hidden = pages <= 1;
      attribute(button, "aria-disabled", !enabled[place]);
    });
  }
}

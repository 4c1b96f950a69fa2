// Single messages and entries: search forms, result lists, and a dialog with all of one.

import { $, h, text } from "./dom.js";
import * as format from "./format.js";
import { openSheet } from "./forms.js";
import { ask } from "./stream.js";
import { plain } from "./table.js";

const PAGE = 20;
const NEWEST = "newest";
const SENT_MS = 500;
const BY = { time: "Topic and time", offset: "Queue and offset", key: "Key", unique: "Message id (the producer's)", id: "Offset message id" };

const ORDER = { newest: "Newest first", oldest: "Oldest first" };

const form = {};
const entries = {};
let asked = 0;

export function start() {
  startMessages();
  startEntries();
}

// --- messages --------------------------------------------------------------------------------------------------------

function startMessages() {
  form.by = h("select", { id: "search-by" }, Object.entries(BY).map(([value, words]) => h("option", { value }, words)));
  form.topic = h("input", { id: "search-topic", list: "topic-names", autocomplete: "off", maxlength: 127, spellcheck: "false" });
  form.names = h("datalist", { id: "topic-names" });
  form.queue = h("input", { id: "search-queue", type: "number", min: 0, max: 65535, step: 1 });
  form.offset = h("input", { id: "search-offset", type: "number", min: 0, step: 1, placeholder: "newest" });
  form.since = h("input", { id: "search-since", type: "datetime-local", step: 1 });
  form.before = h("input", { id: "search-before", type: "datetime-local", step: 1 });
  form.order = h("select", { id: "search-order" }, Object.entries(ORDER).map(([value, words]) => h("option", { value }, words)));
  form.key = h("input", { id: "search-key", autocomplete: "off", maxlength: 1024, spellcheck: "false" });
  form.id = h("input", { id: "search-id", autocomplete: "off", maxlength: 128, spellcheck: "false" });
  form.fields = {
    topic: field("Topic", form.topic, "grow"), queue: field("Queue", form.queue, "small"), offset: field("Offset", form.offset, "small"),
    since: field("Stored from", form.since, ""), before: field("Stored before", form.before, ""), order: field("Order", form.order, ""),
    key: field("Key", form.key, "grow"), id: field("Message id", form.id, "grow"),
  };
  form.say = h("p", { class: "result-line", role: "status" }, "Choose a topic to see its newest messages, or search by key or id.");
  form.results = h("div");
  form.element = h("form", { class: "search", novalidate: true, onsubmit: (event) => { event.preventDefault(); search(); } },
    field("Find by", form.by, ""), Object.values(form.fields), h("button", { type: "submit", class: "strong" }, "Find"), form.names);
  form.by.addEventListener("change", () => {
    showFields();
    searchByTime();
  });
  for (const input of [form.topic, form.queue, form.since, form.before, form.order]) input.addEventListener("change", searchByTime);
  $("panel-messages").append(form.element, form.say, form.results);
  showFields();
}

/** A labelled field of a search form. */
export function field(label, input, size) {
  return h("div", { class: `field ${size}` }, h("label", { for: input.id }, label), input);
}

function showFields() {
  const by = form.by.value;
  const wanted = { time: ["topic", "queue", "since", "before", "order"], offset: ["topic", "queue", "offset"], key: ["topic", "key"], unique: ["topic", "key"], id: ["id"] }[by];
  for (const [name, element] of Object.entries(form.fields)) element.hidden = !wanted.includes(name);
  form.queue.placeholder = by === "time" ? "all" : "0";
}

/** Fill in the form for a queue, and show its newest messages. */
export function browse(topic, queue) {
  form.by.value = "time";
  showFields();
  form.since.value = form.before.value = "";
  form.order.value = "newest";
  form.topic.value = topic;
  form.queue.value = String(queue);
  form.topic.focus();
  search();
}

/** Topics to choose from. */
export function offerTopics(topics) {
  form.names.replaceChildren(...topics.map((name) => h("option", { value: name })));
  if (form.topic.value !== "" || topics.length === 0) return;
  form.topic.value = topics[0];
  if (!$("panel-messages").hidden) firstMessages();
}

/** Show the newest ones, the first time that there is a topic. */
export function firstMessages() {
  if (form.shown || form.topic.value === "") return;
  searchByTime();
}

/** A message was sent from this page: show it soon, if its topic is shown. */
export function sent(topic) {
  if (!$("panel-messages").hidden && form.topic.value.trim() === topic) setTimeout(searchByTime, SENT_MS);
}

/** What is shown without being asked for: nothing that looks through an index. */
function searchByTime() {
  if (form.by.value === "time" && form.topic.value.trim() !== "") search();
}

const milliseconds = (input) => (input.value === "" ? {} : { [input === form.since ? "since_ms" : "before_ms"]: new Date(input.value).getTime() });

/** `at`: the offset, or what the page before said of the `next` one; `before`: the same of the pages before this. */
async function search(at = "", before = []) {
  form.shown = true;
  const by = form.by.value;
  const topic = form.topic.value.trim();
  const queue = form.queue.value.trim();
  const offset = at || form.offset.value.trim();
  const wanted = {
    time: {
      by, topic, after: at, count: PAGE, order: form.order.value, ...(queue === "" ? {} : { queue }),
      ...milliseconds(form.since), ...milliseconds(form.before),
    },
    offset: { by, topic, queue: queue || "0", offset: offset === "" || at === NEWEST ? -1 : offset, count: PAGE },
    key: { by, topic, key: form.key.value.trim() },
    unique: { by, topic, key: form.key.value.trim() },
    id: { by, id: form.id.value.trim() },
  }[by];
  const mine = (asked += 1);
  text(form.say, "Searching…");
  let found;
  try {
    found = await ask("/api/messages", wanted);
  } catch (error) {
    if (mine !== asked) return;
    form.say.replaceChildren(error.message);
    form.results.replaceChildren(h("p", { class: "empty bad" }, "Nothing to show."));
    return;
  }
  if (mine !== asked) return;
  ({ time: showByTime, offset: showBack }[by] ?? showFound)(found, at, before);
}

/** A button that turns a list; `page` shows another part of it. */
const turn = (words, enabled, page) =>
  h("button", { type: "button", class: "ghost", "aria-disabled": String(!enabled), onclick: () => enabled && page() }, words);

function showRows(messages, none, words, ...buttons) {
  form.results.replaceChildren(messages.length ? messageTable(messages) : h("p", { class: "empty" }, none));
  form.say.replaceChildren(words, h("span", {}, buttons));
}

function showByTime(found, at, before) {
  const isBack = form.order.value === "newest";
  const isSpan = form.since.value !== "" || form.before.value !== "";
  const [next, other, first] = isBack ? ["Older", "Newer", "Newest"] : ["Newer", "Older", "Oldest"];
  const far = found.has_next && !found.next ? " This topic has too many queues to go further here." : "";
  const none = found.has_next
    ? `None here: they were removed. ${next} ones may be left.`
    : at ? `No ${next.toLowerCase()} messages are left.` : isSpan ? "No messages of this time." : "No messages yet.";
  showRows(found.messages, none,
    (at ? `${next} messages, the ${first.toLowerCase()} first.` : `The ${first.toLowerCase()} messages${isSpan ? " of this time" : ` at ${format.clock(found.as_of_ms)}`}.`) + far,
    turn(next, found.next !== "", () => search(found.next, [...before, at])),
    turn(other, before.length > 0, () => search(before[before.length - 1], before.slice(0, -1))),
    turn(first, true, () => search()));
}

/** A queue's messages from an offset backwards. */
function showBack(found) {
  const last = found.max_offset - 1;
  const newest = found.messages[0]?.offset ?? last;
  const oldest = found.messages[found.messages.length - 1]?.offset ?? found.min_offset;
  showRows(found.messages, "No messages at this offset.",
    last < found.min_offset ? "The queue is empty." : `The queue holds ${format.count(found.min_offset)} to ${format.index(last)}; the newest first.`,
    turn("Older", oldest > found.min_offset, () => search(String(oldest - 1))),
    turn("Newer", newest < last, () => search(String(Math.min(newest + PAGE, last)))),
    turn("Newest", true, () => search(NEWEST)));
}

/** What an index found, which has no end that one could ask for: some at a time. */
function showFound(found, _at, _before, first = 0) {
  const all = found.messages.length;
  const some = found.messages.slice(first, first + PAGE);
  const of = found.may_have_more ? `the newest ${all}; there may be older ones` : `${all} found`;
  showRows(some, "No matching messages.", all > PAGE ? `${first + 1} to ${first + some.length} of ${of}` : of,
    ...(all > PAGE
      ? [turn("Previous", first > 0, () => showFound(found, "", [], first - PAGE)), turn("Next", first + PAGE < all, () => showFound(found, "", [], first + PAGE))]
      : []));
}

function messageTable(messages) {
  return plain(
    [["Queue:offset", true], ["Stored", false, "time"], ["Tags"], ["Keys"], ["Bytes", true], ["Body", false, "body"]],
    messages.map((one) => [
      h("button", { type: "button", class: "linklike", "aria-label": `Show message ${one.offset} of queue ${one.queue}`, onclick: () => showMessage(one) }, `${one.queue}:${one.offset}`),
      format.moment(one.stored_ms), one.tags || "–", one.keys || "–", format.count(one.preview.bytes), one.preview.text,
    ]),
  );
}

export async function showMessage(one) {
  await showDetail(`Message ${one.offset} of queue ${one.queue} of ${one.topic}`, "/api/message", { topic: one.topic, queue: one.queue, offset: one.offset }, (found) => [
    ["Message id", h("span", {}, mono(found.message_id), " ", h("button", { type: "button", class: "ghost", onclick: () => showTrace(found.message_id) }, "Trace"))], ["Offset message id", mono(found.offset_message_id)], ["Tags", found.tags || "–"], ["Keys", found.keys || "–"],
    ["Stored", `${format.moment(found.stored_ms)} at ${found.store_host}`], ["Created", `${format.moment(found.born_ms)} at ${found.born_host}`],
    ["Location", `${format.count(found.size)} bytes at position ${format.count(found.position)}`],
    ["Redelivered", `${found.reconsume_times} times`],
    ...found.properties.map(([name, value]) => [`Property ${name}`, mono(value)]),
    ...(found.note ? [["Note", found.note]] : []),
  ]);
}

// --- the way of a message ---------------------------------------------------------------------------------------------

export function showTrace(id) {
  openSheet(`Trace of message ${id}`, async (body) => {
    let found;
    try {
      found = await ask("/api/trace", { id });
    } catch (error) {
      body.replaceChildren(h("p", { class: "empty bad" }, error.message));
      return;
    }
    body.replaceChildren(found.steps.length
      ? plain(
        [["Step"], ["Group"], ["Client"], ["Began", false, "time"], ["Took", true], ["Result"], ["At"]],
        found.steps.map((step) => [
          step.retries ? `${step.step} (try ${step.retries + 1})` : step.step, step.group || "–", step.host, format.moment(step.time_ms),
          step.cost_ms < 0 ? "–" : `${format.count(step.cost_ms)} ms`,
          step.step === "ended" ? "–" : step.step === "consumed" && step.cost_ms < 0 ? "not done yet" : step.ok ? "ok" : "failed",
          step.detail || "–",
        ]))
      : h("p", { class: "empty" }, "None. Producers and consumers with trace=True, and RocketMQ's with enableMsgTrace, write who sent and consumed a message."));
  });
}

// --- entries of a log that has no broker -----------------------------------------------------------------------------

function startEntries() {
  entries.index = h("input", { id: "entry-index", type: "number", min: 0, step: 1, placeholder: "newest" });
  entries.say = h("p", { class: "result-line", role: "status" }, "Committed entries, from any node.");
  entries.results = h("div");
  entries.element = h("form", { class: "search", novalidate: true, onsubmit: (event) => { event.preventDefault(); searchEntries(); } },
    field("Index", entries.index, "small"), h("button", { type: "submit", class: "strong" }, "Show entries"));
  $("panel-entries").append(entries.element, entries.say, entries.results);
}

/** Show the newest ones, the first time. */
export function firstEntries() {
  if (entries.shown) return;
  entries.shown = true;
  searchEntries();
}

async function searchEntries(index = entries.index.value.trim()) {
  const mine = (asked += 1);
  let found;
  try {
    found = await ask("/api/entries", { index: index === "" ? -1 : index, count: PAGE });
  } catch (error) {
    if (mine !== asked) return;
    entries.say.replaceChildren(error.message);
    entries.results.replaceChildren(h("p", { class: "empty bad" }, "Nothing to show."));
    return;
  }
  if (mine !== asked) return;
  const newest = found.entries[0]?.index ?? found.last;
  const oldest = found.entries[found.entries.length - 1]?.index ?? found.begin;
  entries.say.replaceChildren(
    `Committed: ${format.index(found.begin)} to ${format.index(found.last)}; the newest first`,
    h("span", {},
      turn("Older", oldest > found.begin, () => searchEntries(String(oldest - 1))),
      turn("Newer", newest < found.last, () => searchEntries(String(Math.min(newest + PAGE, found.last)))),
      turn("Newest", true, () => searchEntries(""))),
  );
  entries.results.replaceChildren(
    found.entries.length
      ? plain([["Index", true], ["Term", true], ["Kind"], ["Bytes", true], ["Body", false, "body"]],
        found.entries.map((one) => [
          h("button", { type: "button", class: "linklike", "aria-label": `Show entry ${one.index}`, onclick: () => showEntry(one.index) }, String(one.index)),
          String(one.term), one.kind.toLowerCase(), format.count(one.preview.bytes), one.preview.text,
        ]))
      : h("p", { class: "empty" }, "No entries here yet. Append one: dledger append hello"),
  );
}

const showEntry = (index) => showDetail(`Entry ${format.count(index)}`, "/api/entry", { index }, (found) => [
  ["Term", String(found.term)], ["Kind", found.kind.toLowerCase()], ["Position", `byte ${format.count(found.position)} in the log`],
]);

// --- all of one ------------------------------------------------------------------------------------------------------

const mono = (words) => h("span", { class: "mono" }, words);

let detailed = 0;

async function showDetail(title, path, parameters, facts) {
  const mine = (detailed += 1);
  let shown;
  try {
    const found = await ask(path, parameters);
    shown = [h("dl", { class: "facts" }, facts(found).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])), bodyOf(found.body)];
  } catch (error) {
    shown = [h("p", { class: "empty bad" }, error.message)];
  }
  if (mine !== detailed) return;
  text($("detail-title"), title);
  $("detail-body").replaceChildren(...shown);
  $("detail").showModal();
}

function bodyOf(body) {
  const isText = body.text !== null && body.bytes > 0;
  const content = h("pre", { class: "content", tabindex: 0, "aria-label": "Body" });
  const line = h("p", { class: "quiet" });
  const show = (asText) => {
    content.className = asText ? "content" : "content hex";
    content.textContent = asText ? body.text : body.hex;
    const shown = asText ? body.text_bytes : body.hex_bytes;
    line.textContent = shown < body.bytes ? `The first ${format.count(shown)} of ${format.count(body.bytes)} bytes.` : `${format.count(body.bytes)} bytes.`;
  };
  const choice = (words, asText, checked) => {
    const input = h("input", { type: "radio", name: "body-as", checked, onchange: () => show(asText) });
    return h("label", {}, input, h("span", {}, words));
  };
  show(isText);
  return h("section", {},
    h("div", { class: "card-head" }, h("h3", {}, "Body"),
      isText ? h("fieldset", { class: "segments" }, h("legend", { class: "hidden" }, "Show the body as"), choice("Text", true, true), choice("Hex", false, false)) : h("span", { class: "quiet" }, body.bytes ? "not text: shown in hex" : "empty")),
    content, line);
}

// What the page changes at brokers: messages, topics, the offsets of groups.

import { sent } from "./browser.js";
import { toast } from "./actions.js";
import { $, h } from "./dom.js";
import * as format from "./format.js";
import { askedFirst, openForm, wayBack } from "./forms.js";
import { showDeadLetters } from "./letters.js";
import { showMembers, UNLISTED } from "./clients.js";
import { ask, change } from "./stream.js";
import { can } from "./store.js";
import { plain } from "./table.js";

const PERMISSIONS = [["rw", "read and write"], ["r", "read only"], ["w", "write only"], ["none", "nothing"]];
const LEVELS = ["none", "1 s", "5 s", "10 s", "30 s", "1 min", "2 min", "3 min", "4 min", "5 min", "6 min", "7 min", "8 min", "9 min", "10 min", "20 min", "30 min", "1 h", "2 h"];
const TYPES = [["UNSPECIFIED", "of any type"], ["NORMAL", "normal"], ["FIFO", "FIFO: in order by message group"], ["DELAY", "delayed"], ["TRANSACTION", "in transactions"], ["PRIORITY", "by priority"], ["MIXED", "mixed"]];
const QUEUES_MAX = 1024;
const bars = {};

const tool = (words, label, work, danger = false) =>
  h("button", { type: "button", class: danger ? "ghost danger" : "ghost", "aria-label": label, "data-key": label, onclick: work }, words);

export function start() {
  bars.topics = h("p", { class: "tools", hidden: true }, tool("New topic…", "Create a topic", newTopic));
  bars.messages = h("p", { class: "tools", hidden: true }, tool("Send a message…", "Send a message", () => sendMessage("")));
  document.querySelector("#panel-topics .list-tools").append(bars.topics);
  $("panel-messages").prepend(bars.messages);
}

/** Show what this console may do. */
export function render() {
  bars.topics.hidden = !can("put-topic");
  bars.messages.hidden = !can("send");
}

/** The buttons of one topic, as `/api/topic` has it, which is a row of `list`. */
export function topicTools(topic, list) {
  const name = topic.name;
  return h("p", { class: "tools" },
    can("send") ? tool("Send a message…", `Send a message to ${name}`, () => sendMessage(name)) : null,
    can("put-topic") ? tool("Change…", `Change topic ${name}`, () => changeTopic(topic)) : null,
    can("delete-topic") ? tool("Delete…", `Delete topic ${name}`, () => remove("delete-topic", name, list, "tab-topics"), true) : null);
}

/** The same of one consumer group, as `/api/group` has it. */
export function groupTools({ name, rows, all_rows: all, dead_letters: dead }, list) {
  const topics = all > rows.length ? [] : rows.map((row) => row.topic); // too many to choose from
  return h("p", { class: "tools" },
    tool("Members", `Members of ${name}`, () => showMembers(name)),
    tool(dead ? `Dead letters (${format.count(dead)})` : "Dead letters", `Dead letters of ${name}`, () => showDeadLetters(name)),
    can("reset-offsets") ? tool("Reset offsets…", `Reset the offsets of ${name}`, () => resetOffsets(name, topics), true) : null,
    can("delete-group") ? tool("Delete…", `Delete group ${name}`, () => remove("delete-group", name, list, "tab-groups"), true) : null);
}

// --- messages --------------------------------------------------------------------------------------------------------

function sendMessage(topic) {
  openForm({
    title: "Send a message",
    fields: [
      { name: "topic", label: "Topic", value: topic || $("search-topic")?.value || "", list: "topic-names", maxlength: 127, size: "half" },
      { name: "queue", label: "Queue", kind: "number", min: 0, step: 1, placeholder: "any", size: "quarter" },
      { name: "delay_level", label: "Delay", kind: "select", options: LEVELS.map((words, level) => [String(level), level ? `${level}: ${words}` : words]), value: "0", size: "quarter" },
      { name: "tags", label: "Tag", maxlength: 256, size: "half" },
      { name: "keys", label: "Keys, separated by blanks", maxlength: 1024, size: "half" },
      { name: "body", label: "Body", kind: "textarea" },
    ],
    submit: "Send",
    send: (values) => change("send", { ...values, delay_level: Number(values.delay_level) }),
    done: (answer) => (sent(answer.topic), [
      h("span", {}, answer.delay_level
        ? `Stored. It waits at delay level ${answer.delay_level}, and is then delivered to ${answer.topic}.`
        : `Stored in queue ${answer.queue} of ${answer.topic} at offset ${answer.offset}.`),
      h("span", {}, "Offset message id ", h("span", { class: "mono" }, answer.offset_message_id)),
    ]),
  });
}

// --- topics ----------------------------------------------------------------------------------------------------------

const queueFields = (write, read) => [
  { name: "write_queues", label: "Write queues", kind: "number", min: 1, max: QUEUES_MAX, step: 1, value: String(write), size: "half", hint: "Get new messages" },
  { name: "read_queues", label: "Read queues", kind: "number", min: 1, max: QUEUES_MAX, step: 1, value: String(read), size: "half", hint: "Are consumed" },
];

const keptFields = (type, retention) => [
  { name: "message_type", label: "Messages", kind: "select", options: TYPES, value: type || "UNSPECIFIED", size: "half" },
  { name: "retention", label: "Retention", maxlength: 32, value: retention || "log", size: "half", hint: "Such as 36h; log: as long as the log" },
];

const closing = (answer) => {
  toast(answer.message, false);
  return null;
};

function newTopic() {
  openForm({
    title: "New topic",
    fields: [
      { name: "name", label: "Name", maxlength: 127, hint: "Letters, digits, - and _" },
      ...queueFields(4, 4),
      { name: "permission", label: "Consumers and producers may", kind: "select", options: PERMISSIONS, value: "rw" },
      ...keptFields("", ""),
    ],
    submit: "Create",
    send: (values) => change("put-topic", { ...values, create: true }),
    done: closing,
  });
}

function changeTopic({ name, write_queues: write, read_queues: read, permission, message_type: type, retention }) {
  const value = { 6: "rw", 4: "r", 2: "w", 0: "none" }[permission & 6];
  openForm({
    title: `Change topic ${name}`,
    intro: "To remove queues without losing messages, first lower only the write queues, and lower the read queues once they are consumed.",
    fields: [...queueFields(write, read), { name: "permission", label: "Consumers and producers may", kind: "select", options: PERMISSIONS, value }, ...(type === undefined ? [] : keptFields(type, retention))],
    submit: "Change",
    send: (values) => askedFirst((fields) => change("put-topic", fields), { ...values, name }),
    done: closing,
  });
}

async function remove(what, name, list, tab) {
  const goBack = wayBack();
  const work = (fields) => {
    if (fields.confirmed) list.table.close(name);
    return change(what, fields);
  };
  try {
    const answer = await askedFirst(work, { name });
    if (answer === null) goBack();
    else {
      list.drop(name);
      toast(answer.message, false);
      $(tab).focus();
    }
  } catch (error) {
    toast(error.message, true);
    goBack();
  }
}

// --- offsets of groups -----------------------------------------------------------------------------------------------

const isRetry = (topic) => topic.startsWith("%RETRY%");

function resetOffsets(group, topics) {
  const names = [...new Set(topics)].sort((one, other) => isRetry(one) - isRetry(other)); // retries are seldom meant
  let plan = null;
  let chosen = "";
  const shown = h("div", { class: "plan", "aria-live": "polite" });
  const choice = (values) => JSON.stringify([values.topic, values.to, values.time]);
  const redraw = (values) => {
    if (plan === null || choice(values) === chosen) return;
    plan = null;
    shown.replaceChildren();
    form.button.textContent = "Show what it does";
    form.button.className = "strong";
  };
  const form = openForm({
    title: `Reset the offsets of ${group}`,
    intro: "The group continues elsewhere: messages are skipped, or delivered again. First you see what changes in each queue.",
    fields: [
      names.length
        ? { name: "topic", label: "Topic", kind: "select", options: names.map((one) => [one, one]), value: names[0], size: "half" }
        : { name: "topic", label: "Topic", list: "topic-names", maxlength: 127, size: "half" },
      { name: "to", label: "Continue", kind: "select", options: [["first", "at the first message (repeat all)"], ["time", "at a time"], ["last", "after the last message (skip all)"]], value: "first", size: "half" },
      { name: "time", label: "Time, as this browser has it", kind: "time", step: 1, when: (values) => values.to === "time" },
    ],
    submit: "Show what it does",
    more: shown,
    changed: redraw,
    send: async (values) => {
      if (plan !== null) {
        const places = Object.fromEntries(plan.rows.map((row) => [row.queue, row.to]));
        return change("reset-offsets", { group, topic: plan.topic, places });
      }
      const at = values.to === "time" ? new Date(values.time).getTime() : values.to;
      if (Number.isNaN(at)) throw Object.assign(new Error("Choose a time"), { answer: { field: "time" } });
      const found = await ask("/api/reset-plan", { group, topic: values.topic, to: at });
      if (choice(form.values()) !== choice(values)) return null; // chosen anew meanwhile
      chosen = choice(values);
      plan = found;
      shown.replaceChildren(...planOf(found));
      form.button.textContent = `Reset ${found.rows.length === 1 ? "1 queue" : `${found.rows.length} queues`}`;
      form.button.className = "strong danger";
      return null;
    },
    done: closing,
  });
}

/** How a reset changes what a group gets of a queue: negative if it gets messages again. */
const skippedBy = (row) => row.to - Math.max(row.from, row.min_offset);

function planOf(plan) {
  const skipped = plan.rows.reduce((sum, row) => sum + Math.max(skippedBy(row), 0), 0);
  const again = plan.rows.reduce((sum, row) => sum + (row.from < 0 ? 0 : Math.max(-skippedBy(row), 0)), 0);
  const messages = (count) => (count === 1 ? "1 message" : `${format.count(count)} messages`);
  const sum = [
    skipped ? `${messages(skipped)} would be skipped and not delivered.` : "",
    again ? `${messages(again)} would be delivered again.` : "",
    skipped || again ? "" : "No message would be skipped or delivered again.",
  ];
  const running = {
    [-1]: "Whether consumers are connected is not known.",
    0: `No member of the group is connected. ${UNLISTED} If some run: they continue from there after their next commit.`,
  }[plan.members] ?? `${plan.members === 1 ? "1 consumer is" : `${plan.members} consumers are`} connected. Running consumers continue from there after their next commit, within 5 seconds by default. Clients other than this project's may not: stop them first.`;
  return [
    plain(
      [["Queue", true], ["From", true], ["To", true], ["Difference", true]],
      plan.rows.map((row) => [
        String(row.queue), row.from < 0 ? "–" : format.count(row.from), format.count(row.to), differenceOf(row),
      ]),
    ),
    h("p", {}, h("strong", {}, sum.filter(Boolean).join(" ")), ` ${running}`),
  ];
}

function differenceOf(row) {
  const skipped = skippedBy(row);
  if (row.from < 0) return skipped > 0 ? `${format.count(skipped)} skipped` : "from the first";
  if (skipped > 0) return `${format.count(skipped)} skipped`;
  return skipped < 0 ? `${format.count(-skipped)} again` : "none";
}

// A lane per node: who it is, its role over time, how far its log reaches, what can be done to it.

import { $, attribute, classes, color, context, h, reshape, shape, text } from "./dom.js";
import * as format from "./format.js";
import { can, isAlive, now, state } from "./store.js";

const ROLE = {
  leader: "Leader",
  follower: "Follower",
  candidate: "Candidate",
  plain: "Broker",
  unreachable: "No response",
  unknown: "Connecting…",
};
const GRID_MS = [[60_000, 10_000], [300_000, 60_000], [1_800_000, 300_000]];
const TAIL_MIN = 50;
// Less is what every busy moment looks like, and would only flicker.
const PENDING_SHOWN = 1000;
const BEHIND_SHOWN = 256 * 1024;

const lanes = new Map(); // node → its elements
let spanMs = 60_000;
let tailEntries = TAIL_MIN;
let doAction = () => {};

export function start(onAction) {
  doAction = onAction;
  for (const radio of document.querySelectorAll('input[name="span"]')) {
    radio.addEventListener("change", () => {
      spanMs = Number(radio.value) * 1000;
      drawStrips();
    });
  }
}

export const shownMs = () => spanMs;

/** Bring the lanes up to what the page knows. Elements stay, so that focus does. */
export function render() {
  const list = $("lanes");
  const buttons = can("kill") ? "" : can("transfer") ? " one-button" : " no-buttons";
  classes(list, `lanes${state.group?.kind === "broker" ? " no-buttons" : buttons}`);
  const present = new Set(state.nodes.map((node) => node.node));
  for (const [name, lane] of lanes) {
    if (!present.has(name)) {
      lane.item.remove();
      lanes.delete(name);
    }
  }
  tailEntries = tailLength();
  state.nodes.forEach((node, place) => {
    let lane = lanes.get(node.node);
    if (lane === undefined) lanes.set(node.node, (lane = makeLane(node.node)));
    if (list.children[place] !== lane.item) list.insertBefore(lane.item, list.children[place] ?? null);
    renderLane(lane, node);
  });
}

/** How many of the last entries the bars show: enough for the node that is furthest behind. */
function tailLength() {
  const alive = state.nodes.filter((node) => node.facts !== null);
  if (alive.length === 0 || state.group === null) return TAIL_MIN;
  const behind = alive.map(({ facts }) => facts.lag + Math.max(0, facts.end - facts.committed));
  const wanted = format.nice(Math.max(TAIL_MIN, 1.25 * Math.max(...behind)));
  // Grow at once, shrink only when much too long: a scale that flickers cannot be read.
  return wanted > tailEntries || wanted * 4 <= tailEntries ? wanted : tailEntries;
}

function makeLane(name) {
  const lane = { name, buttons: new Map() };
  lane.shape = shape("unknown");
  lane.role = h("span", {}, ROLE.unknown);
  lane.roleBox = h("span", { class: "role unknown" }, lane.shape, lane.role);
  lane.address = h("p", { class: "lane-address mono" });
  lane.note = h("p", { class: "lane-note" });
  lane.strip = h("canvas", { class: "strip", role: "img" });
  lane.stored = h("i", { class: "stored" });
  lane.flushed = h("i", { class: "flushed" });
  lane.committed = h("i", { class: "committed" });
  lane.tail = h("div", { class: "tail", role: "img" }, lane.stored, lane.flushed, lane.committed);
  lane.tailWords = h("div", { class: "tail-words", "aria-hidden": "true" }, h("span"), h("span"));
  lane.figures = {};
  const figures = h("dl", { class: "lane-figures" });
  for (const [key, words] of [["lag", "lag"], ["end", "end"], ["committed", "committed"], ["flushed", "flushed"], ["begin", "begin"]]) {
    lane.figures[key] = h("dd", { class: key }, "–");
    figures.append(h("dt", {}, words), lane.figures[key]);
  }
  lane.buttonBox = h("div", { class: "lane-buttons" });
  for (const action of ["transfer", "replace", "pause", "kill", "restart"]) {
    const button = h("button", { type: "button", class: action === "kill" ? "ghost danger" : "ghost", "data-action": action, hidden: true });
    button.addEventListener("click", () => {
      if (button.getAttribute("aria-disabled") !== "true") doAction(button.dataset.does, name, button);
    });
    lane.buttons.set(action, button);
    lane.buttonBox.append(button);
  }
  lane.item = h(
    "li",
    { class: "lane", "data-node": name },
    h("div", { class: "lane-who" },
      h("h3", { class: "lane-name" }, h("span", {}, name), lane.roleBox), lane.address, lane.note),
    h("div", { class: "lane-lines" }, lane.strip, lane.tail, lane.tailWords),
    figures,
    lane.buttonBox,
  );
  return lane;
}

function renderLane(lane, node) {
  reshape(lane.shape, node.state);
  classes(lane.roleBox, `role ${node.state}`);
  text(lane.role, node.state === "follower" && node.member?.role === "learner" ? "Learner" : ROLE[node.state]);
  attribute(lane.item, "data-state", node.state);
  lane.item.classList.toggle("old", node.facts !== null && !isAlive(node));
  text(lane.address, node.address === node.node ? "" : node.address || "address unknown");
  const [note, isBad] = noteOf(node);
  text(lane.note, note);
  attribute(lane.note, "title", note);
  classes(lane.note, isBad ? "lane-note bad" : "lane-note quiet");
  const facts = node.facts;
  const isBytes = state.group.unit === "bytes";
  const shown = isBytes ? format.bytes : format.index;
  for (const key of ["end", "committed", "flushed", "begin"]) text(lane.figures[key], facts ? shown(facts[key]) : "–");
  text(lane.figures.lag, facts ? (isBytes ? format.bytes(facts.lag) : format.count(facts.lag)) : "–");
  renderTail(lane, node);
  renderButtons(lane, node);
}

/** Whether a voter does not respond, which may be for good. */
const isLost = (node) => node.state === "unreachable" && node.member?.role === "voter";

/** What a learner is, how far it is, and what becomes of it. */
function learnerWords({ health, percent, rate, ready, intent }) {
  const words = ["learner"];
  if (health === "catching up" || health === "installing") words.push(`${health}${percent >= 0 ? ` ${percent} %` : ""}`);
  else if (health) words.push(health);
  if (rate > 0) words.push(`${format.bytes(rate)}/s`);
  if (intent) words.push(intent);
  else if (ready) words.push("could vote");
  return words;
}

function noteOf(node) {
  const facts = node.facts;
  const learner = node.member?.role === "learner" ? learnerWords(node.member) : null;
  const process = state.processes[node.node];
  if (node.state === "unreachable") {
    const why = { ended: "process exited", paused: "process paused", starting: "starting" }[process] ?? (node.error || "not responding");
    const seen = node.answered_ms > 0 ? ` · last seen ${format.clock(node.answered_ms)}` : "";
    return [[...(learner ?? []), `${why}${seen}`].join(" · "), process !== "starting"];
  }
  if (facts === null) return [(learner ?? []).join(" · "), false];
  if (facts.disk_full) return ["DISK FULL: appends refused", true];
  const worst = facts.conditions.find((one) => one.kind !== "no_standing" && one.kind !== "disk_full" && one.kind !== "peers_differ");
  if (worst) return [`${worst.kind.replaceAll("_", " ")}: ${worst.message}`, true];
  if (learner === null && !facts.voter) return ["cannot vote yet", true];
  const words = learner ?? [];
  if (facts.pending >= PENDING_SHOWN) words.push(`${format.count(facts.pending)} pending`);
  if (facts.flush_mode !== "sync") words.push(`flush ${facts.flush_mode}`);
  if (node.broker !== null) words.push(node.broker.role.replace("_", " ").toLowerCase());
  if (node.broker !== null && node.broker.behind_bytes >= BEHIND_SHOWN) words.push(`queues ${format.bytes(node.broker.behind_bytes)} behind`);
  if (node.broker !== null && node.broker.replication) words.push(node.broker.replication);
  if (node.state !== "plain") words.unshift(`term ${node.term}`);
  return [words.join(" · "), false];
}

function renderTail(lane, node) {
  const facts = node.facts;
  const end = state.group.end;
  // What is behind the node's own end; how far that is behind the leader's is the lag, which the leader knows best.
  const share = (value) => Math.max(0, Math.min(1, 1 - (facts.lag + Math.max(0, facts.end - value)) / tailEntries));
  const set = (bar, value) => {
    const scale = `scaleX(${facts === null ? 0 : share(value).toFixed(4)})`;
    if (bar.style.transform !== scale) bar.style.transform = scale;
  };
  set(lane.stored, facts?.end);
  set(lane.flushed, facts?.flushed);
  set(lane.committed, facts?.committed);
  const unit = state.group.unit;
  const first = Math.max(0, end - tailEntries + 1);
  const [left, right] = lane.tailWords.children;
  const shown = unit === "bytes" ? format.bytes : format.index;
  text(left, facts === null ? "" : `last ${unit === "bytes" ? format.bytes(tailEntries) : `${format.count(tailEntries)} entries`}, from ${shown(first)}`);
  text(right, facts === null ? "" : shown(end));
  attribute(lane.tail, "aria-label", facts === null
    ? `${node.node}: log unknown`
    : `${node.node}'s log ends at ${shown(facts.end)}, ${shown(facts.committed)} committed, ${format.count(facts.lag)} behind`);
}

function renderButtons(lane, node) {
  const process = state.processes[node.node] ?? null;
  const alive = isAlive(node);
  const leads = state.group.leader === node.node;
  const canLead = node.member === null || node.member.role === "voter";
  const set = (name, does, words, label, enabled) => {
    const button = lane.buttons.get(name);
    const allowed = can(does) && state.group.kind !== "broker";
    if (button.hidden === allowed) button.hidden = !allowed;
    if (!allowed) return;
    button.dataset.does = does;
    text(button, words);
    attribute(button, "aria-label", `${words}: ${label}`);
    attribute(button, "aria-disabled", String(!enabled));
  };
  const online = state.connection === "live";
  if (leads) set("transfer", "transfer", "Hand over", `${node.node} hands leadership to another node`, online && alive);
  else set("transfer", "transfer", "Make leader", `${node.node} takes over leadership`, online && alive && canLead && state.group.leader !== "");
  const runs = process === "running" || process === "paused";
  if (process === "paused") set("pause", "resume", "Resume", `SIGCONT for ${node.node}`, online);
  else set("pause", "pause", "Pause", `SIGSTOP for ${node.node}`, online && runs);
  if (isLost(node)) set("replace", "replace", "Replace…", `a new node instead of ${node.node}`, online && state.group.leader !== "");
  else lane.buttons.get("replace").hidden = true;
  set("kill", "kill", "Kill", `SIGKILL for ${node.node}`, online && runs);
  set("restart", "restart", runs ? "Restart" : process === "starting" ? "Starting…" : "Start",
    `${node.node}'s process`, online && process !== "starting");
}

// --- strips of roles over time ---------------------------------------------------------------------------------------

/** Draw all strips and the axis, as of now. */
export function drawStrips() {
  const to = now();
  const from = to - spanMs;
  const marks = state.events.filter((event) => event.kind === "action" && event.at_ms >= from);
  const told = new Set(state.nodes.filter((node) => node.facts?.role_told).map((node) => node.node)); // by the nodes
  for (const lane of lanes.values()) {
    const changes = state.changes.get(lane.name) ?? [];
    drawStrip(lane.strip, changes, marks.filter((mark) => mark.node === lane.name), from, to);
    const latest = changes[changes.length - 1];
    attribute(lane.strip, "aria-label", latest ? `${lane.name}: ${ROLE[latest[1]].toLowerCase()} ${changes.length > 1 || told.has(lane.name) ? "" : "at least "}since ${format.clock(latest[0])}` : `${lane.name}: no data yet`);
  }
  drawAxis(from, to);
}

function drawStrip(canvas, changes, marks, from, to) {
  const found = context(canvas);
  if (found === null) return;
  const { drawing, width, height } = found;
  const x = (at) => ((at - from) / (to - from)) * width;
  drawing.strokeStyle = color("line");
  drawing.lineWidth = 1;
  for (const at of gridTimes(from, to)) {
    drawing.beginPath();
    drawing.moveTo(Math.round(x(at)) + 0.5, 0);
    drawing.lineTo(Math.round(x(at)) + 0.5, height);
    drawing.stroke();
  }
  changes.forEach(([at, role, term], place) => {
    const end = changes[place + 1]?.[0] ?? to;
    if (end < from) return;
    const previous = changes[place - 1];
    const left = Math.max(0, x(at));
    drawRole(drawing, role, left, Math.max(x(end), left + 1.5), height, term, at > from && previous !== undefined && previous[2] !== term);
  });
  for (const mark of marks) {
    const at = x(mark.at_ms);
    drawing.fillStyle = color("ink");
    drawing.beginPath();
    drawing.moveTo(at - 5, 0);
    drawing.lineTo(at + 5, 0);
    drawing.lineTo(at, 8);
    drawing.fill();
  }
}

function drawRole(drawing, role, left, right, height, term, isNewTerm) {
  const middle = height / 2;
  const width = right - left;
  switch (role) {
    case "leader":
    case "plain":
      drawing.fillStyle = color("leader");
      drawing.fillRect(left, 3, width, height - 6);
      if (width > 62 && role === "leader") {
        drawing.fillStyle = color("on-leader");
        drawing.font = "600 12px system-ui, sans-serif";
        drawing.textBaseline = "middle";
        drawing.fillText(`term ${term}`, left + 8, middle + 1, width - 12);
      }
      break;
    case "follower":
      drawing.fillStyle = color("follower");
      drawing.fillRect(left, middle - 4, width, 8);
      if (isNewTerm) drawing.fillRect(left, middle - 9, 2, 18);
      break;
    case "candidate":
      drawing.save();
      drawing.beginPath();
      drawing.rect(left, 3, width, height - 6);
      drawing.clip();
      drawing.strokeStyle = color("candidate");
      drawing.lineWidth = 3;
      for (let at = left - height; at < right + height; at += 7) {
        drawing.beginPath();
        drawing.moveTo(at, height);
        drawing.lineTo(at + height, 0);
        drawing.stroke();
      }
      drawing.restore();
      break;
    case "unreachable":
      drawing.strokeStyle = color("unreachable");
      drawing.lineWidth = 2.5;
      drawing.setLineDash([5, 5]);
      drawing.beginPath();
      drawing.moveTo(left, middle);
      drawing.lineTo(right, middle);
      drawing.stroke();
      drawing.setLineDash([]);
      if (width > 12) {
        drawing.beginPath();
        drawing.moveTo(left + 2, middle - 5);
        drawing.lineTo(left + 12, middle + 5);
        drawing.moveTo(left + 12, middle - 5);
        drawing.lineTo(left + 2, middle + 5);
        drawing.stroke();
      }
      break;
  }
}

/** Whole multiples of a readable step, within the time shown. */
export function gridTimes(from, to) {
  const step = GRID_MS.find(([span]) => to - from <= span + 1)?.[1] ?? 300_000;
  const times = [];
  for (let at = Math.ceil(from / step) * step; at < to; at += step) times.push(at);
  return times;
}

function drawAxis(from, to) {
  const found = context($("axis"));
  if (found === null) return;
  const { drawing, width } = found;
  drawing.fillStyle = color("ink-quiet");
  drawing.font = "12px system-ui, sans-serif";
  drawing.textBaseline = "top";
  drawing.textAlign = "right";
  drawing.fillText("now", width, 3);
  drawing.textAlign = "center";
  const every = width < 420 ? 2 : 1;
  gridTimes(from, to).forEach((at) => {
    const step = GRID_MS.find(([span]) => to - from <= span + 1)?.[1] ?? 300_000;
    if (Math.round(at / step) % every !== 0) return;
    const x = ((at - from) / (to - from)) * width;
    if (x > 26 && x < width - 66) drawing.fillText(format.clock(at), x, 3);
  });
}

// What the buttons do: ask first where it matters, do it, show what came of it.

import { $, h, text } from "./dom.js";
import { confirmed, openForm } from "./forms.js";
import { act } from "./stream.js";
import { state } from "./store.js";

const TOAST_MS = 9000;
const TOASTS_MAX = 4;

/** What to ask before, or null. */
function question(action, node) {
  const leads = state.group.leader === node;
  switch (action) {
    case "transfer":
      return leads
        ? [`Take leadership from ${node}?`, "It goes to the most caught-up node. Appends wait briefly; no acknowledged entry is lost.", "Hand over"]
        : [`Make ${node} the leader?`, `${state.group.leader} hands over once ${node} has caught up. Appends wait briefly; no acknowledged entry is lost.`, `Make ${node} leader`];
    case "kill":
      return [`Kill ${node}?`, `Its process gets SIGKILL: no graceful stop, no final flush. ${leads ? "It is the leader: the others elect a successor, usually within a second. " : ""}No acknowledged entry is lost as long as a majority is up.`, `Kill ${node}`];
    case "restart":
      if (state.processes[node] !== "running") return null;
      return [`Restart ${node}?`, `Its process stops gracefully${leads ? ", handing over leadership," : ""} and starts again.`, `Restart ${node}`];
    default:
      return null;
  }
}

/** Ask who replaces a member. */
function replace(node) {
  openForm({
    title: `Replace ${node}`,
    intro: `For a machine that is lost for good: a new node gets the log, votes once it has caught up, and ${node} leaves. If only the disk of ${node} is lost, start it again with an empty directory instead.`,
    fields: [
      { name: "new", label: "Id of the new node", hint: "One that the group has not had.", required: true },
      { name: "address", label: "Its address for the other members", hint: "HOST:PORT, the port of peers.", required: true },
    ],
    submit: `Replace ${node}`,
    send: (fields) => act("replace", node, fields),
    done: (answer) => {
      toast(answer.message, false);
      return null;
    },
  });
}

export async function perform(action, node, button) {
  if (action === "replace") return replace(node);
  const asked = question(action, node);
  if (asked !== null && !(await confirmed(...asked, action === "kill"))) {
    button.focus();
    return;
  }
  button.focus();
  const wasLeader = state.group.leader === node;
  try {
    // A leader's own button means "to the next one".
    const answer = await act(action, action === "transfer" && wasLeader ? null : node);
    toast(answer.message, false);
  } catch (error) {
    toast(error.message, true);
  }
}

export function toast(words, isBad) {
  const box = $("toasts");
  const item = h("p", { class: isBad ? "toast bad" : "toast" }, isBad ? `Failed: ${words}` : words);
  box.append(item);
  while (box.children.length > TOASTS_MAX) box.firstChild.remove();
  setTimeout(() => item.remove(), TOAST_MS);
}

// Light, dark, or as the system has it; remembered on this machine.

import { $, forgetColors, text } from "./dom.js";

const ORDER = ["auto", "light", "dark"];

export function start(redraw) {
  const root = document.documentElement;
  const button = $("theme");
  const show = () => {
    text(button, `Theme: ${root.dataset.theme ?? "auto"}`);
    forgetColors();
    redraw();
  };
  button.addEventListener("click", () => {
    const next = ORDER[(ORDER.indexOf(root.dataset.theme ?? "auto") + 1) % ORDER.length];
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    try {
      localStorage.setItem("dledger-theme", next);
    } catch {
      // not remembered, then
    }
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();
}

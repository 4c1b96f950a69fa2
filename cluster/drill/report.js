"use strict";
// A line under the pointer, and the figures of that tenth of a second. The page says the same without it, in tables.
for (const plot of document.querySelectorAll(".plot")) {
  const svg = plot.querySelector("svg");
  const cursor = svg.querySelector(".cursor");
  const tip = plot.querySelector(".tip");
  const series = JSON.parse(plot.querySelector("script").textContent);
  const left = Number(svg.dataset.left), right = Number(svg.dataset.right), span = Number(svg.dataset.span);
  const hide = () => { cursor.setAttribute("visibility", "hidden"); tip.hidden = true; };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const bucket = series[Math.floor((at - left) / (right - left) * span * 10)];
    if (at < left || at > right || !bucket) { hide(); return; }
    const [seconds, acknowledged, failed, p50, p99] = bucket;
    const time = (value) => value === null ? "–" : value.toFixed(1) + " ms";
    cursor.setAttribute("x1", at); cursor.setAttribute("x2", at); cursor.setAttribute("visibility", "visible");
    tip.textContent = `${seconds.toFixed(1)} s\nacknowledged ${acknowledged.toFixed(0)}/s` +
      (failed ? `\nfailed ${failed.toFixed(0)}/s` : "") + `\nmedian ${time(p50)}, 99 % ${time(p99)}`;
    tip.hidden = false;
    const x = (event.clientX - plot.getBoundingClientRect().left);
    tip.style.left = (x > plot.clientWidth - 230 ? x - tip.offsetWidth - 14 : x + 14) + "px";
    tip.style.top = Math.max(0, event.clientY - plot.getBoundingClientRect().top - 30) + "px";
  });
  svg.addEventListener("pointerleave", hide);
}

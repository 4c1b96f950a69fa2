"use strict";
// Saves a picture of the page as one SVG or PNG file that looks as it does here, theme included. Without this script the
// page is complete, and has no buttons.
const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "opacity", "visibility",
  "font-family", "font-size", "font-weight", "paint-order"];
const PNG_SCALE = 2;

function standalone(svg) {
  const copy = svg.cloneNode(true);
  const { width, height } = svg.viewBox.baseVal;
  const inside = [...copy.querySelectorAll("*")];
  [...svg.querySelectorAll("*")].forEach((element, at) => {
    const style = getComputedStyle(element);
    for (const name of STYLES) inside[at].style.setProperty(name, style.getPropertyValue(name));
  });
  for (const element of inside) if (element.matches(".cursor")) element.remove();
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  copy.style.setProperty("background", getComputedStyle(svg.closest(".card") ?? document.body).backgroundColor);
  return new XMLSerializer().serializeToString(copy);
}

function save(blob, svg, ending) {
  const link = document.createElement("a");
  const title = svg.querySelector("title").textContent;
  link.download = title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") + ending;
  link.href = URL.createObjectURL(blob);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function savePng(svg) {
  const { width, height } = svg.viewBox.baseVal;
  const image = new Image();
  image.addEventListener("load", () => {
    const canvas = document.createElement("canvas");
    canvas.width = width * PNG_SCALE;
    canvas.height = height * PNG_SCALE;
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => save(blob, svg, ".png"), "image/png");
  });
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(standalone(svg));
}

for (const line of document.querySelectorAll(".save")) {
  const svg = line.closest(".picture").querySelector("svg");
  line.hidden = false;
  line.addEventListener("click", (event) => {
    if (event.target.dataset.as === "svg") save(new Blob([standalone(svg)], { type: "image/svg+xml" }), svg, ".svg");
    if (event.target.dataset.as === "png") savePng(svg);
  });
}

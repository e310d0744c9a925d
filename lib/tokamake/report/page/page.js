// Draws the figures one after another, so that the page can be read meanwhile.
"use strict";
const plots = new Map();

async function draw(script) {
  const holder = document.getElementById(script.dataset.figure);
  const item = JSON.parse(script.textContent);
  item.target_id = holder.id;
  const manager = await Bokeh.embed.embed_item(item);
  const plot = manager.roots[0].model;
  // A finger that moves over a figure scrolls the page.
  if (matchMedia("(pointer: coarse)").matches) plot.toolbar.active_drag = null;
  plots.set(holder.id, plot);
  holder.addEventListener("keydown", (event) => zoom(event, plot));
  holder.dataset.drawn = "yes";
}

function zoom(event, plot) {
  const range = plot.x_range;
  if (typeof range.start !== "number") return;
  const width = range.end - range.start, moves = {
    "+": [0.1, -0.1], "=": [0.1, -0.1], "-": [-0.125, 0.125],
    ArrowLeft: [-0.1, -0.1], ArrowRight: [0.1, 0.1],
  };
  if (event.key === "0" || event.key === "Escape") {
    plot.reset.emit();
  } else if (moves[event.key]) {
    const [left, right] = moves[event.key];
    range.setv({start: range.start + left * width, end: range.end + right * width});
    event.preventDefault();
  }
}

// A click on a name hides its curve: in its figure, or, above several figures, in all of them.
document.addEventListener("click", (event) => {
  const button = event.target.closest(".legend button");
  if (!button) return;
  const shown = button.getAttribute("aria-pressed") === "false";
  const figure = button.closest("figure.plot");
  const scope = figure || button.closest("section");
  for (const other of scope.querySelectorAll(".legend button"))
    if (other.dataset.line === button.dataset.line) other.setAttribute("aria-pressed", String(shown));
  for (const holder of scope.querySelectorAll(".canvas"))
    for (const renderer of plots.get(holder.id)?.renderers ?? [])
      if (renderer.name === button.dataset.line) renderer.visible = shown;
});

(async () => {
  for (const script of document.querySelectorAll("script[data-figure]")) {
    try { await draw(script); } catch (error) { console.error(script.dataset.figure, error); }
    await new Promise((resume) => setTimeout(resume));
  }
  document.documentElement.dataset.drawn = "yes";
})();

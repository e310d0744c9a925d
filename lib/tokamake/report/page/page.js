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
  if (form?.closest("section").contains(holder))
    plot.on_event("tap", (event) => {
      const found = nearest(plot, event);
      if (found) (trace(...found) ?? form).scrollIntoView({block: "center"});
    });
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

// Documents of a step: a click on a curve, or the form, names it. Bad steps have a table of them.
const form = document.querySelector("form.trace");

function trace(run, step) {
  const [choice, input, output] = form.querySelectorAll("select, input, output");
  const option = [...choice.options].find((each) => each.dataset.run === run) ?? choice.options[0];
  choice.value = option.value;
  input.value = step;
  output.firstChild.textContent = `tokamake trace-sample ${choice.value} ${step} 0`;
  for (const batch of document.querySelectorAll("details.batch"))
    batch.open = batch.dataset.run === option.dataset.run && Number(batch.dataset.step) === step;
  return document.querySelector("details.batch[open]");
}

// Run and step of the visible curve that is nearest to a point; a bad step nearby comes first, most
// of all one of the same run. Of several runs, only curves with the name of a run count.
function nearest(plot, event) {
  const {start, end} = plot.x_range, margin = (end - start) / 60;
  const runs = [...form.querySelectorAll("option")].map((each) => each.dataset.run);
  let best = {};
  for (const renderer of plot.renderers) {
    if (!renderer.visible || (runs.length > 1 && !runs.includes(renderer.name))) continue;
    const {x, y} = renderer.data_source.data;
    for (let i = 0; i < x.length; i++) {
      const gap = Math.abs(x[i] - event.x), rise = Math.abs(y[i] - event.y);
      if (best.gap === undefined || gap < best.gap || (gap === best.gap && rise < best.rise))
        best = {gap, rise, run: renderer.name, step: Math.round(x[i])};
    }
  }
  if (best.run === undefined) return null;
  const bad = [...document.querySelectorAll("details.batch")].map((each) => each.dataset)
    .filter((each) => Math.abs(each.step - event.x) < margin)
    .sort((a, b) => (b.run === best.run) - (a.run === best.run)
      || Math.abs(a.step - event.x) - Math.abs(b.step - event.x))[0];
  return bad ? [bad.run, Number(bad.step)] : [best.run, best.step];
}

if (form) {
  const chosen = () => {
    const [choice, input] = form.querySelectorAll("select, input");
    trace(choice.selectedOptions[0].dataset.run, Number(input.value));
  };
  form.addEventListener("input", chosen);
  form.addEventListener("submit", (event) => { event.preventDefault(); chosen(); });
  chosen();
}

(async () => {
  for (const script of document.querySelectorAll("script[data-figure]")) {
    try { await draw(script); } catch (error) { console.error(script.dataset.figure, error); }
    await new Promise((resume) => setTimeout(resume));
  }
  document.documentElement.dataset.drawn = "yes";
})();

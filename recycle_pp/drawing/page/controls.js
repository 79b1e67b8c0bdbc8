// Keys, buttons, the panel at the side and the legend. Also starts the page.

function stepOp(key) {
  const pane = state.cursor === EMPTY ? inView()[0] : state.pane, chart = state.charts[pane];
  if (!chart.n) return;
  if (state.cursor === EMPTY) return point(pane, chart.first[shownRows(chart).find((r) => chart.first[r] < chart.first[r + 1])], true);
  const row = rowOf(chart, state.cursor), t = (chart.start[state.cursor] + chart.end[state.cursor]) / 2;
  if (key === "ArrowRight" && state.cursor + 1 < chart.first[row + 1]) point(pane, state.cursor + 1, true);
  if (key === "ArrowLeft" && state.cursor > chart.first[row]) point(pane, state.cursor - 1, true);
  if (key !== "ArrowUp" && key !== "ArrowDown") return;
  const by = key === "ArrowUp" ? -1 : 1;
  const rows = shownRows(chart);
  for (let at = rows.indexOf(row) + by; at >= 0 && at < rows.length; at += by) {
    const r = rows[at];
    if (chart.first[r] === chart.first[r + 1]) continue;  // the row of a dead worker
    return point(pane, Math.min(firstAfter(chart, r, t), chart.first[r + 1] - 1), true);
  }
}

function pan(dx, dy) {
  const v = state.view, by = dx * (v.t1 - v.t0);
  v.t0 += by;
  v.t1 += by;
  v.top += (dy * panes()[0].h) / v.row;
  changed();
}

const KEYS = {
  ArrowLeft: () => pan(-0.15, 0), ArrowRight: () => pan(0.15, 0), ArrowUp: () => pan(0, -0.2), ArrowDown: () => pan(0, 0.2),
  "+": () => zoomTime(0.75), "=": () => zoomTime(0.75), "-": () => zoomTime(1 / 0.75),
  "]": () => zoomRows(0.75), "[": () => zoomRows(1 / 0.75),
  0: () => { fit(); draw(); }, Home: () => { fit(); draw(); },
  ".": () => go(state.step + 1), PageDown: () => go(state.step + 1), ",": () => go(state.step - 1), PageUp: () => go(state.step - 1),
  c: compare, f: fold, t: theme, "/": () => $("find").focus(), "?": () => $("keys").showModal(),
  Enter: () => state.cursor !== EMPTY && select(state.charts[state.pane].microbatch[state.cursor]),
  Escape: () => { state.cursor = EMPTY; $("tip").hidden = true; select(-1); },
};

document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || $("keys").open) return;
  const field = e.target instanceof HTMLInputElement, button = e.target instanceof HTMLButtonElement;
  if (field && e.key !== "Escape") return;
  if (field) canvas.focus();
  if (button && (e.key === "Enter" || e.key === " ")) return;
  if (e.shiftKey && e.key.startsWith("Arrow")) stepOp(e.key);
  else if (KEYS[e.key]) KEYS[e.key]();
  else return;
  e.preventDefault();
});

function go(step) {
  if (step < 0 || step >= job.steps.length) return;
  $("slider").value = step;
  showStep(step);
}

function compare() {
  const n = state.charts.length;
  if (n < 2) return;
  state.shown = state.shown === null ? 0 : state.shown + 1 < n ? state.shown + 1 : null;
  fit();
  panel();
  draw();
}

// Switches between all rows and the rows in meta.groups.
function fold() {
  folding = !folding;
  fit();
  panel();
  draw();
}

function theme() {
  const root = document.documentElement, dark = root.dataset.theme !== "dark";
  root.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = dark ? "Light" : "Dark";
  ink = colours();
  if (state.view) draw();
}

function element(tag, text, className) {
  const e = document.createElement(tag);
  if (text !== undefined) e.textContent = text;
  if (className) e.className = className;
  return e;
}

function panel() {
  const step = job.steps[state.step], many = state.charts.length > 1, table = $("figures");
  const folded = [...new Set(inView().flatMap((i) => state.charts[i].meta.folded))];
  $("fold").hidden = !folded.length;
  $("fold").textContent = folding ? "All workers" : "Fold";
  $("note").textContent = [step.note, ...(folding ? folded : [])].filter(Boolean).join("; ");
  $("step-name").textContent = step.name;
  $("slider").setAttribute("aria-valuetext", step.name);
  $("compare").hidden = !many;
  $("compare").textContent = state.shown === null ? "Both" : state.charts[state.shown].meta.title;
  table.replaceChildren();
  if (many) {
    const head = element("tr");
    head.append(element("td"), ...state.charts.map((c) => element("th", c.meta.title)));
    table.append(head);
  }
  for (const [name, values] of step.figures) {
    const row = element("tr");
    row.append(element("td", name), ...values.map((v) => element("td", v)));
    table.append(row);
  }
  $("story").replaceChildren(...step.story.map((line) => element("p", line)));
  routePanel();
}

function routePanel() {
  $("route").hidden = !state.route;
  if (!state.route) return;
  const pane = inView().includes(state.pane) ? state.pane : inView()[0], chart = state.charts[pane], route = state.route[pane];
  const [d, i] = homeOf(chart, route.microbatch);
  $("route-title").textContent = `Micro-batch ${route.microbatch} (pipeline ${d}, index ${i})` + (state.charts.length > 1 ? `, ${chart.meta.title}` : "");
  $("route-ops").replaceChildren(...route.ops.map((op) => {
    const k = KINDS[chart.kind[op]], marks = chart.marks[op], item = element("li"), button = element("button");
    const swatch = element("span", k, "swatch");
    Object.assign(swatch.style, { background: job.fill[k], color: job.text[k] });
    const words = [marks & REROUTED && "re-routed", marks & CUT && "cut", marks & LOST && "lost", marks & REDONE && "redone"].filter(Boolean);
    button.type = "button";
    button.append(swatch, element("span", workerName(chart, route.row.get(op)) + (words.length ? " " + words.join(", ") : "")));
    button.append(element("span", `${number(chart.start[op])} – ${number(chart.end[op])}`, "when"));
    button.classList.toggle("now", op === state.cursor && pane === state.pane);
    button.addEventListener("click", () => point(pane, op, true));
    item.append(button);
    return item;
  }));
}

function legend() {
  const used = new Set(job.legend), parts = [];
  const item = (swatch, words) => {
    const span = element("span", undefined, "item");
    span.append(swatch, element("span", words));
    parts.push(span);
  };
  for (const k of KINDS.filter((k) => used.has(k))) {
    const swatch = element("span", k, "swatch");
    Object.assign(swatch.style, { background: job.fill[k], color: job.text[k] });
    item(swatch, job.names[k]);
  }
  const words = { rerouted: "re-routed", cut: "cut off", lost: "lost", redone: "redone", dead: "dead", stall: "stall" };
  for (const [name, text] of Object.entries(words)) if (used.has(name)) item(element("span", "", `swatch ${name}`), text);
  $("legend").replaceChildren(...parts);
}

$("title").textContent = job.title;
$("fit").addEventListener("click", () => { fit(); draw(); });
$("theme").addEventListener("click", theme);
$("compare").addEventListener("click", compare);
$("fold").addEventListener("click", fold);
$("help").addEventListener("click", () => $("keys").showModal());
$("find").addEventListener("keydown", (e) => {
  if (e.key !== "Enter") return;
  e.target.setCustomValidity(find(e.target.value) ? "" : "no such micro-batch or worker");
  e.target.reportValidity();
});
$("find").addEventListener("input", (e) => e.target.setCustomValidity(""));
$("steps").hidden = job.steps.length < 2;
$("slider").max = job.steps.length - 1;
$("slider").value = job.first;
$("slider").addEventListener("input", (e) => showStep(Number(e.target.value)));
new ResizeObserver(() => { if (state.view) { clamp(); draw(); } }).observe(stage);
addEventListener("unhandledrejection", (e) => ($("note").textContent = `This browser cannot show the schedule: ${e.reason}`));
if (matchMedia("(prefers-color-scheme: dark)").matches) theme();
legend();
showStep(job.first);

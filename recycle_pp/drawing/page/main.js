// The page: which step and charts are shown, the view on them, and what mouse and keys do.

const job = JSON.parse(document.getElementById("job").textContent);
const KINDS = job.kinds.map((kind) => kind.letter);  // by code
const STEPS = job.kinds.map((kind) => kind.step);  // 1: sends to the next stage, -1: to the previous one, 0: to none
const $ = (id) => document.getElementById(id);
const canvas = $("canvas"), ctx = canvas.getContext("2d"), stage = $("stage");
const state = { step: 0, shown: null, charts: [], view: null, route: null, cursor: EMPTY, pane: 0, pointer: null };
const unpacked = new Map();  // data id -> chart; only the last few steps
let ink = colours(), asked = false;

// ---- what is shown

async function showStep(step) {
  state.step = step;
  const metas = job.steps[step].charts;
  const charts = await Promise.all(metas.map(load));
  if (state.step !== step) return;  // the slider has moved in the meantime
  const same = state.charts.length === charts.length && state.charts.every((c, i) => c.rows === charts[i].rows);
  state.charts = charts;
  state.cursor = EMPTY;
  state.pane = charts.length - 1;
  if (state.shown !== null && state.shown >= charts.length) state.shown = null;
  const wanted = state.route?.[0]?.microbatch;
  state.route = null;
  if (!same || !state.view) fit(); else clamp();
  if (wanted !== undefined) select(wanted);
  panel();
  draw();
}

async function load(meta) {
  if (!unpacked.has(meta.data)) {
    if (unpacked.size > 8) unpacked.delete(unpacked.keys().next().value);
    unpacked.set(meta.data, unpack(meta));
  }
  return unpacked.get(meta.data);
}

const inView = () => (state.shown === null ? state.charts.map((_, i) => i) : [state.shown]);

function panes() {
  const box = stage.getBoundingClientRect(), list = inView(), each = box.height / list.length;
  return list.map((i, n) => {
    const title = state.charts.length > 1 ? 18 : 0, foot = state.charts.some((c) => c.meta.recovery) ? PHASES : 8;
    return { chart: i, x: LABELS, y: n * each + title + AXIS, w: Math.max(50, box.width - LABELS - 10), h: Math.max(20, each - title - AXIS - foot), top: n * each };
  });
}

// Charts with the same unit share the time axis. Otherwise each has its own axis, and all axes move together.
const scaleOf = (i) => (state.charts[i].meta.unit === state.charts[0].meta.unit ? 1 : state.charts[i].meta.span / state.charts[0].meta.span);
const viewOf = (i) => ({ ...state.view, t0: state.view.t0 * scaleOf(i), t1: state.view.t1 * scaleOf(i), ratio: devicePixelRatio || 1 });
const wholeSpan = () => Math.max(...state.charts.map((c, i) => c.meta.span / scaleOf(i)));
const tallest = () => Math.max(...inView().map((i) => heightOf(state.charts[i])));

function fit() {
  const h = Math.min(...panes().map((p) => p.h));
  state.view = { t0: 0, t1: wholeSpan() * 1.005, top: 0, row: Math.min(34, h / tallest()) };
}

function clamp() {
  const v = state.view, whole = wholeSpan() * 1.005, h = Math.min(...panes().map((p) => p.h));
  const length = Math.min(Math.max(v.t1 - v.t0, whole * 1e-6), whole);
  v.t0 = Math.min(Math.max(v.t0, 0), whole - length);
  v.t1 = v.t0 + length;
  v.row = Math.min(60, Math.max(v.row, Math.min(34, h / tallest())));
  v.top = Math.max(0, Math.min(v.top, tallest() - h / v.row));
}

function zoomTime(factor, at) {
  const v = state.view, t = at ?? (v.t0 + v.t1) / 2;
  v.t0 = t - (t - v.t0) * factor;
  v.t1 = t + (v.t1 - t) * factor;
  changed();
}

function zoomRows(factor, at) {
  const v = state.view, place = at ?? v.top + panes()[0].h / v.row / 2, before = v.row;
  v.row /= factor;
  v.row = Math.min(60, v.row);
  v.top = place - ((place - v.top) * before) / v.row;
  changed();
}

function changed() {
  clamp();
  draw();
}

function draw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    const began = performance.now(), box = stage.getBoundingClientRect(), ratio = devicePixelRatio || 1;
    const w = Math.round(box.width * ratio), h = Math.round(box.height * ratio);
    if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.fillStyle = ink.paper;
    ctx.fillRect(0, 0, box.width, box.height);
    let near = true;
    for (const pane of panes()) {
      const chart = state.charts[pane.chart];
      if (state.charts.length > 1) {
        ctx.font = "600 12px system-ui, Arial, sans-serif";
        ctx.textAlign = "left";
        ctx.textBaseline = "top";
        ctx.fillStyle = ink.ink;
        ctx.fillText(chart.meta.title, 10, pane.top + 5);
      }
      const filled = { ...pane, h: Math.min(pane.h, (heightOf(chart) - state.view.top) * state.view.row) };
      near = paint(ctx, chart, filled, viewOf(pane.chart), ink, state.route?.[pane.chart], pane.chart === state.pane ? state.cursor : EMPTY);
    }
    // for tests: the time of the first picture, the duration of the last one, and its level of detail
    document.body.dataset.painted ??= performance.now().toFixed(0);
    Object.assign(document.body.dataset, { frame: (performance.now() - began).toFixed(1), step: state.step, detail: near ? "boxes" : "pixels" });
    document.body.dataset.view = JSON.stringify(state.view);
  });
}

// ---- selection

function select(microbatch) {
  const known = microbatch >= 0 && state.charts.some((c) => c.meta.counts.reduce((a, b) => a + b, 0) > microbatch);
  state.route = known ? state.charts.map((c) => routeOf(c, microbatch)) : null;
  panel();
  draw();
}

function point(pane, op, follow) {
  state.pane = pane;
  state.cursor = op;
  const chart = state.charts[pane];
  $("said").textContent = describe(chart, op);
  if (follow) reveal(pane, op);
  draw();
}

function reveal(pane, op) {
  if (placeOf(state.charts[pane], rowOf(state.charts[pane], op)) === HIDDEN) fold();
  const chart = state.charts[pane], v = state.view, at = placeOf(chart, rowOf(chart, op)), h = panes()[0].h / v.row;
  const t = (chart.start[op] + chart.end[op]) / 2 / scaleOf(pane), length = v.t1 - v.t0;
  if (t < v.t0 || t > v.t1) [v.t0, v.t1] = [t - length / 2, t + length / 2];
  if (at < v.top || at + 1 > v.top + h) v.top = at - h / 2;
  clamp();
}

function find(text) {
  const worker = text.trim().match(/^W?\(?(\d+)[.,](\d+)\)?$/), chart = state.charts[inView()[0]];
  if (worker) {
    const row = Number(worker[1]) * chart.meta.stages + Number(worker[2]);
    if (Number(worker[2]) >= chart.meta.stages || row >= chart.rows) return false;
    if (placeOf(chart, row) === HIDDEN) fold();
    const v = state.view, h = panes()[0].h;
    v.row = Math.max(v.row, 18);
    v.top = placeOf(chart, row) - h / v.row / 2;
    changed();
    return true;
  }
  if (!/^\d+$/.test(text.trim())) return false;
  select(Number(text));
  return state.route !== null;
}

// ---- mouse

function under(event) {
  const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const list = panes(), pane = list.find((p) => y < p.y + p.h + 8) ?? list.at(-1), view = viewOf(pane.chart), chart = state.charts[pane.chart];
  const t = view.t0 + ((x - pane.x) / pane.w) * (view.t1 - view.t0), place = view.top + (y - pane.y) / view.row;
  const inside = x >= pane.x && x <= pane.x + pane.w && y >= pane.y && y <= pane.y + pane.h;
  let row = inside ? rowAt(chart, place) : EMPTY;
  if (row !== EMPTY && !isFolded(chart) && view.row * view.ratio < 1) {  // several rows share the pixel: find the painted one
    for (let r = row, end = Math.min(chart.rows, row + Math.ceil(1 / view.row)); r < end; r++) if (chart.interest[r] > chart.interest[row]) row = r;
  }
  return { x, y, t, place, chart: pane.chart, row, op: row === EMPTY ? EMPTY : opAt(chart, row, t) };
}

function tip(hit) {
  const box = $("tip"), chart = state.charts[hit.chart];
  let text = "";
  if (hit.op !== EMPTY) text = describe(chart, hit.op);
  else if (hit.row !== EMPTY) {
    const dead = hit.t >= chart.deadFrom[hit.row];
    text = `${workerName(chart, hit.row)} ${dead ? "dead" : "idle"} at ${number(hit.t)} ${chart.meta.unit}`;
  }
  box.hidden = !text;
  box.textContent = text;
  if (!text) return;
  const w = stage.clientWidth, h = stage.clientHeight;
  box.style.left = `${Math.min(hit.x + 14, w - box.offsetWidth - 4)}px`;
  box.style.top = `${hit.y + 16 + box.offsetHeight > h ? hit.y - box.offsetHeight - 8 : hit.y + 16}px`;
}

canvas.addEventListener("pointerdown", (e) => {
  canvas.setPointerCapture(e.pointerId);
  state.pointer = { x: e.clientX, y: e.clientY, moved: false, view: { ...state.view } };
});
canvas.addEventListener("pointermove", (e) => {
  const p = state.pointer;
  if (!p) return tip(under(e));
  const dx = e.clientX - p.x, dy = e.clientY - p.y, pane = panes()[0], length = p.view.t1 - p.view.t0;
  if (!p.moved && Math.hypot(dx, dy) < 4) return;
  p.moved = true;
  $("tip").hidden = true;
  canvas.classList.add("dragging");
  const t0 = p.view.t0 - (dx / pane.w) * length;
  Object.assign(state.view, { t0, t1: t0 + length, top: p.view.top - dy / state.view.row });
  changed();
});
canvas.addEventListener("pointerup", (e) => {
  const p = state.pointer;
  state.pointer = null;
  canvas.classList.remove("dragging");
  if (!p || p.moved) return;
  const hit = under(e), g = hit.op === EMPTY ? -1 : state.charts[hit.chart].microbatch[hit.op];
  if (hit.op !== EMPTY) point(hit.chart, hit.op, false);
  else state.cursor = EMPTY;
  select(g);
});
canvas.addEventListener("pointerleave", () => ($("tip").hidden = true));
canvas.addEventListener("dblclick", () => { fit(); draw(); });
canvas.addEventListener("wheel", (e) => {
  e.preventDefault();
  const hit = under(e), step = Math.exp((e.deltaMode ? 16 : 1) * (e.deltaY || (e.shiftKey ? e.deltaX : 0)) * 0.0016);
  if (e.shiftKey) return zoomRows(step, hit.place);
  if (Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
    const by = (e.deltaX / panes()[0].w) * (state.view.t1 - state.view.t0);
    state.view.t0 += by;
    state.view.t1 += by;
    return changed();
  }
  zoomTime(step, hit.t / scaleOf(hit.chart));
}, { passive: false });

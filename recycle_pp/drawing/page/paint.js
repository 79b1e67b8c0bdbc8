// Draws one chart into one rectangle of the canvas. There are two levels of detail: boxes with numbers, and rows of
// pixels. The colour of a pixel is the mean of its ops, weighted by the share of the pixel that each covers. Ops that
// are smaller than a pixel thus do not flicker.

const LABELS = 64, AXIS = 24, PHASES = 18, MOST_BOXES = 12000;

function colours() {
  const css = getComputedStyle(document.documentElement);
  const of = (name) => css.getPropertyValue(`--${name}`).trim();
  const out = {};
  for (const n of ["paper", "ink", "soft", "line", "stripe", "idle", "alarm", "stall", "hatch"]) out[n] = of(n);
  // colours of rows of pixels, indexed by kind + 5 * look; look: 0 plain, 1 re-routed, 2 lost, 3 redone, 4 cut
  out.looks = KINDS.flatMap((k) => [rgb(job.fill[k])]);
  const ink = rgb(out.ink), alarm = rgb(out.alarm);
  out.looks.push(...KINDS.map((k) => mix(rgb(job.fill[k]), ink, 0.6)), ...KINDS.map((k) => mix(rgb(job.fill[k]), alarm, 0.5)));
  out.looks.push(...KINDS.map((k) => mix(rgb(job.fill[k]), alarm, 0.65)), ...KINDS.map(() => alarm));
  out.dim = out.looks.map((c) => mix(c, rgb(out.paper), 0.78));
  out.dimFill = KINDS.map((k) => `rgb(${mix(rgb(job.fill[k]), rgb(out.paper), 0.78).map(Math.round).join(" ")})`);
  return out;
}

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const mix = (a, b, share) => a.map((x, i) => x + (b[i] - x) * share);
const lookOf = (marks) => (marks & CUT ? 4 : marks & REDONE ? 3 : marks & LOST ? 2 : marks & REROUTED ? 1 : 0);

// The gap between pipelines, in rows. 0 if there are too many rows to see it.
const gapOf = (chart) => (chart.rows > 400 || chart.meta.stages === 1 ? 0 : 0.4);
// A large chart is folded at first: only the rows in meta.groups are shown. All other rows have the place HIDDEN.
const HIDDEN = -1e6;
let folding = true;
const isFolded = (chart) => folding && chart.meta.groups !== null;
const placeOf = (chart, row) => (isFolded(chart) ? chart.places[row] : row + Math.floor(row / chart.meta.stages) * gapOf(chart));
const heightOf = (chart) => (isFolded(chart) ? chart.placed : placeOf(chart, chart.rows - 1) + 1);
const shownRows = (chart) => (isFolded(chart) ? chart.meta.groups.flat() : Array.from({ length: chart.rows }, (_, r) => r));
function rowAt(chart, place) {
  if (isFolded(chart)) return chart.meta.groups.flat().find((r) => place >= chart.places[r] && place < chart.places[r] + 1) ?? EMPTY;
  const group = chart.meta.stages + gapOf(chart), d = Math.floor(place / group), s = Math.floor(place - d * group);
  const row = d * chart.meta.stages + s;
  return place < 0 || s >= chart.meta.stages || row >= chart.rows ? EMPTY : row;
}

// pane: {x, y, w, h} of the plot in CSS pixels; view: {t0, t1, top (rows), row (pixels a row)}
function paint(ctx, chart, pane, view, ink, route, cursor) {
  const kx = pane.w / (view.t1 - view.t0), X = (t) => pane.x + (t - view.t0) * kx;
  const Y = (row) => pane.y + (placeOf(chart, row) - view.top) * view.row;
  const place = { X, Y, kx };
  axis(ctx, chart, pane, view, ink, X);
  ctx.save();
  ctx.beginPath();
  ctx.rect(pane.x, pane.y, pane.w, pane.h);
  ctx.clip();
  stripes(ctx, chart, pane, view, ink, place);
  const rows = visible(chart, pane, view);
  let ops = 0;
  for (const r of rows) ops += firstAfter(chart, r, view.t1) - firstAfter(chart, r, view.t0);
  const boxed = view.row >= 4 && ops <= MOST_BOXES;
  if (boxed) boxes(ctx, chart, view, ink, place, rows, route);
  else pixels(ctx, chart, pane, view, ink, place, rows, route);
  if (boxed) hatching(ctx, chart, pane, view, ink, place, rows);
  if (!isFolded(chart) && gapOf(chart) === 0 && view.row >= 6 && chart.meta.stages > 1) borders(ctx, chart, pane, ink, Y, rows);
  if (route) drawRoute(ctx, chart, view, ink, place, route);
  if (cursor !== EMPTY) {
    const r = rowOf(chart, cursor);
    ctx.strokeStyle = ink.ink;
    ctx.lineWidth = 2;
    ctx.strokeRect(X(chart.start[cursor]) - 1, Y(r) - 1, Math.max(3, (chart.end[cursor] - chart.start[cursor]) * kx) + 2, Math.max(3, view.row) + 1);
  }
  deathLine(ctx, chart, pane, ink, X);
  ctx.restore();
  phases(ctx, chart, pane, ink, X);
  labels(ctx, chart, pane, view, ink, place);
  return boxed;
}

function visible(chart, pane, view) {
  const out = [], last = view.top + pane.h / view.row;
  if (isFolded(chart)) return chart.meta.groups.flat().filter((r) => placeOf(chart, r) <= last && placeOf(chart, r) + 1 >= view.top);
  for (let r = Math.max(0, Math.floor(view.top / (1 + gapOf(chart))) - chart.meta.stages); r < chart.rows; r++) {
    const at = placeOf(chart, r);
    if (at > last) break;
    if (at + 1 >= view.top) out.push(r);
  }
  return out;
}

function stripes(ctx, chart, pane, view, ink, { Y, X }) {
  const P = chart.meta.stages, { recovery } = chart.meta;
  ctx.fillStyle = ink.stripe;
  const groups = isFolded(chart) ? chart.meta.groups : Array.from({ length: chart.meta.pipelines }, (_, d) => ({ 0: d * P, length: P }));
  for (let d = 0; d < groups.length; d += 2) {
    const y = Y(groups[d][0]), h = groups[d].length * view.row;
    if (y < pane.y + pane.h && y + h > pane.y) ctx.fillRect(pane.x, y, pane.w, h);
  }
  if (recovery) {
    ctx.fillStyle = ink.stall;
    ctx.fillRect(X(recovery.died), pane.y, X(recovery.resumed) - X(recovery.died), pane.h);
  }
}

// Lines between pipelines that have no gap.
function borders(ctx, chart, pane, ink, Y, rows) {
  ctx.fillStyle = ink.ink;
  for (const r of rows) if (r % chart.meta.stages === 0) ctx.fillRect(pane.x, Y(r) - 1, pane.w, 1.5);
}

function boxes(ctx, chart, view, ink, { X, Y, kx }, rows, route) {
  const pad = view.row >= 10 ? 1 : 0, h = Math.max(1, view.row - 2 * pad), size = Math.min(12, h - 3);
  ctx.font = `${size}px system-ui, "Segoe UI", Arial, "DejaVu Sans", sans-serif`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  for (const r of rows) {
    const y = Y(r) + pad, last = firstAfter(chart, r, view.t1);
    for (let i = firstAfter(chart, r, view.t0); i <= last && i < chart.first[r + 1]; i++) {
      const x = X(chart.start[i]), w = (chart.end[i] - chart.start[i]) * kx, k = chart.kind[i], marks = chart.marks[i];
      const faint = route && chart.microbatch[i] !== route.microbatch, inset = w > 6 ? 0.5 : 0;
      ctx.fillStyle = marks & CUT ? ink.paper : faint ? ink.dimFill[k] : job.fill[KINDS[k]];
      ctx.fillRect(x + inset, y, Math.max(w - 2 * inset, 0.5), h);
      if (marks && !faint) outline(ctx, ink, marks, x + inset, y, Math.max(w - 2 * inset, 1), h);
      if (size >= 7 && w > 9 && !faint) {
        const text = chart.microbatch[i] < 0 ? KINDS[k] : String(chart.microbatch[i]);
        if (w < text.length * size * 0.6 + 3) continue;
        ctx.fillStyle = marks & CUT ? ink.alarm : job.text[KINDS[k]];
        const full = KINDS[k] + text, room = w > full.length * size * 0.62 + 5 && chart.microbatch[i] >= 0;
        ctx.fillText(room ? full : text, x + w / 2, y + h / 2 + 0.5);
      }
    }
  }
}

function outline(ctx, ink, marks, x, y, w, h) {
  const alarm = marks & (CUT | LOST | REDONE), line = Math.min(2, h / 4);
  if (marks & CUT) slanted(ctx, ink.alarm, x, y, w, h, 4);
  ctx.strokeStyle = alarm ? ink.alarm : "#14181f";
  ctx.lineWidth = line;
  ctx.setLineDash(marks & LOST ? [3, 2] : []);
  if (w > 2 * line) ctx.strokeRect(x + line / 2, y + line / 2, w - line, h - line);
  ctx.setLineDash([]);
}

function slanted(ctx, colour, x, y, w, h, apart) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(x, y, w, h);
  ctx.clip();
  ctx.strokeStyle = colour;
  ctx.lineWidth = 1;
  ctx.beginPath();
  for (let a = x - h - ((x - h) % apart); a < x + w; a += apart) {
    ctx.moveTo(a, y + h);
    ctx.lineTo(a + h, y);
  }
  ctx.stroke();
  ctx.restore();
}

function hatching(ctx, chart, pane, view, ink, { X, Y }, rows) {
  for (const r of rows) {
    const x = Math.max(pane.x, X(chart.deadFrom[r]));
    if (!(x < pane.x + pane.w)) continue;
    slanted(ctx, ink.hatch, x, Y(r) + 1, pane.x + pane.w - x, view.row - 2, 7);
    if (view.row < 11) continue;
    const text = `${workerName(chart, r)} dead`, middle = (x + pane.x + pane.w) / 2, wide = ctx.measureText(text).width + 12;
    ctx.fillStyle = ink.paper;
    ctx.fillRect(middle - wide / 2, Y(r) + 1, wide, view.row - 2);
    ctx.fillStyle = ink.soft;
    ctx.fillText(text, middle, Y(r) + view.row / 2);
  }
}

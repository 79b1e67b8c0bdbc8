// Draws everything around and over the ops: axis, names, the death, the route.

const FONT = '11px system-ui, "Segoe UI", Arial, "DejaVu Sans", sans-serif';

function axis(ctx, chart, pane, view, ink, X) {
  const length = view.t1 - view.t0, rough = (length / pane.w) * 80, power = 10 ** Math.floor(Math.log10(rough));
  const apart = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  ctx.font = FONT;
  ctx.textAlign = "center";
  ctx.textBaseline = "alphabetic";
  ctx.lineWidth = 1;
  for (let n = Math.ceil(view.t0 / apart); n * apart <= view.t1; n++) {
    const x = Math.round(X(n * apart)) + 0.5;
    ctx.strokeStyle = ink.line;
    ctx.beginPath();
    ctx.moveTo(x, pane.y - 4);
    ctx.lineTo(x, pane.y + pane.h);
    ctx.stroke();
    ctx.fillStyle = ink.soft;
    if (x < pane.x + pane.w - 12) ctx.fillText(number(n * apart), x, pane.y - 8);
  }
  ctx.textAlign = "left";
  ctx.fillText(chart.meta.unit, 10, pane.y - 8);
}

function labels(ctx, chart, pane, view, ink, { Y }) {
  const P = chart.meta.stages, bottom = pane.y + pane.h;
  ctx.save();
  ctx.beginPath();
  ctx.rect(0, pane.y, LABELS, pane.h);
  ctx.clip();
  ctx.font = FONT;
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  if (view.row >= 11) {
    for (const r of visible(chart, pane, view)) {
      ctx.fillStyle = chart.deadFrom[r] < Infinity ? ink.alarm : ink.soft;
      ctx.fillText(`${Math.floor(r / P)}.${r % P}`, LABELS - 8, Y(r) + view.row / 2);
    }
  } else {
    const names = isFolded(chart) ? chart.meta.groups.map((g) => [g[0], g.length]) : [];
    for (const [row, length] of names) {
      ctx.fillStyle = ink.soft;
      ctx.fillText(`${Math.floor(row / P)}.${row % P} ...`, LABELS - 8, Y(row) + (length * view.row) / 2);
    }
    const every = Math.max(1, Math.ceil(14 / (view.row * (P + gapOf(chart)))));
    for (let d = 0; d < chart.meta.pipelines && !isFolded(chart); d += every) {
      const y = Y(d * P) + (every === 1 ? (P * view.row) / 2 : 6);
      if (y < pane.y || y > bottom) continue;
      ctx.fillStyle = ink.soft;
      ctx.fillText(`pipe ${d}`, LABELS - 8, y);
    }
    for (const [row] of chart.meta.dead) {  // marks of dead workers, visible even if rows are thin
      ctx.fillStyle = ink.alarm;
      ctx.fillRect(LABELS - 5, Y(row) + view.row / 2 - 1.5, 5, 3);
    }
  }
  ctx.restore();
}

function deathLine(ctx, chart, pane, ink, X) {
  if (!chart.meta.recovery) return;
  ctx.strokeStyle = ink.alarm;
  ctx.lineWidth = 1.5;
  ctx.beginPath();
  ctx.moveTo(X(chart.meta.recovery.died), pane.y);
  ctx.lineTo(X(chart.meta.recovery.died), pane.y + pane.h);
  ctx.stroke();
}

// The phases of the recovery, in the margin below. A phase shows its name if there is room.
function phases(ctx, chart, pane, ink, X) {
  const { recovery } = chart.meta, y = pane.y + pane.h + 1, edge = pane.x + pane.w;
  if (!recovery) return;
  ctx.font = FONT;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  recovery.spans.forEach(([name, begin, end], i) => {
    const a = Math.max(pane.x, X(begin)), w = Math.min(edge, X(end)) - a, text = `${name} +${number(end - recovery.died)}`;
    if (w <= 0) return;
    ctx.fillStyle = i % 2 ? ink.alarm : ink.soft;
    ctx.fillRect(a, y, Math.max(w - 1, 1), PHASES - 3);
    ctx.fillStyle = ink.paper;
    const fits = [text, name].find((t) => w > ctx.measureText(t).width + 8);
    if (fits) ctx.fillText(fits, a + w / 2, y + PHASES / 2 - 1);
  });
}

function drawRoute(ctx, chart, view, ink, { X, Y, kx }, route) {
  const middle = (i) => Y(route.row.get(i)) + view.row / 2;
  ctx.lineWidth = 1.75;
  ctx.strokeStyle = ctx.fillStyle = ink.ink;
  for (const [a, b] of route.links) {  // from just before the sender's end to just after the receiver's start
    if (placeOf(chart, route.row.get(a)) === HIDDEN || placeOf(chart, route.row.get(b)) === HIDDEN) continue;
    const way = middle(b) > middle(a) ? 1 : -1, inset = Math.min(5, (kx * (chart.end[b] - chart.start[b])) / 3);
    const x0 = X(chart.end[a]) - inset, y0 = middle(a) + way * view.row * 0.15, x1 = X(chart.start[b]) + inset;
    const head = way * Math.min(6, view.row / 2), y1 = middle(b) - way * view.row * 0.1 - head;
    const half = Math.max(8, Math.abs(y1 - y0) / 2) * way;
    ctx.setLineDash(STEPS[chart.kind[b]] > 0 ? [] : [5, 3]);
    ctx.beginPath();
    ctx.moveTo(x0, y0);
    ctx.bezierCurveTo(x0, y0 + half, x1, y1 - half, x1, y1);
    ctx.stroke();
    ctx.setLineDash([]);
    ctx.beginPath();
    ctx.moveTo(x1, y1 + head);
    ctx.lineTo(x1 - 3.5, y1);
    ctx.lineTo(x1 + 3.5, y1);
    ctx.fill();
  }
  if (view.row >= 4) return;
  for (const i of route.ops) {  // dots, because the ops are too small in such thin rows
    ctx.fillStyle = job.fill[KINDS[chart.kind[i]]];
    ctx.strokeStyle = ink.ink;
    ctx.beginPath();
    ctx.arc(X((chart.start[i] + chart.end[i]) / 2), middle(i), 4, 0, 7);
    ctx.fill();
    ctx.stroke();
  }
}

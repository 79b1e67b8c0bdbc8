// The far view: rows of pixels, made off screen and stretched to the height of a row.

let sheet = null, sheetInk = null;

function pixels(ctx, chart, pane, view, ink, { Y }, rows, route) {
  const ratio = view.ratio, w = Math.max(1, Math.round(pane.w * ratio));
  const lines = view.row * ratio >= 1 ? rows.map((r) => [r, Y(r), view.row]) : crowded(chart, pane, view, rows, Y);
  if (!sheet || sheet.width !== w || sheet.height < lines.length) {
    sheet = new OffscreenCanvas(w, Math.max(lines.length, 64));
    sheetInk = sheet.getContext("2d");
  }
  const image = sheetInk.createImageData(w, Math.max(1, lines.length));
  const out = new Uint32Array(image.data.buffer), hatch = word(rgb(ink.hatch));
  const sums = new Float32Array(w * 4), kx = w / (view.t1 - view.t0);
  lines.forEach(([row], n) => {
    cover(chart, row, view, kx, w, sums, ink, route);
    const dead = (chart.deadFrom[row] - view.t0) * kx, base = n * w;
    for (let x = 0, s = 0; x < w; x++, s += 4) {
      const a = sums[s + 3];
      if (a > 0.004) {
        out[base + x] = (Math.min(255, a * 255) << 24) | ((sums[s + 2] / a) << 16) | ((sums[s + 1] / a) << 8) | (sums[s] / a);
      } else if (x >= dead && (x + n * 2) % 8 < 3) out[base + x] = hatch;
    }
    sums.fill(0);
  });
  sheetInk.putImageData(image, 0, 0);
  ctx.imageSmoothingEnabled = false;
  if (view.row * ratio < 1) ctx.drawImage(sheet, 0, 0, w, lines.length, pane.x, pane.y, pane.w, lines.length / ratio);
  else for (let n = 0; n < lines.length; n++) ctx.drawImage(sheet, 0, n, w, 1, pane.x, lines[n][1], pane.w, Math.max(lines[n][2] - (view.row > 3 ? 1 : 0), 1 / ratio));
}

// More workers than pixels: of those that share a line the one with most to tell (a death, redone or re-routed ops).
function crowded(chart, pane, view, rows, Y) {
  const best = new Map();
  for (const r of rows) {
    const line = Math.floor((Y(r) - pane.y) * view.ratio), had = best.get(line);
    if (line >= 0 && line < pane.h * view.ratio && (had === undefined || chart.interest[r] > chart.interest[had])) best.set(line, r);
  }
  const lines = [], last = Math.max(-1, ...best.keys());
  for (let n = 0, r = rows[0]; n <= last; n++) {
    r = best.get(n) ?? r;
    lines.push([r]);
  }
  return lines;
}

// Adds the colours of a row's ops, weighted by the share of each pixel that they cover. sums: r, g, b, share.
function cover(chart, row, view, kx, w, sums, ink, route) {
  const { start, end, kind, marks, microbatch, first } = chart, stop = first[row + 1];
  for (let i = firstAfter(chart, row, view.t0); i < stop && start[i] < view.t1; i++) {
    const look = kind[i] + 5 * lookOf(marks[i]);
    const [r, g, b] = route && microbatch[i] !== route.microbatch ? ink.dim[look] : ink.looks[look];
    const a = Math.max(0, (start[i] - view.t0) * kx), z = Math.min(w, (end[i] - view.t0) * kx);
    for (let x = Math.floor(a); x < z; x++) {
      const share = Math.min(z, x + 1) - Math.max(a, x), s = x * 4;
      sums[s] += r * share;
      sums[s + 1] += g * share;
      sums[s + 2] += b * share;
      sums[s + 3] += share;
    }
  }
}

const word = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
